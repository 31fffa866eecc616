"""Wrong data on several processes: one error in each, and nothing hangs."""

import pytest

from tests.support.jobs import values_of

pytestmark = pytest.mark.multi_process

TARGET = "multi_process.bad_input:run"
# What every process is told, by case; and what the failing one is told.
EVERYWHERE = {
    "lengths of arrays": "number of rows: 32 (process 0), 33 (process 1)",
    "contents of arrays": "different rows in step 0",
    "dtypes of arrays": "different rows in step 0",
    "shapes of arrays": "('float32[?, 4]', 'float32[?, 1]') (process 1)",
    "structures of arrays": "in step 0: ('float32[?, 3]', 'float32[?, 1]')",
    "batch sizes": "batch_size: 8 (process 0), 16 (process 1)",
    "a shorter PyDataset": "no batch 3",
    "other numbers of batches": "num_batches: 4 (process 0), 5 (process 1)",
    "a PyDataset in two orders": "different rows in step 0",
    "structure changes in one": "must have the same structure",
    "a generator of two orders": "different rows in step 0",
    "a longer generator": "in step 4: no more rows (process 0), 8 rows",
    "text": "must have a first dimension",
    "an infinite dataset": "Pass `steps_per_epoch`",
    "an unbatched dataset": "Call `.batch(global_batch_size)` first",
    "a ragged dataset": "must be dense tensors",
    "an empty dataset": "need at least one row",
    "too few files": "cannot split this dataset among 2 processes",
    "another call": "`fit` (process 0), preparing the data of `evaluate` (",
    "other epochs": "epochs: 1 (process 0), 2 (process 1)",
    "validation in one": "validation: True (process 0), False (process 1)",
    "steps per epoch": "steps_per_epoch: 2 (process 0), 3 (process 1)",
}
IN_ONE = {
    "a generator fails": "OSError: the disk is gone",
    "a generator fails at K=3": "OSError: the disk is gone",
    "a generator fails at once": "OSError: no such bucket",
    "evaluate fails": "OSError: the disk is gone",
    "predict fails": "OSError: the disk is gone",
    "validation fails": "OSError: the disk is gone",
    "x and y of one process": "ValueError: Data cardinality is ambiguous",
    "strings in one process": "TypeError: The arrays of a batch must contain",
    "a PyDataset's hook": "OSError: no connection",
    "a PyDataset fails": "OSError: cannot decode",
    "a PyDataset with workers fails": "OSError: cannot decode",
    "a cut record": "process 1: DataLossError",
    "own rows fail": "OSError: own disk is gone",
    "a function fails": "OSError: no shard here",
}


# Of arguments, arrays, batches, files and calls, in all processes and in one.
FEW = [
    *("lengths of arrays", "structures of arrays", "batch sizes"),
    *("a shorter PyDataset", "structure changes in one", "too few files"),
    *("a generator of two orders", "another call", "validation in one"),
    *("a generator fails", "evaluate fails", "x and y of one process"),
    *("a PyDataset with workers fails", "a cut record", "own rows fail"),
    "a process stays away",
]


# By default test_loops.py checks them, in the processes of its other tests.
def check(first, second):
    """Wrong data end in one error everywhere."""
    assert first.keys() == second.keys()
    for name, told in first.items():
        other = second[name]
        # The model is used again, and the replicas stay together.
        assert told["after"] == other["after"], name
        if name in EVERYWHERE:
            assert EVERYWHERE[name] in told["error"], name
            assert EVERYWHERE[name] in other["error"], name
        elif name in IN_ONE:
            message = f"process 1: {IN_ONE[name].split(': ')[0]}"
            if "cut" not in name:
                assert message in told["error"], name
            assert IN_ONE[name].split(": ")[-1] in told["error"], name
            assert other["error"].startswith(IN_ONE[name][:8]) or (
                "cut" in name
            ), name
            assert (
                "failed in this process, so all processes stop"
                in other["error"]
            )
        else:
            assert name == "a process stays away"
    away = [value["a process stays away"] for value in (first, second)]
    assert "Stalled: Process 1 did not take part" in away[0]["error"]
    assert "Stalled: Process 0 did not take part" in away[1]["error"]


@pytest.mark.slow
def test_wrong_data_ends_in_one_error_everywhere(tmp_path):
    check(*values_of(TARGET, 2, tmp_path, uses=["tensorflow"]))


@pytest.mark.slow
def test_wrong_data_in_one_of_three_processes(tmp_path):
    names = ["a generator fails", "own rows fail", "a PyDataset fails"]
    values = values_of(TARGET, 3, tmp_path, names)
    for name in names:
        assert all("OSError" in told[name]["error"] for told in values), name
        assert len({str(told[name]["after"]) for told in values}) == 1

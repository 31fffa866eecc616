"""Steps of rows that are each process's own: tf's, and one device's weights.

What tf reads was recorded by `tests.multi_process.record_own_rows`.
"""

import json
import pathlib

import numpy as np
import pytest

from tests.multi_process import own_batches, own_rows
from tests.support.jobs import values_of
from tests.support.numbers import assert_all_close

pytestmark = pytest.mark.multi_process

TARGET = "multi_process.own_batches:read_and_fit"
TABLE = pathlib.Path(__file__).with_name("own_rows.json")
FEW = [
    ("uneven", "batch.cache.map", 5, "FILE"),
    ("even", "shuffle.repeat.batch.map", 4, "OFF"),
]


def check(values, cases):
    """In each case the steps are tf's, and `fit` learns what one device does
    that is fed each step's rows."""
    recorded = json.loads(TABLE.read_text())["steps"]
    model = own_batches.build()
    weights = model.get_weights()
    for case in cases:
        name = own_rows.name_case(*case)
        told = [value[name] for value in values]
        read = together(told, "read")
        check_tf(case, read, recorded)
        steps = [sum(step, []) for step in read]
        fitted = [sum(step, []) for step in together(told, "fitted")]
        assert list(map(sorted, fitted)) == list(map(sorted, steps)), name
        model.set_weights(weights)
        for step in steps:
            model.train_on_batch(*own_rows.features(np.array(step)))
        for one in told:
            assert_all_close(one["weights"], model.get_weights(), name=name)


def check_tf(case, read, recorded):
    """A pipeline's form changes no step here (docs/parity.md).

    Of a map after `batch`, tf does not know the batch size. It then cuts each
    process's batches by themselves, in as many pieces as there are replicas:
    steps of 4 and 2 rows for a batch of 3, and of no rows at the end.
    """
    files, pipeline, size, policy = case
    name = own_rows.name_case(*case)
    form = own_rows.known(pipeline)
    assert read == recorded[own_rows.name_case(files, form, size, policy)], name
    if files == "even" and size % 2 == 0:
        assert read == recorded[name], name
    if not own_rows.is_infinite(pipeline):
        assert rows_in_order(read) == rows_in_order(recorded[name]), name
        assert len(recorded[name]) - len(read) in (0, 1), name


def rows_in_order(steps):
    """The rows of each process."""
    return [sum(rows, []) for rows in zip(*steps, strict=True)]


def together(told, loop):
    """The rows of both processes, by step."""
    one, other = (process[loop] for process in told)
    return [list(step) for step in zip(one, other, strict=True)]


# By default test_loops.py has few of them, in the processes of its other tests.
@pytest.mark.slow
def test_steps_of_own_rows_are_those_of_tf_in_all_cases(tmp_path):
    own_rows.write_files(tmp_path)
    options = {"devices": 1, "uses": ["tensorflow"], "timeout_s": 900}
    values = values_of(TARGET, 2, tmp_path, own_rows.CASES, **options)
    check(values, own_rows.CASES)

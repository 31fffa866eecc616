"""Feeds go on where a killed job's were, on other numbers of processes."""

import itertools
import json
import signal

import pytest

import keras_strategies as ks
from keras_strategies.testing import run_processes
from tests.multi_process import killed

pytestmark = pytest.mark.multi_process

GO_ON = "tests.multi_process.killed:go_on"
STEPS = -(-killed.ROWS // killed.SIZE)


# Sources that go on in threads: tests/fit/inputs/test_positions.py.
@pytest.mark.slow
def test_a_killed_job_goes_on_with_the_same_batches(tmp_path):
    killed.write_files(tmp_path)
    for count, stop, is_killed in [(2, 3, True), (1, 5, True), (3, 99, False)]:
        results = run_processes(
            GO_ON,
            count,
            args=[str(tmp_path), stop, is_killed],
            timeout_s=240,
            must_succeed=not is_killed,
        )
        if is_killed:
            assert results[0].returncode == -signal.SIGKILL, results[0].output
    strategy = ks.MirroredStrategy()
    for name in killed.SOURCES:
        lines = (tmp_path / f"{name}.rows").read_text().splitlines()
        read = [json.loads(line) for line in lines]
        assert len(read) == STEPS
        assert sorted(itertools.chain(*read)) == list(range(killed.ROWS))
        # What one process would have read that nobody killed.
        state = json.loads((tmp_path / f"{name}.state").read_text())
        whole = killed.make_iterator(name, strategy, tmp_path)
        whole.set_state(state | {"step": 0})
        batches = [killed.first_column(strategy, batch) for batch in whole]
        assert read == batches, name
    is_ordered = {
        name: (tmp_path / f"{name}.rows").read_text().startswith("[0.0, 1.0,")
        for name in killed.SOURCES
    }
    assert [name for name, is_so in is_ordered.items() if is_so] == [
        "arrays",
        "PyDataset",
        "factory",
    ]

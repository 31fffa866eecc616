"""Files are the chief's; a backup is restored by all."""

import numpy as np
import pytest

from tests.support.jobs import values_of_each
from tests.support.numbers import assert_all_close

pytestmark = pytest.mark.multi_process

ROOM = "multi_process.with_callbacks"


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """A directory, and what functions return in the two processes of a job."""
    directory = tmp_path_factory.mktemp("job")
    calls = [
        (f"{ROOM}:files", directory),
        *(
            (f"{ROOM}:own_checkpoints", directory / f"kept{k}", k)
            for k in (0, 1)
        ),
    ]
    return directory, values_of_each(2, *calls)


def test_the_chief_writes_and_all_restore(job):
    directory, ((first, second), *_) = job
    for name in ("history", "rest", "weights", "again"):
        assert first[name] == second[name]
    assert (directory / "0.keras").exists()
    assert not (directory / "1.keras").exists()
    # A subclass is called in all processes.
    assert first["rows"] == second["rows"] == 21
    assert (directory / "own_0.keras").exists()
    assert (directory / "own_1.keras").exists()
    lines = (directory / "log.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", *"0123"]
    # The epochs after the interruption, and no others, were run again.
    assert len(first["rest"]["loss"]) == 2
    np.testing.assert_allclose(
        first["rest"]["loss"], first["history"]["loss"][2:], rtol=1e-5
    )
    assert_all_close(first["again"], first["weights"])
    assert "must find the same backup" in first["refused"]


@pytest.mark.parametrize("index", [0, 1])
def test_one_process_of_a_job_keeps_its_own(job, index):
    directory, (_, *values) = job
    value = values[index][index]
    if index == 1:
        assert "Received: variables of the processes" in value
        assert "[1]" in value
        assert not (directory / "kept1").exists()
        return
    trained, again, best = value
    assert again == trained
    assert best == trained

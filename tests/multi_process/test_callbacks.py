"""Files are the chief's; a backup is restored by all."""

import numpy as np
import pytest

from tests.support.jobs import values_of
from tests.support.numbers import assert_all_close


def test_the_chief_writes_and_all_restore(tmp_path):
    first, second = values_of("multi_process.with_callbacks:files", 2, tmp_path)
    for name in ("history", "rest", "weights", "again"):
        assert first[name] == second[name]
    assert (tmp_path / "0.keras").exists()
    assert not (tmp_path / "1.keras").exists()
    # A subclass is called in all processes.
    assert first["rows"] == second["rows"] == 21
    assert (tmp_path / "own_0.keras").exists()
    assert (tmp_path / "own_1.keras").exists()
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["epoch", *"0123"]
    # The epochs after the interruption, and no others, were run again.
    assert len(first["rest"]["loss"]) == 2
    np.testing.assert_allclose(
        first["rest"]["loss"], first["history"]["loss"][2:], rtol=1e-5
    )
    assert_all_close(first["again"], first["weights"])
    assert "must find the same backup" in first["refused"]


@pytest.mark.parametrize("index", [0, 1])
def test_one_process_of_a_job_keeps_its_own(tmp_path, index):
    target = "multi_process.with_callbacks:own_checkpoints"
    value = values_of(target, 2, tmp_path / "kept", index)[index]
    if index == 1:
        assert "Received: variables of the processes" in value
        assert "[1]" in value
        assert not (tmp_path / "kept").exists()
        return
    trained, again, best = value
    assert again == trained
    assert best == trained

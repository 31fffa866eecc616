"""The environment of processes that `run_processes` starts."""

import pytest

from keras_strategies.testing import run_processes

pytestmark = pytest.mark.multi_process

COUNT = "--xla_force_host_platform_device_count"


def test_flags_in_a_file_are_kept(tmp_path, monkeypatch):
    file = tmp_path / "flags"
    file.write_text(f"--xla_dump_to=a\n{COUNT}=8\n")
    monkeypatch.setenv("XLA_FLAGS", str(file))
    (result,) = run_processes(
        "os:getenv", 1, args=["XLA_FLAGS"], devices_per_process=3
    )
    assert result.value.split() == ["--xla_dump_to=a", f"{COUNT}=3"]


def test_flags_in_no_file_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path))
    with pytest.raises(ValueError, match=r"XLA_FLAGS must.*Received.*Correct"):
        run_processes("os:getenv", 1, args=["XLA_FLAGS"])

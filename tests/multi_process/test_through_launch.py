"""`keras-strategies launch`: all loops give one process's numbers."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from tests.multi_process.test_loops import assert_close
from tests.multi_process.through_launch import SIZE

ROOT = pathlib.Path(__file__).parents[2]
LIMIT_S = 300


def launched(folder, processes, devices):
    """What each process found."""
    folder.mkdir()
    words = ["launch", "--processes", processes]
    words += ["--devices-per-process", devices]
    words += ["-m", "tests.multi_process.through_launch", folder]
    start = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "keras_strategies.cli", *map(str, words)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    seconds = time.monotonic() - start
    print(f"{processes} x {devices}: {seconds:.1f} s")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    paths = [folder / f"{process}.json" for process in range(processes)]
    return [json.loads(path.read_text()) for path in paths]


# test_loops.py and test_custom_loops.py have the same loops without a launcher.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "devices"), [(2, 1), (2, 2), (3, 1), (3, 2)]
)
def test_all_loops_equal_those_of_one_process(tmp_path, processes, devices):
    (one,) = launched(tmp_path / "one", 1, processes * devices)
    several = launched(tmp_path / "several", processes, devices)
    assert len(one["local"]) == processes * devices
    for process, found in enumerate(several):
        for name in ("loops", "loop"):
            actual, expected = found[name], one[name]
            if name == "loop":
                actual, expected = {"all": actual}, {"all": expected}
            assert_close(actual, expected)
            assert found[name] == several[0][name]
        assert found["replicas"] == processes * devices
        assert found["task"] == process
        # Its own replicas' results alone.
        assert len(found["local"]) == devices
    assert sum(sum(found["local"]) for found in several) == SIZE

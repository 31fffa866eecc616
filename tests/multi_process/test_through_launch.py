"""`keras-strategies launch`: all loops give one process's numbers."""

import json
import os
import pathlib
import re
import time

import pytest

from tests.multi_process.through_launch import SIZE
from tests.support.commands import python
from tests.support.plain_keras import assert_same

pytestmark = pytest.mark.multi_process

ROOT = pathlib.Path(__file__).parents[2]
LIMIT_S = 300


def launch(processes, devices, module, argument, flags=""):
    """How the launcher ended."""
    words = ["launch", "--processes", processes]
    words += ["--devices-per-process", devices]
    words += ["-m", f"tests.multi_process.{module}", argument]
    return python(
        "-m",
        "keras_strategies.cli",
        *map(str, words),
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags},
        timeout=LIMIT_S,
    )


def launched(directory, processes, devices):
    """What each process found."""
    directory.mkdir()
    start = time.monotonic()
    ended = launch(processes, devices, "through_launch", directory)
    seconds = time.monotonic() - start
    print(f"{processes} x {devices}: {seconds:.1f} s")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    paths = [directory / f"{process}.json" for process in range(processes)]
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
            assert_same(one[name], found[name])
            assert found[name] == several[0][name]
        assert found["replicas"] == processes * devices
        assert found["task"] == process
        # Its own replicas' results alone.
        assert len(found["local"]) == devices
    assert sum(sum(found["local"]) for found in several) == SIZE


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_every_process_ends_with_the_cause(process):
    told = {"case": "exception", "process": process, "kind": "fit"}
    ended = launch(2, 1, "faults", json.dumps(told))
    lines = ended.stderr.splitlines()
    print(*lines[-12:], sep="\n")
    assert ended.returncode == 70
    assert f"process {process} ended with exit code 70" in lines[-1]
    assert f"process {process} ends with exit code 70: " in ended.stderr
    # The other one, and the chief as well.
    (said,) = re.findall(
        rf"process {1 - process} ends with exit code 71: .*", ended.stderr
    )
    assert f"process {process} failed: " in said
    assert "user bug (faults.py:" in said

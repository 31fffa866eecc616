"""The example that trains from TFRecord files on two processes."""

import os
import pathlib

import pytest

from tests.support.commands import python

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "sharded_files.py"
HIDING = """
import importlib.util, runpy, sys
importlib.util.find_spec = lambda name: None
runpy.run_path(sys.argv[1], run_name="__main__")
"""


def run(*arguments):
    return python(
        *arguments,
        env=os.environ | {"COLUMNS": "80", "PYTHONIOENCODING": "utf-8"},
        encoding="utf-8",
        timeout=1500,
    )


@pytest.mark.slow
def test_it_tells_who_read_which_file():
    result = run(str(EXAMPLE))
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line for line in result.stdout.splitlines() if ".tfrecord" in line]
    readers = [line.split("│")[-2].strip() for line in lines]
    assert readers == ["0", "1"] * 3


def test_it_asks_for_tensorflow():
    result = run("-c", HIDING, str(EXAMPLE))
    assert result.returncode == 1
    assert "pip install tensorflow-cpu" in result.stderr

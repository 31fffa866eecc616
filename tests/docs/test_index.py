"""The three shapes of use of docs/index.md run, on eight devices."""

import ast
import os
import pathlib
import re

import pytest

from tests.support import compiling
from tests.support.commands import python

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs/index.md"
TEXT = DOCUMENT.read_text("utf-8")
BLOCKS = dict(
    re.findall(r"^## ([^\n]+)\n[^#]*?^```python\n(.*?)^```", TEXT, re.M | re.S)
)


def accuracies(block, folder):
    """What a block prints, run as a script of its own in a folder."""
    flags = "--xla_force_host_platform_device_count=8" + compiling.FLAGS
    root = str(DOCUMENT.parents[1])
    done = python(
        "-c",
        block,
        env=os.environ
        | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": root},
        cwd=folder,
    )
    assert done.returncode == 0, done.stderr
    return [float(n) for n in re.findall(r"^accuracy (\S+)", done.stdout, re.M)]


def test_there_are_three_shapes():
    assert list(BLOCKS) == ["fit", "Custom loop", "Estimator"]
    assert TEXT.count("```python") == len(BLOCKS)
    first, second, third = (ast.dump(ast.parse(b)) for b in BLOCKS.values())
    assert "'scope'" in first
    for name in ("run", "reduce", "experimental_distribute_dataset"):
        assert f"attr='{name}'" in second
    for name in ("Estimator", "RunConfig", "train_and_evaluate"):
        assert f"attr='{name}'" in third


@pytest.mark.parametrize("shape", [*BLOCKS][:2])
def test_a_shape_trains(shape, tmp_path):
    (accuracy,) = accuracies(BLOCKS[shape], tmp_path)
    assert accuracy > 0.9


def test_the_estimator_trains_on_where_it_was(tmp_path):
    block = BLOCKS["Estimator"]
    (first,) = accuracies(block, tmp_path)
    assert first > 0.9
    (second,) = accuracies(
        block.replace("max_steps=50", "max_steps=100"), tmp_path
    )
    assert (tmp_path / "run" / "100").is_dir()
    assert second >= first

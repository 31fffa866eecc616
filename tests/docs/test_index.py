"""The three shapes of use of docs/index.md run, on eight devices."""

import ast
import pathlib
import re

import pytest

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs/index.md"
TEXT = DOCUMENT.read_text("utf-8")
BLOCKS = dict(
    re.findall(r"^## ([^\n]+)\n[^#]*?^```python\n(.*?)^```", TEXT, re.M | re.S)
)


@pytest.fixture
def accuracies(tmp_path, monkeypatch, capsys):
    """What a block prints, run with no other names in a directory, by a
    function."""
    monkeypatch.chdir(tmp_path)

    def run(block):
        exec(block, {"__name__": "__main__"})
        shown = capsys.readouterr().out
        return [float(n) for n in re.findall(r"^accuracy (\S+)", shown, re.M)]

    return run


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
def test_a_shape_trains(shape, accuracies):
    (accuracy,) = accuracies(BLOCKS[shape])
    assert accuracy > 0.9


def test_the_estimator_trains_on_where_it_was(tmp_path, accuracies):
    block = BLOCKS["Estimator"]
    (first,) = accuracies(block)
    assert first > 0.9
    (second,) = accuracies(block.replace("max_steps=50", "max_steps=100"))
    assert (tmp_path / "run" / "100").is_dir()
    assert second >= first

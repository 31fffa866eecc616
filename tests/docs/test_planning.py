"""The code of docs/planning.md."""

import pathlib
import re

import jax
import keras

import keras_strategies as ks

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "planning.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def test_code_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = {"jax": jax, "keras": keras, "ks": ks}
    for block in BLOCKS:
        exec(block, names)
    printed = capsys.readouterr().out
    assert "replicated" in printed
    assert "'weights'" in printed

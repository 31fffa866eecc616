"""The code of docs/sharding.md."""

import pathlib
import re

import jax

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "sharding.md"
BLOCKS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def test_code_runs(capsys):
    names = {"jax": jax}
    for block in BLOCKS:
        exec(block, names)
    assert "FullySharded" in capsys.readouterr().out
    divided = {
        axis
        for v in names["model"].variables
        for axis in v.value.sharding.spec
        if axis
    }
    assert divided == {"model", "replica"}

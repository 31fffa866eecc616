"""The script of docs/estimator.md runs."""

import pathlib
import re

import numpy as np

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs/estimator.md"


def test_the_script_runs(tmp_path, monkeypatch):
    (script,) = re.findall(
        r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S
    )
    assert "max_steps=1000" in script
    script = script.replace("max_steps=1000", "max_steps=2")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TF_CONFIG", raising=False)
    images = np.zeros((40, 4, 4), "float32")

    def input_fn():
        return {"image": images}, np.arange(40, dtype="int32") % 10

    names = {"train_input_fn": input_fn, "eval_input_fn": input_fn}
    exec(script, names)
    assert names["estimator"].get_variable_value("global_step") == 2
    exported = list((tmp_path / "digits/export/best_exporter").iterdir())
    assert len(exported) == 1

"""docs/performance.md: its code runs, and its tables have what is printed."""

import pathlib
import re

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.reporting import document, figures
from tests.docs.example_names import common_names

TEXT = (pathlib.Path(__file__).parents[2] / "docs/performance.md").read_text()
FIT, TRACE, LOOP = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)


@pytest.mark.parametrize("block", [FIT, LOOP], ids=["fit", "loop"])
def test_the_code_runs(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = common_names()
    exec(block, names)
    assert names["report"].figures["steps"] > 0
    assert "time of a step" in capsys.readouterr().out
    directory = "run" if "fit" in block else "loop"
    assert (tmp_path / directory / "run_report.json").exists()


def test_steps_are_traced(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = common_names()
    exec(TRACE, names)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.ones((15, 1))
    model.fit(x, x, batch_size=1, verbose=0, callbacks=[names["Trace"]()])
    assert list(tmp_path.glob("run/profile/**/*.trace.json.gz"))


def test_rows_of_the_table_are_described():
    report = document.add_start(None, 0.0, 0)
    labels = {label.strip() for label in document.describe_report(report)}
    unnamed = {"steps", "for", "time after it", "compiled programs", "advice"}
    described = TEXT.replace("tokens per second", "rows, tokens per second")
    for label in labels - unnamed:
        words = label.replace("rows per second", "rows, tokens per second")
        assert words in described, label


def test_logs_have_the_names_of_the_page():
    with ks.MirroredStrategy().scope():
        model = keras.Sequential([keras.layers.Embedding(9, 4)])
        model.compile("sgd", "mse")
    report = ks.callbacks.RunReport(verbose=False)
    x, y = np.ones((64, 3), int), np.ones((64, 3, 4))
    model.fit(x, y, batch_size=16, verbose=0, callbacks=[report])
    logs = figures.pick_logs(report.figures | {"mfu": 0.5})
    assert len(logs) == 5
    for name in logs:
        assert f"`{name}`" in TEXT

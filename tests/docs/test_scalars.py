"""docs/scalars.md: its code runs, and writes what its table has."""

import logging
import pathlib
import re

import keras
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import (
    EventAccumulator,
)

import keras_strategies as ks
from tests.support.plain_keras import dense, mirrored

TEXT = (pathlib.Path(__file__).parents[2] / "docs/scalars.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
_random = np.random.default_rng(0)
X = _random.normal(size=(64, 3)).astype("float32")
Y = _random.normal(size=(64, 1)).astype("float32")


def compiled(**arguments):
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((3,)), dense(1)])
        arguments = {"loss": "mse", "metrics": ["mae"]} | arguments
        model.compile("sgd", **arguments)
    return model


def points(directory):
    """{tag: its steps} of a directory."""
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    return {
        tag: [event.step for event in reader.Scalars(tag)]
        for tag in reader.Tags()["scalars"]
    }


@pytest.fixture
def scalars(tmp_path, monkeypatch):
    """What the first block writes; 30 steps an epoch in place of data."""
    monkeypatch.chdir(tmp_path)
    (script,) = (block for block in BLOCKS if "model.fit" in block)
    assert "every_n_steps=100" in script
    script = script.replace("every_n_steps=100", "every_n_steps=3")
    names = {"ks": ks, "model": compiled(), "x": X, "y": Y}
    exec(script, names | {"x_val": X[:8], "y_val": Y[:8]})
    return tmp_path / "logs" / "first"


def table(directory):
    """The tags that the page lists for a directory, of a model with `mae`."""
    found, current = {}, ""
    for line in re.findall(r"^\|(.*)\|$", TEXT, re.M)[2:]:
        where, tags, _ = line.split("|")
        current = where.strip() or current
        found[current] = found.get(current, "") + tags
    (text,) = (tags for where, tags in found.items() if directory in where)
    return text


def test_the_table_is_what_is_written(scalars):
    found = points(scalars)
    named = set(re.findall(r"`([\w/]+)`", table("`logs/first`")))
    # Not tags: `fit`, `MultiOptimizer`. Numbers are of several optimizers.
    named = {tag for tag in named if re.fullmatch(r"[a-z_/]+", tag)} - {"fit"}
    assert set(found) == named | {"mae"}
    # Each step that 3 divides, and the last one: 5 epochs of 2 steps.
    assert found["loss"] == found["learning_rate"] == [3, 6, 9, 10]


def test_validation_is_written_at_the_step_trained_so_far(scalars):
    assert points(scalars / "eval") == {
        "loss": [2, 4, 6, 8, 10],
        "mae": [2, 4, 6, 8, 10],
    }


def test_the_first_step_that_an_execution_reaches_is_written(tmp_path):
    assert "with K=3, step 102 instead of step 100" in " ".join(TEXT.split())
    model = compiled(steps_per_execution=3)
    scalars = ks.callbacks.Scalars(tmp_path, every_n_steps=4)
    model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[scalars])
    # Executions end at 3, 6, 8; 11, 14, 16; 19, 22, 24.
    assert points(tmp_path)["loss"] == [6, 8, 14, 16, 22, 24]


def test_the_log_has_the_lines_that_are_shown(caplog):
    (script,) = (block for block in BLOCKS if "logging" in block)
    assert 'getLogger("keras_strategies").setLevel(logging.INFO)' in script
    (shown,) = re.findall(r"^```text\n(step .*)\n```", TEXT, re.M)
    form = re.escape(re.sub(r"[\d][\d.]*( \d{3})?", "0", shown))
    form = form.replace("0", r"\d[\d. e+-]*").replace("accuracy", "mae")
    scalars = ks.callbacks.Scalars(None, log_every_n_steps=2)
    with caplog.at_level(logging.INFO, "keras_strategies"):
        compiled().fit(X, Y, batch_size=8, verbose=0, callbacks=[scalars])
    lines = [line for line in caplog.messages if line.startswith("step ")]
    assert len(lines) == 4
    # The first point has no speed of a whole stretch yet.
    assert re.fullmatch(form, lines[-1]), (form, lines)


def test_a_loaded_model_continues_where_it_was(tmp_path):
    model = compiled()
    model.fit(X, Y, batch_size=8, verbose=0)
    model.save(tmp_path / "model.keras")
    with mirrored(2).scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    scalars = ks.callbacks.Scalars(tmp_path / "logs", every_n_steps=4)
    loaded.fit(X, Y, batch_size=8, verbose=0, callbacks=[scalars])
    assert points(tmp_path / "logs")["loss"] == [12, 16]


def test_a_plain_model_is_refused(tmp_path):
    model = keras.Sequential([keras.Input((3,)), dense(1)])
    model.compile("sgd", "mse")
    scalars = ks.callbacks.Scalars(tmp_path, every_n_steps=2)
    with pytest.raises(RuntimeError, match="MirroredStrategy"):
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=[scalars])

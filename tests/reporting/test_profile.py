"""`RunReport(profile=...)`: traces of some steps."""

import glob
import gzip
import json

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.names.phases import parse_steps


def make_model(strategy, **options):
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", **options)
    return model


def fit(callbacks=(), epochs=1, **options):
    model = make_model(ks.MirroredStrategy(jax.devices()[:2]), **options)
    x = np.ones((40, 4), "float32")
    model.fit(
        x,
        x[:, :1],
        batch_size=4,
        epochs=epochs,
        verbose=0,
        callbacks=list(callbacks),
    )
    return model


def events_in(directory):
    """The annotations of a process's trace, by name."""
    (path,) = glob.glob(
        f"{directory}/process_0/**/*.trace.json.gz", recursive=True
    )
    with gzip.open(path) as file:
        found = json.load(file)["traceEvents"]
    # An annotation's arguments are texts.
    return {
        name: [e for e in found if e.get("name") == name]
        for name in ("train", "input", "program", "callbacks", "save")
    }


def steps_in(directory):
    return [int(e["args"]["step_num"]) for e in events_in(directory)["train"]]


def test_the_steps_are_traced_with_their_phases(tmp_path, capsys):
    report = ks.callbacks.RunReport(tmp_path, verbose=False, profile="3:5")
    fit([report], epochs=2)
    events = events_in(tmp_path / "profile")
    assert steps_in(tmp_path / "profile") == [3, 4, 5]
    assert len(events["input"]) == len(events["program"]) == 3
    for step, read in zip(events["train"], events["input"], strict=True):
        assert step["ts"] <= read["ts"] <= step["ts"] + step["dur"]
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Steps 3 to 5 were traced to ")


def test_programs_of_several_steps_are_traced_whole(tmp_path):
    report = ks.callbacks.RunReport(tmp_path, verbose=False, profile="4:5")
    fit([report], epochs=2, steps_per_execution=5)
    assert steps_in(tmp_path / "profile") == [1]
    report = ks.callbacks.RunReport(
        tmp_path / "later", verbose=False, profile="8:12"
    )
    fit([report], epochs=2, steps_per_execution=5)
    assert steps_in(tmp_path / "later" / "profile") == [6, 11]


def test_a_loop_of_ones_own_is_traced(tmp_path):
    strategy = ks.MirroredStrategy(jax.devices()[:2])
    batches = strategy.experimental_make_numpy_dataset(
        np.ones((20, 4), "float32")
    ).batch(4)
    report = ks.callbacks.RunReport(tmp_path, verbose=False, profile="2:3")
    with report:
        for batch in strategy.experimental_distribute_dataset(batches):
            with report.step(rows=4):
                strategy.run(lambda x: x.sum(), args=(batch,))
    assert steps_in(tmp_path / "profile") == [2, 3]


def test_saves_are_in_the_trace(tmp_path):
    saved = ks.callbacks.Checkpoint(tmp_path / "run", save_every_steps=2)
    report = ks.callbacks.RunReport(verbose=False, profile="3:6")
    fit([saved, report])
    assert len(events_in(tmp_path / "run" / "profile")["save"]) == 2


def test_steps_that_never_come_are_one_line(tmp_path, caplog):
    report = ks.callbacks.RunReport(tmp_path, verbose=False, profile="30:31")
    fit([report])
    (line,) = [m for m in caplog.messages if "traced" in m]
    assert line == (
        "No step was traced: the first one to trace is step 30, but the fit "
        "ended after 10 steps. Choose earlier steps."
    )
    assert not (tmp_path / "profile").exists()


def test_a_fit_that_ends_early_writes_what_it_traced(tmp_path, caplog):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                raise KeyError("stop")

    report = ks.callbacks.RunReport(tmp_path, verbose=False, profile="3:100")
    with pytest.raises(KeyError, match="stop"):
        fit([Stop(), report])
    assert steps_in(tmp_path / "profile") == [3, 4, 5, 6]
    # And the next trace can begin.
    report = ks.callbacks.RunReport(
        tmp_path / "next", verbose=False, profile="1"
    )
    fit([report])
    assert steps_in(tmp_path / "next" / "profile") == [1]


def test_another_trace_is_left_alone(tmp_path, caplog):
    report = ks.callbacks.RunReport(tmp_path, verbose=False, profile="2")
    with jax.profiler.trace(str(tmp_path / "mine")):
        fit([report])
    (line,) = [m for m in caplog.messages if "traced" in m]
    assert line.startswith("The steps are not traced: ")
    assert glob.glob(f"{tmp_path}/mine/**/*.xplane.pb", recursive=True)


@pytest.mark.parametrize(
    "steps",
    ["", "0", "3:2", "1:2000", "a", "1:", ":3", "1:2:3", "٣", " 1", 3, (1, 2)],
)
def test_wrong_steps_are_refused_at_once(steps):
    with pytest.raises(ValueError, match="must be the first and the last step"):
        ks.callbacks.RunReport("run", profile=steps)


def test_traces_need_a_directory():
    with pytest.raises(ValueError, match="Pass `directory`"):
        fit([ks.callbacks.RunReport(verbose=False, profile="1")])


def test_steps_are_parsed():
    assert parse_steps("7", "x") == (7, 7)
    assert parse_steps("7:1006", "x") == (7, 1006)

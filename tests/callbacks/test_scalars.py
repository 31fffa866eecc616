"""Event files of `ks.callbacks.Scalars`, read by TensorBoard's own reader."""

import io
import logging
import os
import struct
import sys

import keras
import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator

import keras_strategies as ks
from keras_strategies.callbacks import event_files, global_step
from tests.support.combinations import combine
from tests.support.jobs import values_of
from tests.support.plain_keras import dense, mirrored

_random = np.random.default_rng(0)
X = _random.normal(size=(22, 3)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]] + 0.3).astype("float32")
SPEEDS = {"global_step/sec", "examples/sec"}
Scalars = ks.callbacks.Scalars


def model_of(replicas=2, optimizer="sgd", build=None, **compile_args):
    """A model of a strategy; of none with 0 replicas."""
    arguments = {"loss": "mse", "metrics": ["mae"]} | compile_args
    build = build or (lambda: keras.Sequential([keras.Input((3,)), dense(1)]))
    if not replicas:
        model = build()
        model.compile(optimizer, **arguments)
        return model
    with mirrored(replicas).scope():
        model = build()
        model.compile(optimizer, **arguments)
    return model


def fit(model, *callbacks, **changes):
    """Four batches of 6, 6, 6 and 4 rows, an epoch."""
    arguments = {"batch_size": 6, "shuffle": False, "verbose": 0} | changes
    history = model.fit(X, Y, callbacks=list(callbacks), **arguments)
    return history.history


def read(directory, *parts):
    """{tag: {step: value}} of a directory; a step that is there twice fails."""
    reader = event_accumulator.EventAccumulator(
        os.path.join(directory, *parts), size_guidance={"scalars": 0}
    )
    reader.Reload()
    points = {}
    for tag in reader.Tags()["scalars"]:
        events = reader.Scalars(tag)
        points[tag] = {event.step: event.value for event in events}
        assert len(points[tag]) == len(events), f"{tag} has a step twice"
    return points


def list_steps(directory, *parts, tag="loss"):
    return list(read(directory, *parts).get(tag, {}))


def list_files(directory):
    return sorted(p.name for p in directory.iterdir() if p.is_file())


# What is written, and when.


@pytest.mark.parametrize("replicas", combine([1, 2, 3], every=3))
def test_points_of_training_and_validation_are_those_of_history(
    tmp_path, replicas
):
    scalars = Scalars(tmp_path, every_n_steps=2)
    history = fit(
        model_of(replicas), scalars, epochs=3, validation_data=(X[:8], Y[:8])
    )
    train, test = read(tmp_path), read(tmp_path, "eval")
    assert set(train) == {"loss", "mae", "learning_rate", *SPEEDS}
    assert set(test) == {"loss", "mae"}
    for name in ("loss", "mae"):
        assert list(train[name]) == [2, 4, 6, 8, 10, 12]
        assert list(test[name]) == [4, 8, 12]
        ends = [train[name][step] for step in (4, 8, 12)]
        assert ends == pytest.approx(history[name], rel=1e-6)
        values = list(test[name].values())
        assert values == pytest.approx(history[f"val_{name}"], rel=1e-6)
    assert set(train["learning_rate"].values()) == {np.float32(0.01)}


def test_a_point_within_an_epoch_is_the_mean_so_far(tmp_path):
    model = model_of(3)
    expected = model.evaluate(X[:12], Y[:12], verbose=0, return_dict=True)
    model.optimizer.learning_rate = 0.0
    fit(model, Scalars(tmp_path, every_n_steps=2))
    points = read(tmp_path)
    assert points["loss"][2] == pytest.approx(expected["loss"], rel=1e-6)
    assert points["mae"][2] == pytest.approx(expected["mae"], rel=1e-6)


CASES = {
    # every_n_steps, steps_per_execution, epochs: the steps written.
    "the last step": ((100, 1, 2), [8]),
    "every step": ((1, 1, 1), [1, 2, 3, 4]),
    "multiples and the last": ((3, 1, 2), [3, 6, 8]),
    "executions end at 3, 4, 7, 8": ((2, 3, 2), [3, 4, 7, 8]),
    "executions that pass several": ((1, 4, 2), [4, 8]),
    "an end that was written": ((4, 1, 2), [4, 8]),
    "none": ((0, 1, 2), []),
}


@pytest.mark.parametrize("name", CASES)
def test_steps_that_are_written(tmp_path, name):
    (every, steps_per_execution, epochs), expected = CASES[name]
    model = _kept_model(2, steps_per_execution)
    model.optimizer.iterations.assign(0)
    fit(model, Scalars(tmp_path, every_n_steps=every), epochs=epochs)
    assert list_steps(tmp_path) == expected


_kept = {}


def _kept_model(replicas, steps_per_execution):
    """Compiling is what costs time."""
    key = (replicas, steps_per_execution)
    if key not in _kept:
        _kept[key] = model_of(replicas, steps_per_execution=key[1])
    return _kept[key]


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_steps_of_a_generator_without_a_length(tmp_path):
    def batches():
        for start in range(0, 22, 6):
            yield X[start : start + 6], Y[start : start + 6]

    model = _kept_model(2, 3)
    scalars = Scalars(tmp_path, every_n_steps=2, initial_step=0)
    model.fit(batches(), shuffle=False, verbose=0, callbacks=[scalars])
    assert list_steps(tmp_path) == [3, 4]


def test_two_fits_are_one_curve(tmp_path):
    model = _kept_model(2, 1)
    scalars = Scalars(tmp_path, every_n_steps=3, initial_step=0)
    fit(model, scalars)
    fit(model, scalars)
    assert list_steps(tmp_path) == [3, 4, 6, 8]
    # Another callback asks the optimizer.
    model.optimizer.iterations.assign(8)
    fit(model, Scalars(tmp_path, every_n_steps=3))
    assert list_steps(tmp_path) == [3, 4, 6, 8, 9, 12]
    assert len(list_files(tmp_path)) == 3


def test_a_fit_without_the_callback_counts(tmp_path):
    model = _kept_model(2, 1)
    scalars = Scalars(tmp_path, initial_step=0)
    fit(model, scalars)
    fit(model)
    fit(model, scalars)
    assert list_steps(tmp_path) == [4, 12]


def test_another_model_begins_with_its_own_steps(tmp_path):
    first, second = _kept_model(2, 1), _kept_model(2, 3)
    scalars = Scalars(tmp_path)
    first.optimizer.iterations.assign(40)
    second.optimizer.iterations.assign(100)
    fit(first, scalars)
    fit(second, scalars)
    assert list_steps(tmp_path) == [44, 104]


def test_compiling_anew_goes_on_counting(tmp_path):
    strategy, model = mirrored(2), model_of(0)
    scalars = Scalars(tmp_path)
    with strategy.scope():
        model.compile("sgd", "mse")
    fit(model, scalars)
    with strategy.scope():
        model.compile("sgd", "mse")
    fit(model, scalars)
    assert list_steps(tmp_path) == [4, 8]


def test_examples_are_rows_without_padding(tmp_path, monkeypatch):
    now = iter(range(1000))
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    model = _kept_model(3, 1)
    fit(model, Scalars(tmp_path, every_n_steps=1, initial_step=0))
    points = read(tmp_path)
    steps, rows = points["global_step/sec"], points["examples/sec"]
    # The first step is not timed; batches are of 6, 6 and 4 rows then.
    assert list(steps) == [2, 3, 4]
    rows_of_steps = [rows[k] / steps[k] for k in steps]
    assert rows_of_steps == pytest.approx([6, 6, 4], rel=1e-6)


def test_speed_is_that_of_training_alone():
    every = global_step.Every(10)
    every.begin(5)
    every.start(100.0, 6, 60)
    every.leave_out(2.0)
    assert not every.is_due(9)
    assert every.is_due(10)
    speed = every.take(106.0, 10, 94)
    assert speed == {global_step.STEPS: 1.0, global_step.ROWS: 8.5}
    # The next lap begins anew.
    speed = every.take(108.0, 30, 100)
    assert speed == {global_step.STEPS: 10.0, global_step.ROWS: 3.0}
    assert every.take(110.0, 30, 400) == {}
    assert every.take(110.0, 50, 400) == {}


@pytest.mark.parametrize(
    ("period", "step", "due"), [(0, 7, None), (5, 0, 5), (5, 5, 10), (5, 7, 10)]
)
def test_steps_that_are_due(period, step, due):
    every = global_step.Every(period)
    every.begin(step)
    found = [s for s in range(step, step + 12) if every.is_due(s)]
    assert found[:1] == ([] if due is None else [due])
    assert not every.is_due(step, is_last=True)
    assert every.is_due(step + 1, is_last=True) == (period > 0)


# Learning rates and the step that a fit starts from.


def schedule():
    return keras.optimizers.schedules.PiecewiseConstantDecay(
        [1, 2, 3], [0.5, 0.25, 0.125, 0.0625]
    )


def multi_optimizer():
    return keras.optimizers.MultiOptimizer(
        lambda variable: _FAST if variable.name == "bias" else _SLOW
    )


_FAST, _SLOW = keras.optimizers.SGD(0.5), keras.optimizers.SGD(schedule())
OPTIMIZERS = {
    "float": (
        lambda: keras.optimizers.Adam(0.25),
        {"learning_rate": [0.25] * 4},
    ),
    "schedule": (
        lambda: keras.optimizers.SGD(schedule()),
        {"learning_rate": [0.5, 0.25, 0.125, 0.0625]},
    ),
    "loss scaling": (
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(schedule()), initial_scale=2.0
        ),
        {"learning_rate": [0.5, 0.25, 0.125, 0.0625]},
    ),
    "function": (
        lambda: keras.optimizers.SGD(lambda: 0.125),
        {"learning_rate": [0.125] * 4},
    ),
    "several": (multi_optimizer, {}),
}


@pytest.mark.parametrize("name", combine(OPTIMIZERS, every=2))
def test_learning_rates(tmp_path, name):
    make, expected = OPTIMIZERS[name]
    fit(model_of(2, make()), Scalars(tmp_path, every_n_steps=1))
    points = read(tmp_path)
    rates = {
        tag: list(values.values())
        for tag, values in points.items()
        if tag.startswith("learning_rate")
    }
    assert rates == expected


def test_a_learning_rate_that_is_set_between_steps(tmp_path):
    class Sets(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.optimizer.learning_rate = 0.5**epoch

    scalars = Scalars(tmp_path, every_n_steps=4, initial_step=0)
    model = _kept_model(2, 1)
    fit(model, Sets(), scalars, epochs=3)
    model.optimizer.learning_rate = 0.01
    rates = read(tmp_path)["learning_rate"]
    assert rates == {4: 1.0, 8: 0.5, 12: 0.25}


def test_steps_that_accumulate_gradients_count(tmp_path):
    sgd = keras.optimizers.SGD(0.01, gradient_accumulation_steps=3)
    model = model_of(2, sgd)
    fit(model, Scalars(tmp_path))
    fit(model, Scalars(tmp_path))
    assert list_steps(tmp_path) == [4, 8]


def test_a_models_own_step_with_its_own_logs(tmp_path):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.layer = dense(1)
            self.second = keras.optimizers.SGD(0.01)

        def call(self, x):
            return self.layer(x)

        def train_step(self, state, data):
            logs, state = super().train_step(state, data)
            return {"mine": logs["loss"] * 2, "nest": {"deep": 3.0}}, state

    history = fit(model_of(2, build=Own), Scalars(tmp_path, every_n_steps=2))
    points = read(tmp_path)
    assert set(points) == {"mine", "deep", "learning_rate", *SPEEDS}
    assert list(points["mine"]) == [2, 4]
    assert points["mine"][4] == pytest.approx(history["mine"][0])


# Metrics of all shapes.


def two_outputs():
    x = keras.Input((3,))
    return keras.Model(x, {"a": dense(1, name="a")(x), "b": dense(2)(x)})


class Vector(keras.metrics.Metric):
    """A sum over rows for each entry."""

    def __init__(self, shape, name):
        super().__init__(name=name)
        self.total = self.add_variable(shape, "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        ones = keras.ops.ones(self.total.shape)
        self.total.assign_add(ones * keras.ops.sum(y_true * 0 + 1))

    def result(self):
        return self.total + 0


def test_metrics_with_several_entries(tmp_path):
    def build():
        return keras.Sequential([keras.Input((3,)), dense(2)])

    metrics = [
        keras.metrics.F1Score(name="f1"),
        Vector((2, 2), "matrix"),
        Vector((101,), "large"),
        Vector((1, 1), "one"),
    ]
    model = model_of(2, build=build, metrics=metrics)
    labels = np.eye(2, dtype="float32")[np.arange(22) % 2]
    history = model.fit(
        X,
        labels,
        batch_size=6,
        epochs=2,
        verbose=0,
        callbacks=[Scalars(tmp_path, every_n_steps=4)],
    ).history
    points = read(tmp_path)
    entries = {f"matrix/{i}/{j}" for i in (0, 1) for j in (0, 1)}
    assert set(points) - {"loss", "learning_rate", *SPEEDS} == {
        "f1/0",
        "f1/1",
        "one",
        *entries,
    }
    found = [[points[f"f1/{k}"][step] for k in (0, 1)] for step in (4, 8)]
    np.testing.assert_allclose(found, history["f1"], rtol=1e-6)
    assert points["one"] == {4: 44.0, 8: 44.0}


@pytest.mark.slow
def test_several_outputs_in_bfloat16_run_eagerly(tmp_path):
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = model_of(
            2,
            build=two_outputs,
            loss={"a": "mse", "b": "mse"},
            metrics={"a": ["mae"], "b": ["mae"]},
            run_eagerly=True,
        )
    finally:
        keras.config.set_dtype_policy(policy)
    labels = {"a": Y, "b": np.repeat(Y, 2, axis=1)}
    scalars = Scalars(tmp_path, every_n_steps=4)
    history = model.fit(
        X, labels, batch_size=6, verbose=0, callbacks=[scalars]
    ).history
    points = read(tmp_path)
    assert {"loss", "a_loss", "a_mae"} < set(history) <= set(points)
    for name, values in history.items():
        assert points[name] == {4: pytest.approx(values[0], rel=1e-6)}


@pytest.mark.parametrize("verbose", [0, 2])
def test_numbers_that_are_none(tmp_path, caplog, verbose):
    caplog.set_level(logging.INFO, "keras_strategies")
    model = model_of(2, keras.optimizers.SGD(1e30))
    fit(model, Scalars(tmp_path, every_n_steps=2), verbose=verbose)
    loss = read(tmp_path)["loss"]
    assert list(loss) == [2, 4]
    assert not np.isfinite(loss[4])
    assert "step 4: loss = nan" in caplog.text


# Evaluation.


def test_evaluations_have_directories_of_their_own(tmp_path):
    model = _kept_model(2, 1)
    model.optimizer.iterations.assign(7)
    given = {"batch_size": 6, "verbose": 0, "return_dict": True}
    plain = model.evaluate(X, Y, callbacks=[Scalars(tmp_path)], **given)
    named = Scalars(tmp_path, eval_name="test")
    test = model.evaluate(X[:9], Y[:9], callbacks=[named], **given)
    for directory, expected in (("eval", plain), ("eval_test", test)):
        points = read(tmp_path, directory)
        assert {tag: {7: expected[tag]} for tag in expected} == {
            tag: {k: pytest.approx(v) for k, v in values.items()}
            for tag, values in points.items()
        }
    assert list_files(tmp_path) == []
    fit(model, named)
    model.evaluate(X, Y, callbacks=[named], **given)
    assert list_steps(tmp_path, "eval_test") == [7, 11]


def test_a_metric_named_as_validation_is_kept(tmp_path):
    class Own(keras.Sequential):
        def train_step(self, state, data):
            logs, state = super().train_step(state, data)
            return {"val_mine": logs["loss"], "loss": logs["loss"]}, state

    def build():
        return Own([keras.Input((3,)), dense(1)])

    model = model_of(2, build=build)
    fit(model, Scalars(tmp_path), validation_data=(X, Y))
    tags = {"loss", "val_mine", "learning_rate", *SPEEDS}
    assert set(read(tmp_path)) == tags


# Going on.


class Stops(keras.callbacks.Callback):
    """Ends a fit as a crash would, and keeps a callback's state before."""

    def __init__(self, scalars, *, save, stop):
        super().__init__()
        self._scalars, self._save, self._stop = scalars, save, stop
        self._done = 0

    def on_train_batch_end(self, batch, logs=None):
        self._done += 1
        if self._done == self._save:
            self.state = self._scalars.get_state()
        if self._done == self._stop:
            raise InterruptedError


class Resumes(keras.callbacks.Callback):
    """Gives a callback its state as a checkpoint does."""

    def __init__(self, scalars, state):
        super().__init__()
        self._scalars, self._state = scalars, state

    def on_train_begin(self, logs=None):
        self._scalars.set_state(self._state)


@pytest.mark.parametrize("save", [4, 5, 6])
def test_no_point_is_there_twice_after_a_crash(tmp_path, save):
    model = _kept_model(2, 1)
    model.optimizer.iterations.assign(0)
    validation = {"validation_data": (X, Y), "epochs": 4}
    first = Scalars(tmp_path, every_n_steps=2)
    stops = Stops(first, save=save, stop=15)
    with pytest.raises(InterruptedError):
        fit(model, stops, first, **validation)
    assert list_steps(tmp_path) == [2, 4, 6, 8, 10, 12, 14]
    assert list_steps(tmp_path, "eval") == [4, 8, 12]
    # Before the end of its epoch; the epoch's evaluation is yet to come.
    evaluated = save > 4
    assert stops.state == {"step": save, "eval_step": 4 if evaluated else 0}
    second = Scalars(tmp_path, every_n_steps=4)
    resumes = Resumes(second, stops.state)
    with pytest.raises(InterruptedError):
        fit(model, second, resumes, Stops(second, save=0, stop=7), **validation)
    kept = [step for step in (2, 4, 6) if step <= save]
    new = [step for step in range(save, save + 8) if step % 4 == 0]
    assert list_steps(tmp_path) == sorted({*kept, *new} - {save + 7})
    assert list_steps(tmp_path, "eval") == [4] * evaluated + [save + 4]


def test_state_that_is_given_before_a_fit(tmp_path):
    scalars = Scalars(tmp_path)
    scalars.set_state({"step": 30, "eval_step": 28})
    assert scalars.get_state() == {"step": 30, "eval_step": 28}
    model = _kept_model(2, 1)
    model.optimizer.iterations.assign(2)
    fit(model, scalars)
    assert list_steps(tmp_path) == [34]


def test_a_new_run_in_a_used_directory_replaces_the_old_one(tmp_path):
    model = _kept_model(2, 1)
    for every in (1, 3):
        model.optimizer.iterations.assign(0)
        fit(model, Scalars(tmp_path, every_n_steps=every))
    assert list_steps(tmp_path) == [3, 4]


@pytest.mark.parametrize("cut", [1, 9, 20])
def test_a_file_whose_last_record_is_cut_is_read_up_to_it(tmp_path, cut):
    model = _kept_model(2, 1)
    model.optimizer.iterations.assign(0)
    scalars = Scalars(tmp_path, every_n_steps=1)
    with pytest.raises(InterruptedError):
        fit(model, scalars, Stops(scalars, save=0, stop=3))
    (name,) = list_files(tmp_path)
    path = tmp_path / name
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - cut)
    assert list_steps(tmp_path) == [1]
    fit(model, Scalars(tmp_path, initial_step=2))
    assert list_steps(tmp_path) == [1, 6]


def test_points_can_be_read_while_fit_goes_on(tmp_path):
    seen = []

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(list_steps(tmp_path))

    model = _kept_model(2, 1)
    model.optimizer.iterations.assign(0)
    # Who listens to batches is called before those that choose.
    fit(model, Scalars(tmp_path, every_n_steps=1), Looks())
    assert seen == [[], [1], [1, 2], [1, 2, 3]]


# What it costs, and the log.


def test_nothing_is_fetched_between_the_steps_that_are_written(tmp_path):
    model = _kept_model(2, 1)
    fetched = []

    class Notes(Scalars):
        def on_train_batch_end(self, batch, logs=None):
            fetched.append(batch)
            super().on_train_batch_end(batch, logs)
            # Asking the callback for its model would set back all variables.
            assert not model._jax_state_synced

    scalars = Notes(tmp_path, every_n_steps=3, initial_step=0)
    fit(model, scalars, epochs=2)
    assert fetched == [2, 1]
    assert list_steps(tmp_path) == [3, 6, 8]


def test_lines_of_the_log(tmp_path, caplog, monkeypatch):
    now = iter(range(0, 10**6, 2))
    monkeypatch.setattr("time.perf_counter", lambda: next(now) / 1000)
    caplog.set_level(logging.INFO, "keras_strategies")
    model = _kept_model(2, 1)
    scalars = Scalars(
        tmp_path, every_n_steps=0, log_every_n_steps=3, initial_step=297
    )
    history = fit(model, scalars)
    lines = [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("keras_strategies")
    ]
    first, last = lines
    assert first.startswith("step 300: loss = ")
    values = f"loss = {history['loss'][0]:.4g}, mae = {history['mae'][0]:.4g}"
    assert last.startswith(f"step 301: {values} (")
    assert first.endswith("examples/s)")
    assert " steps/s, " in first
    assert list_files(tmp_path) == []


def test_large_numbers_in_a_line_have_spaces():
    from keras_strategies.callbacks.scalars import _line

    speed = {global_step.STEPS: 12.34, global_step.ROWS: 1230.4}
    line = _line(300, {"accuracy": 0.9, "loss": 0.1234567}, speed)
    assert line == (
        "step 300: loss = 0.1235, accuracy = 0.9 (12.3 steps/s, 1 230 "
        "examples/s)"
    )
    assert _line(3, {"loss": 1.0}, {}) == "step 3: loss = 1"


def test_no_line_where_nobody_listens_to_the_log(tmp_path, caplog):
    caplog.set_level(logging.WARNING, "keras_strategies")
    model = _kept_model(2, 1)
    fetched = []

    class Notes(Scalars):
        def on_train_batch_end(self, batch, logs=None):
            fetched.append(batch)

    fit(model, Notes(tmp_path, every_n_steps=0, log_every_n_steps=1))
    assert fetched == []


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"log_dir": 3}, TypeError, "Received: 3 of type int"),
        ({"every_n_steps": -1}, ValueError, "must be >= 0. Received: -1"),
        (
            {"every_n_steps": 1.5},
            TypeError,
            "must be an integer. Received: 1.5",
        ),
        ({"every_n_steps": True}, TypeError, "Received: True"),
        ({"log_every_n_steps": "3"}, TypeError, "Received: '3'"),
        ({"initial_step": -3}, ValueError, "Received: -3"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        Scalars(**({"log_dir": "logs"} | arguments))


def test_a_model_without_a_strategy_is_refused(tmp_path):
    with pytest.raises(RuntimeError, match="outside a strategy's scope"):
        fit(model_of(0), Scalars(tmp_path))


def test_a_directory_that_cannot_be_made_is_reported_before_the_first_step(
    tmp_path,
):
    (tmp_path / "file").write_text("")
    directory = tmp_path / "file" / "logs"
    model = _kept_model(2, 1)
    before = int(model.optimizer.iterations.value)
    with pytest.raises(OSError, match="file"):
        fit(model, Scalars(directory))
    assert int(model.optimizer.iterations.value) == before
    with pytest.raises(OSError, match="file/logs"):
        model.evaluate(X, Y, verbose=0, callbacks=[Scalars(directory)])


def test_a_disk_that_is_full_ends_the_points_and_not_the_training(
    tmp_path, monkeypatch
):
    from tensorboardX import record_writer
    from tensorboardX.proto import event_pb2

    written = []

    def write(self, data):
        event = event_pb2.Event.FromString(data)
        if event.summary.value:
            written.append(event.step)
            if event.step > 2:
                raise OSError(28, "No space left on device")
        real(self, data)

    real = record_writer.RecordWriter.write
    monkeypatch.setattr(record_writer.RecordWriter, "write", write)
    model = _kept_model(2, 1)
    scalars = Scalars(tmp_path, every_n_steps=1, initial_step=0)
    with pytest.warns(RuntimeWarning, match="No space left.*Free space"):
        history = fit(model, scalars)
    assert len(history["loss"]) == 1
    assert written == [1, 2, 3]
    assert list_steps(tmp_path) == [1, 2]


def test_a_package_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match="`pip install tensorboardX`"):
        Scalars("logs")


def test_lines_alone_need_no_package(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO", "keras_strategies")
    model = _kept_model(2, 1)
    scalars = Scalars(None, log_every_n_steps=2, initial_step=0)
    state = scalars.get_state()
    scalars.set_state(state)
    fit(model, scalars)
    model.evaluate(X, Y, verbose=0, callbacks=[scalars])
    assert not list(tmp_path.iterdir())
    lines = [text for text in caplog.messages if text.startswith("step ")]
    assert lines
    assert lines[0].startswith("step 2: loss = ")


# The files themselves.


def test_records_are_framed_as_tensorflow_frames_them(tmp_path):
    points = event_files.Points(str(tmp_path))
    points.add(3, {"loss": 1.5, "over": 1e300, "none": float("nan")})
    points.close()
    (name,) = list_files(tmp_path)
    assert name.startswith("events.out.tfevents.")
    content = io.BytesIO((tmp_path / name).read_bytes())
    lengths = []
    while header := content.read(12):
        (length,) = struct.unpack("<Q", header[:8])
        content.read(length + 4)
        lengths.append(length)
    assert len(lengths) == 2
    points = read(tmp_path)
    assert points["loss"] == {3: 1.5}
    assert points["over"] == {3: float("inf")}
    assert np.isnan(points["none"][3])


def test_files_of_a_directory_are_read_in_the_order_they_were_made(tmp_path):
    points = event_files.Points(str(tmp_path))
    for step in range(5):
        points.add(step, {"loss": step})
        points.close()
    assert read(tmp_path)["loss"] == {k: k for k in range(5)}
    assert len(list_files(tmp_path)) == 5


def test_a_bucket_is_sent_whole_when_it_ends(monkeypatch):
    from tensorboardX import record_writer

    sent = []

    class Remote:
        """Sends, as tensorboardX's own do, all that was written."""

        def __init__(self):
            self._content = b""

        def write(self, data):
            self._content += data

        def flush(self):
            sent.append(len(self._content))

        close = flush

    class Factory:
        def open(self, path):
            assert path.startswith("bucket://run/events.out.tfevents.")
            return Remote()

        def directory_check(self, path):
            assert path == "bucket://run"

    factories = record_writer.REGISTERED_FACTORIES
    monkeypatch.setitem(factories, "bucket", Factory())
    points = event_files.Points("bucket://run")
    for step in range(50):
        points.add(step, {"loss": 1.0})
    assert sent == []
    points.close()
    (size,) = sent
    assert size > 50 * 16
    monkeypatch.setattr(event_files, "_FLUSH_S", 0.0)
    points.add(0, {"loss": 1.0})
    # The version and the point, each when it was written.
    assert len(sent) == 3


def test_an_error_of_a_buckets_library_ends_the_points_alone(monkeypatch):
    from tensorboardX import record_writer

    class Forbidden(Exception):
        pass

    class Factory:
        def open(self, path):
            raise Forbidden("no such bucket")

        def directory_check(self, path):
            pass

    factories = record_writer.REGISTERED_FACTORIES
    monkeypatch.setitem(factories, "bucket", Factory())
    points = event_files.Points("bucket://run")
    with pytest.raises(Forbidden, match="no such bucket"):
        points.open()
    with pytest.warns(RuntimeWarning, match=r"Forbidden\('no such bucket'\)"):
        points.add(3, {"loss": 1.0})
    points.add(4, {"loss": 1.0})


@pytest.mark.slow
def test_the_chief_alone_writes(tmp_path):
    target = "multi_process.with_callbacks:scalars"
    first, second = values_of(target, 2, tmp_path)
    assert first["state"] == second["state"] == {"step": 8, "eval_step": 8}
    (pid,) = {name.split(".")[-1] for name in list_files(tmp_path)}
    assert int(pid) == first["pid"] != second["pid"]
    assert len(list_files(tmp_path)) == len(list_files(tmp_path / "eval")) == 1
    points = read(tmp_path)
    assert list(points["loss"]) == [3, 6, 8]
    assert points["loss"][8] == pytest.approx(first["loss"][-1], rel=1e-6)
    assert list_steps(tmp_path, "eval") == [4, 8]
    assert first["lines"] == 3
    assert second["lines"] == 0
    assert list(points["learning_rate"].values()) == [0.25, 0.25, 0.125]

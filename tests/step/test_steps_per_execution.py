"""`steps_per_execution=K`: K steps are one program, and the same numbers."""

import sys

import jax
import keras
import numpy as np
import pytest

from keras_strategies.spmd import dispatch as dispatch_lib
from tests.fit.inputs.sources import one_input
from tests.support.combinations import combine, few
from tests.support.models import compiled_in
from tests.support.plain_keras import (
    assert_same,
    dense,
    mirrored,
    no_data_left,
    no_shuffle,
    run_both,
)

_random = np.random.default_rng(0)
X = _random.normal(size=(250, 3)).astype("float32")
Y = _random.normal(size=(250, 1)).astype("float32")


def momentum():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def mae():
    return ["mae"]


def compiled(steps):
    return {
        "optimizer": momentum,
        "loss": "mse",
        "metrics": mae,
        "steps_per_execution": steps,
    }


COMPILED = {k: compiled(k) for k in (1, 2, 3, 4, 10)}


class Events(keras.callbacks.Callback):
    """Every batch event with its number and its logs."""

    def __init__(self):
        super().__init__()
        self.events = []

    def _note(self, name, batch, logs):
        logs = {k: np.asarray(v) for k, v in (logs or {}).items()}
        logs.pop("outputs", None)
        self.events.append((name, batch, logs))

    def on_train_batch_begin(self, batch, logs=None):
        self._note("train begin", batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        self._note("train end", batch, logs)

    def on_test_batch_begin(self, batch, logs=None):
        self._note("test begin", batch, logs)

    def on_test_batch_end(self, batch, logs=None):
        self._note("test end", batch, logs)

    def on_predict_batch_begin(self, batch, logs=None):
        self._note("predict begin", batch, logs)

    def on_predict_batch_end(self, batch, logs=None):
        self._note("predict end", batch, logs)

    def on_epoch_end(self, epoch, logs=None):
        self._note("epoch end", epoch, logs)


def split_events(events):
    """Names and numbers, to be equal; logs, to be close."""
    return [e[:2] for e in events], [e[2] for e in events]


def assert_same_events(plain, ours):
    names, logs = split_events(plain)
    our_names, our_logs = split_events(ours)
    assert our_names == names
    assert_same(logs, our_logs)


def fit(model, rows, batch_size=8, shuffle=False, **options):
    options |= {"batch_size": batch_size, "shuffle": shuffle, "verbose": 0}
    return model.fit(X[:rows], Y[:rows], **options).history


def fit_with_events(rows, batch, shuffle=True, **options):
    def act(model):
        seen = Events()
        options["callbacks"] = [seen]
        fit(model, rows, batch, shuffle, epochs=2, **options)
        return seen.events

    return act


def check_events(act, steps, **options):
    """Asserts that events and weights are those of plain Keras."""
    (plain, weights), (ours, our_weights) = run_both(
        one_input, act, **COMPILED[steps], **options
    )
    assert_same_events(plain, ours)
    assert_same(weights, our_weights)


CASES = [
    # replicas, rows, batch, K
    (2, 64, 16, 2),  # all in groups
    (2, 64, 16, 3),  # a group of one at the end
    (2, 70, 16, 3),  # a shorter batch within the last group
    (2, 70, 16, 10),  # more than there are
    (3, 64, 16, 2),  # every batch indivisible
    (3, 70, 16, 4),  # and the last one divisible
    (8, 13, 5, 2),  # every batch indivisible, the last one smaller
    (8, 3, 8, 4),  # one batch smaller than the replicas
    (8, 250, 64, 3),
    (1, 70, 16, 4),
    (1, 70, 16, 1),
    (2, 13, 5, 1),
    (3, 250, 64, 1),
    (8, 10, 4, 1),
]


@no_data_left
@pytest.mark.parametrize(
    ("replicas", "rows", "batch", "steps"), few(CASES, every=12)
)
def test_weights_events_and_logs_are_plain_keras_own(
    replicas, rows, batch, steps
):
    check_events(fit_with_events(rows, batch), steps, replicas=replicas)


@no_data_left
@pytest.mark.parametrize(
    ("replicas", "rows", "batch", "steps"),
    few([(2, 70, 16, 3), (3, 70, 16, 4), (8, 13, 5, 2)], every=3),
)
def test_weights_are_those_of_single_steps(replicas, rows, batch, steps):
    # Unshuffled: an unbuilt metric draws one more order.
    act = fit_with_events(rows, batch, shuffle=False)
    one = run_both(one_input, act, replicas=replicas, **COMPILED[1])
    many = run_both(one_input, act, replicas=replicas, **COMPILED[steps])
    assert_same(one[1][1], many[1][1])


@pytest.mark.parametrize("steps_per_epoch", combine([3, 4], every=2))
def test_an_epoch_ends_at_steps_per_epoch(steps_per_epoch):
    # Plain Keras overshoots where K does not divide it: with K=1 it does
    # what was asked for.
    batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 248, 8)]
    taken = []

    def act(model):
        def infinite():
            for pair in batches:
                taken.append(pair)
                yield pair

        options = {"steps_per_epoch": steps_per_epoch, "epochs": 3}
        history = model.fit(infinite(), shuffle=False, verbose=0, **options)
        return history.history, int(model.optimizer.iterations)

    (plain, weights), _ = run_both(one_input, act, **COMPILED[1])
    taken.clear()
    _, (ours, our_weights) = run_both(one_input, act, **COMPILED[2])
    assert ours[1] == 3 * steps_per_epoch
    assert_same((plain, weights), (ours, our_weights))


def test_an_epoch_of_arrays_ends_at_steps_per_epoch():
    def act(model):
        fit(model, 80, steps_per_epoch=5, epochs=2)
        return int(model.optimizer.iterations)

    (plain, weights), _ = run_both(one_input, act, **COMPILED[1])
    _, (ours, our_weights) = run_both(one_input, act, **COMPILED[3])
    assert (plain, ours) == (10, 10)
    assert_same(weights, our_weights)


@no_data_left
@pytest.mark.parametrize(
    ("replicas", "rows", "batch", "steps"),
    few(
        [
            *[(2, 70, 16, 3), (3, 64, 16, 2), (8, 13, 5, 10), (3, 3, 8, 4)],
            *[(1, 10, 4, 1), (8, 250, 64, 1)],
        ],
        every=6,
    ),
)
def test_evaluate_and_predict_are_plain_keras_own(replicas, rows, batch, steps):
    def act(model):
        seen = Events()
        options = {"batch_size": batch, "verbose": 0, "callbacks": [seen]}
        evaluated = model.evaluate(X[:rows], Y[:rows], **options)
        predicted = model.predict(X[:rows], **options)
        return evaluated, predicted, seen.events

    ((*plain, events), _), ((*ours, our_events), _) = run_both(
        one_input, act, replicas=replicas, **COMPILED[steps]
    )
    assert_same(plain, ours)
    assert_same_events(events, our_events)
    assert ours[1].shape == (rows, 1)


@no_data_left
@no_shuffle
@pytest.mark.parametrize("rows", combine([40, 44], every=2))
def test_data_of_unknown_length_is_plain_keras_own(rows):
    def dataset():
        for start in range(0, rows, 8):
            stop = min(start + 8, rows)
            yield X[start:stop], Y[start:stop]

    def act(model):
        seen = Events()
        options = {"verbose": 0, "callbacks": [seen]}
        return (
            model.fit(dataset(), **options).history,
            model.evaluate(dataset(), **options),
            model.predict(dataset(), **options),
            seen.events,
        )

    ((*plain, events), weights), ((*ours, our_events), our_weights) = run_both(
        one_input, act, **COMPILED[2]
    )
    assert_same((plain, weights), (ours, our_weights))
    assert_same_events(events, our_events)


@no_data_left
@no_shuffle
def test_tf_data_of_unknown_length_is_plain_keras_own():
    import tensorflow as tf

    def act(model):
        data = tf.data.Dataset.from_tensor_slices((X[:44], Y[:44]))
        data = data.filter(lambda x, y: True).batch(8)
        seen = Events()
        model.fit(data, epochs=2, callbacks=[seen], verbose=0)
        return seen.events

    check_events(act, 4)


def dispatched(fn):
    """How many programs `fn` starts: calls of `dispatch`, seen by Python."""
    calls = []
    code = dispatch_lib.dispatch.__code__

    def profile(frame, event, arg):
        if event == "call" and frame.f_code is code:
            calls.append(frame)

    sys.setprofile(profile)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return len(calls)


@pytest.mark.parametrize(
    ("rows", "steps", "expected"),
    few(
        [
            (64, 1, 8),
            pytest.param(64, 2, 4, marks=pytest.mark.slow),
            pytest.param(64, 4, 2, marks=pytest.mark.slow),
            (64, 3, 3),
            (64, 10, 1),
            # Seven batches of 8 and one of 4: equal neighbors share a program.
            (60, 4, 3),
            # Indivisible ones too: 5 batches of 8, one of 3.
            (43, 10, 2),
        ],
        every=4,
    ),
)
def test_k_steps_are_one_program(rows, steps, expected):
    model = compiled_in(
        mirrored(2), one_input, "sgd", "mse", steps_per_execution=steps
    )
    x, y, options = X[:rows], Y[:rows], {"batch_size": 8, "verbose": 0}
    assert dispatched(lambda: model.fit(x, y, **options)) == expected
    if rows == 60:
        assert dispatched(lambda: model.evaluate(x, y, **options)) == expected
        assert dispatched(lambda: model.predict(x, **options)) == expected


def convolving():
    kernel = keras.initializers.GlorotUniform(seed=3)
    return keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Reshape((3, 1)),
            keras.layers.Conv1D(2, 2, kernel_initializer=kernel),
            keras.layers.Flatten(),
            dense(1),
        ]
    )


@pytest.mark.parametrize("rows", combine([64, 43], every=2))
def test_convolutions_are_trained_step_by_step_on_cpu(rows):
    # XLA's CPU compiler makes their gradients slow in a loop.
    def act(model):
        history = fit(model, rows)
        return history, model.evaluate(X[:rows], Y[:rows], verbose=0)

    plain, ours = run_both(
        convolving, act, optimizer="sgd", loss="mse", steps_per_execution=4
    )
    assert_same(plain, ours)
    model = compiled_in(
        mirrored(2), convolving, "sgd", "mse", steps_per_execution=4
    )
    seen = dispatched(lambda: act(model))
    # Of each group of steps: taking it apart, and each step; and one attempt
    # to make a program of all.
    steps = -(-rows // 8)
    assert seen > steps


def compilations(fn):
    """How many programs of steps `fn` compiles, as jax reports them."""
    names = []

    def note(name, seconds, **details):
        if name == "/jax/core/compile/backend_compile_duration":
            names.append(details.get("fun_name", ""))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        fn()
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    return names


def test_a_second_fit_compiles_nothing():
    model = compiled_in(
        mirrored(2), one_input, "sgd", "mse", steps_per_execution=3
    )

    def act():
        fit(model, 70, 16, shuffle=True, epochs=2)
        model.evaluate(X[:70], Y[:70], batch_size=16, verbose=0)
        model.predict(X[:70], batch_size=16, verbose=0)

    assert len(compilations(act)) > 0
    assert compilations(act) == []


@no_data_left
def test_a_validation_set_has_executions_of_its_own():
    act = fit_with_events(40, 8, validation_data=(X[40:67], Y[40:67]))
    check_events(act, 2, replicas=3)


def test_a_callback_that_writes_weights_is_seen_by_the_next_execution():
    class Halve(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.jax_state_sync()
            self.model.set_weights([w / 2 for w in self.model.get_weights()])

    def act(model):
        fit(model, 64, callbacks=[Halve()])

    (_, weights), (_, our_weights) = run_both(one_input, act, **COMPILED[3])
    assert_same(weights, our_weights)


def test_run_eagerly_takes_k_steps_too():
    def act(model):
        model.run_eagerly = True
        try:
            history = fit(model, 22)
            predicted = model.predict(X[:22], batch_size=8, verbose=0)
        finally:
            model.run_eagerly = False
        return history, predicted

    plain, ours = run_both(
        one_input, act, replicas=3, is_fresh=True, **COMPILED[2]
    )
    assert_same(plain, ours)


class AnyRank(keras.Model):
    """Takes rows of any rank."""

    def __init__(self):
        super().__init__()
        self.layer = dense()

    def build(self, input_shape):
        self.layer.build(input_shape)

    def call(self, x):
        return self.layer(x)


@pytest.mark.parametrize("is_first", [False, True])
def test_one_batch_that_has_the_shape_of_several(is_first):
    data = [(X[:32], Y[:32], 8)]
    one = (X[32:48].reshape(2, 8, 3), Y[32:48].reshape(2, 8, 1), 2)
    data.insert(0 if is_first else 1, one)

    def act(model):
        losses = []
        for x, y, rows in data:
            options = {"batch_size": rows, "shuffle": False, "verbose": 0}
            losses.append(model.fit(x, y, **options).history["loss"])
        return losses, np.asarray(model.optimizer.iterations)

    plain, ours = run_both(AnyRank, act, is_fresh=True, **COMPILED[2])
    assert_same(plain, ours)

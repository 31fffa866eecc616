"""How often a step's code is called to be traced, and when it is again."""

import collections
import contextlib
import gc
import types
import weakref

import jax
import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks
from keras_strategies.experimental import scan_blocks
from tests.support.models import chain, compiled_in
from tests.support.plain_keras import (
    assert_same,
    dense,
    mirrored,
    run_both,
)
from tests.support.strategies import make_strategy

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(48, 4)).astype("float32")
Y = RANDOM.normal(size=(48, 1)).astype("float32")


class Counted(keras.Model):
    """Counts the calls of its steps, which Keras's code computes."""

    def __init__(self):
        super().__init__()
        self.layer = dense()
        self.calls = types.SimpleNamespace(train=0, test=0, predict=0)

    def call(self, x):
        return self.layer(x)

    def train_step(self, *args):
        self.calls.train += 1
        return super().train_step(*args)

    def test_step(self, *args):
        self.calls.test += 1
        return super().test_step(*args)

    def predict_step(self, *args):
        self.calls.predict += 1
        return super().predict_step(*args)


class SumByHand(Counted):
    """Differentiates a sum, so that its step falls back."""

    def train_step(self, state, data):
        self.calls.train += 1
        weights, others, slots, metrics = state
        x, y = data

        def loss_of(weights):
            y_pred, new = self.stateless_call(weights, others, x)
            return ops.sum(ops.square(y - y_pred)) / 16, new

        computed = jax.value_and_grad(loss_of, has_aux=True)
        (loss, others), grads = computed(weights)
        weights, slots = self.optimizer.stateless_apply(slots, grads, weights)
        return {"loss": loss}, (weights, others, slots, metrics)


@pytest.fixture
def counted_keras(monkeypatch):
    """The calls of Keras's own steps."""
    calls = collections.Counter()
    for kind in ("train", "test", "predict"):
        step = getattr(keras.Model, f"{kind}_step")

        def count(self, *args, kind=kind, step=step):
            calls[kind] += 1
            return step(self, *args)

        count.__module__ = step.__module__
        count.__code__ = count.__code__.replace(
            co_filename=step.__code__.co_filename
        )
        monkeypatch.setattr(keras.Model, f"{kind}_step", count)
    return calls


def use_all(model, rows, *, steps=3):
    x, y = X[: rows * steps], Y[: rows * steps]
    model.fit(x, y, batch_size=rows, epochs=2, verbose=0)
    model.evaluate(x, y, batch_size=rows, verbose=0)
    model.predict(x, batch_size=rows, verbose=0)


CALLS = {
    "even": (16, {}, (2, 2, 2)),
    "stacked and even": (8, {"steps_per_execution": 2}, (2, 2, 2)),
    "one row a replica": (2, {}, (3, 3, 2)),
    # `predict` runs on padding.
    "indivisible": (15, {}, (2, 2, 2)),
}
KERAS_CALLS = {
    "even": (16, {}, (1, 1, 1)),
    "stacked and even": (8, {"steps_per_execution": 2}, (1, 1, 1)),
    "three stacked": (8, {"steps_per_execution": 3}, (1, 1, 1)),
    "one row a replica": (2, {}, (1, 1, 1)),
    "indivisible": (15, {}, (2, 2, 1)),
}
STRATEGIES = {"replicated": lambda: mirrored(2)} | {
    "sharded": lambda: make_strategy("sharded2")
}


@pytest.mark.filterwarnings("ignore:This step runs:UserWarning")
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CALLS)
def test_calls_of_user_code(case, strategy):
    rows, options, expected = CALLS[case]
    model = compiled_in(
        STRATEGIES[strategy](), Counted, "sgd", "mse", **options
    )
    use_all(model, rows)
    calls = model.calls
    assert (calls.train, calls.test, calls.predict) == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", KERAS_CALLS)
def test_calls_of_keras_code(counted_keras, case, strategy):
    rows, options, expected = KERAS_CALLS[case]
    model = compiled_in(
        STRATEGIES[strategy](),
        lambda: chain((4,), dense(), dense()),
        "sgd",
        "mse",
        **options,
    )
    use_all(model, rows)
    assert tuple(counted_keras[k] for k in ("train", "test", "predict")) == (
        expected
    )


@pytest.mark.parametrize("rows", [4, 16])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_calls_of_keras_code_in_half_precision(counted_keras, policy, rows):
    # Keras casts with another library.
    inner = keras.optimizers.SGD()
    optimizer = keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)
    model = compiled_in(
        mirrored(4),
        lambda: chain((4,), keras.layers.Dense(2, dtype=policy), dense()),
        optimizer,
        "mse",
    )
    use_all(model, rows)
    assert set(counted_keras.values()) == {1}


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_user_code_with_one_row_a_replica_and_a_scaled_loss(count):
    optimizer = keras.optimizers.SGD(loss_scale_factor=8.0)
    model = compiled_in(mirrored(count), Counted, optimizer, "mse")
    # It is mapped: a warning is an error.
    model.fit(X[: 2 * count], Y[: 2 * count], batch_size=count, verbose=0)
    assert model.calls.train == 3


def test_calls_with_accumulated_gradients(counted_keras):
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    model = compiled_in(
        mirrored(2), lambda: chain((4,), dense()), optimizer, "mse"
    )
    use_all(model, 16)
    assert counted_keras["train"] == 1


def test_calls_with_scanned_blocks(counted_keras):
    def build():
        model = chain((4,), *(dense(4) for _ in range(8)), dense())
        assert scan_blocks(model)
        return model

    model = compiled_in(make_strategy("sharded2"), build, "sgd", "mse")
    use_all(model, 16)
    assert counted_keras["train"] == 1


@pytest.mark.filterwarnings("ignore:This step runs:UserWarning")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_that_falls_back_is_called_once_more(strategy):
    model = compiled_in(STRATEGIES[strategy](), SumByHand, "sgd", "mse")
    use_all(model, 16)
    assert model.calls.train == 3


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_calls_of_a_function_in_run(strategy):
    strategy = STRATEGIES[strategy]()
    calls = []
    with strategy.scope():
        model = chain((4,), dense())
        optimizer = keras.optimizers.SGD()

    def step(x, y):
        calls.append(x.shape)
        loss_and_grads = ks.value_and_grad(
            lambda: ops.mean(ops.square(model(x) - y)),
            model.trainable_variables,
        )
        loss, grads = loss_and_grads()
        optimizer.apply(grads, model.trainable_variables)
        return loss

    dataset = [(X[:16], Y[:16]), (X[16:32], Y[16:32])]
    for batch in strategy.experimental_distribute_dataset(iter(dataset)):
        strategy.run(step, batch)
    assert calls == [(8, 4)] * 2


class NeedsRows(SumByHand):
    """Cannot be traced with a replica's rows."""

    def train_step(self, state, data):
        if data[0].shape[0] < 16:
            raise ValueError("Too few rows.")
        return super().train_step(state, data)


def find_tracers():
    gc.collect()
    return {
        id(thing)
        for thing in gc.get_objects()
        if issubclass(type(thing), jax.core.Tracer)
    }


@pytest.mark.filterwarnings("ignore:This step runs:UserWarning")
@pytest.mark.parametrize("model_class", [Counted, SumByHand, NeedsRows])
def test_no_value_of_a_trace_is_kept(model_class):
    before = find_tracers()
    model = compiled_in(mirrored(2), model_class, "sgd", "mse")
    model.fit(X, Y, batch_size=16, verbose=0)
    assert find_tracers() <= before


def recompile(model):
    model.compile("adam", "mse")


def freeze(model):
    model.layers[0].trainable = False
    recompile(model)


def change_policy(model):
    for layer in model.layers:
        layer.dtype_policy = keras.DTypePolicy("mixed_bfloat16")
    recompile(model)


def assign_number(model):
    model.optimizer.learning_rate.assign(0.02)


# What changes between two fits: a context of the second, what is called before
# it, and its data.
CHANGES = {
    "nothing": {},
    "rows": {"rows": 10},
    "dtype of data": {"dtype": "int32"},
    "weak type": {"act": assign_number},
    "precision": {"context": lambda: jax.default_matmul_precision("bfloat16")},
    "nans": {"context": lambda: jax.debug_nans(True)},
    "x64": {"context": lambda: jax.enable_x64(True)},
    "trainable": {"act": freeze},
    "policy": {"act": change_policy},
    "remat": {"context": lambda: keras.RematScope(mode="full")},
    "remat and compile": {
        "context": lambda: keras.RematScope(mode="full"),
        "act": recompile,
    },
}


@pytest.mark.parametrize("name", CHANGES)
def test_second_fit_in_other_circumstances(name):
    change = CHANGES[name]
    rows, dtype = change.get("rows", 16), change.get("dtype", "float32")

    def act(model):
        model.fit(X, Y, batch_size=16, verbose=0, shuffle=False)
        change.get("act", bool)(model)
        with change.get("context", contextlib.nullcontext)():
            x = (10 * X).astype(dtype)
            history = model.fit(
                x, Y, batch_size=rows, verbose=0, shuffle=False, epochs=2
            )
            scores = model.evaluate(x, Y, batch_size=rows, verbose=0)
        return history.history["loss"], scores

    plain, ours = run_both(
        lambda: chain((4,), dense(5, activation="tanh"), dense()),
        act,
        is_fresh=True,
        optimizer="adam",
        loss="mse",
    )
    low = "policy" in name or name == "precision"
    assert_same(plain, ours, tolerance=2e-2 if low else 1e-5)


class Largest(keras.metrics.Mean):
    """The mean of each batch's largest prediction."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        return super().update_state(ops.max(y_pred))


def test_a_warning_in_a_trace_that_is_an_error_is_that_of_the_trace():
    with mirrored(2).scope():
        model = chain((4,), dense())
        model.compile("sgd", "mse", metrics=[Largest(name="largest")])
    before = model.get_weights()
    with pytest.raises(UserWarning, match="^Metric 'largest'"):
        model.fit(X, Y, batch_size=16, verbose=0)
    assert_same(before, model.get_weights())
    model.fit(X, Y, batch_size=16, verbose=0)


class SumIfPrecise(SumByHand):
    """Differentiates a mean, or with another precision a sum."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return ops.mean(ops.square(y - y_pred))

    def train_step(self, *args):
        if jax.config.jax_default_matmul_precision == "highest":
            return super().train_step(*args)
        return keras.Model.train_step(self, *args)


def test_a_step_that_other_settings_of_jax_unmap():
    def act(model):
        model.fit(X, Y, batch_size=16, verbose=0, shuffle=False)
        with jax.default_matmul_precision("highest"):
            model.fit(X, Y, batch_size=16, verbose=0, shuffle=False)
        return model.get_weights()

    with pytest.warns(UserWarning, match="This step runs over the global"):
        plain, ours = run_both(SumIfPrecise, act, optimizer="sgd", loss="mse")
    assert_same(plain, ours)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_programs_do_not_keep_models_alive(is_sharded):
    """As in a search for hyperparameters: many models on one strategy."""
    partitioner = ks.experimental.FullySharded(min_size=4)
    strategy = ks.MirroredStrategy(
        jax.devices()[:2],
        variable_partitioner=partitioner if is_sharded else None,
    )
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    model.fit(X, Y, batch_size=9, epochs=1, verbose=0)
    model.evaluate(X, Y, verbose=0)
    variables = [*model.variables, *model.optimizer.variables]
    gone = [weakref.ref(v) for v in [model, *variables]]
    gone += [weakref.ref(v.value) for v in variables]
    del model, variables
    keras.backend.clear_session()
    gc.collect()
    assert [ref() for ref in gone if ref() is not None] == []

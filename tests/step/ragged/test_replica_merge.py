"""How the state that replicas write becomes one."""

import jax
import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.support.combinations import combine
from tests.support.plain_keras import assert_same, dense, mirrored, run_both

_random = np.random.default_rng(0)
X = _random.normal(size=(24, 3)).astype("float32")
Y = _random.normal(size=(24, 1)).astype("float32")
TRAINING = {"optimizer": "sgd", "loss": "mse"}
BY_STEPS = {
    1: TRAINING | {"steps_per_execution": 1},
    3: TRAINING | {"steps_per_execution": 3},
}

RULES = {
    # name: (dtype, first value, what a batch makes of it, rule)
    "rows": ("int32", 0, lambda old, x: old + x.shape[0], "sum"),
    "total": ("float32", 0, lambda old, x: old + ops.sum(x), "sum"),
    "highest": (
        "float32",
        -9,
        lambda old, x: ops.maximum(old, ops.max(x)),
        "max",
    ),
    "lowest": (
        "float32",
        9,
        lambda old, x: ops.minimum(old, ops.min(x)),
        "min",
    ),
    "most": (
        "int32",
        -9,
        lambda old, x: ops.maximum(old, ops.cast(ops.max(x * 9), "int32")),
        "max",
    ),
    "least": (
        "int32",
        9,
        lambda old, x: ops.minimum(old, ops.cast(ops.min(x * 9), "int32")),
        "min",
    ),
    "some": (
        "bool",
        False,
        lambda old, x: ops.logical_or(old, ops.any(x > 2)),
        "any",
    ),
    "every": (
        "bool",
        True,
        lambda old, x: ops.logical_and(old, ops.all(x < 2)),
        "all",
    ),
    "none yet": (
        "bool",
        False,
        lambda old, x: ops.logical_or(old, ops.any(x > 99)),
        "any",
    ),
    "center": ("float32", 0, lambda old, x: ops.mean(x), "mean"),
    "moving": (
        "float32",
        1,
        lambda old, x: 0.9 * old + 0.1 * ops.mean(x),
        None,
    ),
    "steps": ("int32", 0, lambda old, x: old + 1, None),
    "flips": ("bool", False, lambda old, x: ops.logical_not(old), None),
}


class Counters(keras.layers.Layer):
    """One variable of each kind, written in every call."""

    def build(self, shape):
        self.counters = {}
        for name, (dtype, first, _, rule) in RULES.items():
            variable = self.add_weight(
                name=name.replace(" ", "_"),
                shape=(),
                dtype=dtype,
                initializer="zeros",
                trainable=False,
            )
            variable.assign(ops.cast(first, dtype))
            if rule is not None:
                assert ks.merge(variable, rule) is variable
            self.counters[name] = variable

    def call(self, inputs):
        for name, (_, _, new, _) in RULES.items():
            old = self.counters[name]
            old.assign(new(old.value, inputs))
        return inputs


def counting():
    return keras.Sequential([keras.Input((3,)), Counters(), dense(1)])


def counters(model):
    return {k: np.asarray(v) for k, v in model.layers[0].counters.items()}


@pytest.mark.parametrize(
    ("steps", "rows", "replicas"), combine([1, 3], [24, 21], [2, 8], every=4)
)
def test_each_rule_gives_what_one_device_counts(replicas, rows, steps):
    def act(model):
        options = {"batch_size": 8, "verbose": 0}
        model.fit(X[:rows], Y[:rows], shuffle=False, **options)
        trained = counters(model)
        model.evaluate(X[:rows], Y[:rows], **options)
        return trained, counters(model)

    (plain, _), (ours, _) = run_both(
        counting, act, replicas=replicas, **BY_STEPS[steps]
    )
    assert_same(plain, ours)
    assert int(ours[0]["rows"]) == rows
    assert bool(ours[0]["some"]) == bool((X[:rows] > 2).any())


class Firsts(keras.layers.Layer):
    """What replica 0 saw last."""

    def build(self, shape):
        def weight(dtype):
            return self.add_weight(
                shape=(), dtype=dtype, initializer="zeros", trainable=False
            )

        self.told = ks.merge(weight("float32"), "first")
        self.whole_number = ks.merge(weight("int32"), "first")
        self.boolean = ks.merge(weight("bool"), "first")

    def call(self, inputs):
        self.told.assign(ops.mean(inputs))
        self.whole_number.assign(ops.cast(ops.sum(inputs) * 100, "int32"))
        self.boolean.assign(ops.sum(inputs) > 0)
        return inputs


@pytest.mark.parametrize("replicas", combine([2, 8], every=2))
def test_first_is_what_replica_0_saw(replicas):
    model = keras.Sequential([keras.Input((3,)), Firsts(), dense(1)])
    model.compile(**TRAINING)
    mirrored(replicas).attach(model)
    layer = model.layers[0]
    for start in (0, 8, 16):
        model.train_on_batch(X[start : start + 8], Y[start : start + 8])
        seen = X[start : start + 8 // replicas]
        np.testing.assert_allclose(layer.told, seen.mean(), rtol=1e-5)
        assert abs(int(layer.whole_number) - seen.sum() * 100) <= 1
        assert bool(layer.boolean.value) == (seen.sum() > 0)
        assert_replicated(model)


class Draws(keras.layers.Layer):
    """A random number for each row."""

    def __init__(self, seed):
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, inputs):
        shape = (inputs.shape[0] or 1, 1)
        drawn = keras.random.uniform(shape, seed=self.seed_generator)
        return 0 * inputs[:, :1] + drawn


def drawing(seed):
    return keras.Sequential([keras.Input((3,)), Draws(seed)])


@pytest.mark.parametrize("replicas", [2, 8])
def test_every_replica_draws_numbers_of_its_own(replicas):
    model = mirrored(replicas).attach(drawing(3))
    drawn = model.predict_on_batch(X[:16]).ravel()
    assert len(np.unique(drawn)) == 16
    # Replica 0 draws what one device draws.
    rows = 16 // replicas
    alone = drawing(3).predict_on_batch(X[:rows]).ravel()
    np.testing.assert_array_equal(drawn[:rows], alone)


@pytest.mark.parametrize("replicas", [2, 8])
def test_the_seeds_stay_replicated_and_advance_as_on_one_device(replicas):
    def act(model):
        drawn = [model.predict_on_batch(X[:16]) for _ in range(3)]
        assert len(np.unique(np.concatenate(drawn))) == 48
        return np.asarray(model.layers[0].seed_generator.state.value)

    (plain, _), (ours, _) = run_both(lambda: drawing(3), act, replicas=replicas)
    np.testing.assert_array_equal(ours, plain)


def test_neighboring_seeds_share_no_stream():
    drawn = [
        mirrored(8).attach(drawing(seed)).predict_on_batch(X[:16])
        for seed in (3, 4, 5)
    ]
    assert len(np.unique(np.concatenate(drawn))) == 48


class Mask(keras.layers.Layer):
    """Dropout that remembers which rows it dropped."""

    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5, seed=1)

    def build(self, shape):
        self.seen = self.add_weight(
            shape=(8,), initializer="zeros", trainable=False
        )

    def call(self, inputs, training=False):
        kept = self.dropout(ops.ones((8,)), training=training)
        self.seen.assign(kept)
        return inputs


@pytest.mark.parametrize("steps", [1, 2])
def test_replicas_drop_different_entries(steps):
    model = keras.Sequential([keras.Input((3,)), Mask(), dense(1)])
    model.compile(**TRAINING, steps_per_execution=steps)
    mirrored(8).attach(model)
    model.fit(X[:16], Y[:16], batch_size=8, shuffle=False, verbose=0)
    # The mean of eight masks of 0 and 2: one mask would hold nothing else.
    mean = np.asarray(model.layers[0].seen)
    assert not set(np.unique(mean)) <= {0.0, 2.0}
    assert_replicated(model)
    state = model.layers[0].dropout.seed_generator.state
    assert state.value.dtype == np.uint32


def test_the_dtype_of_state_does_not_change():
    model = counting()
    model.compile(**TRAINING)
    before = [str(v.value.dtype) for v in model.variables]
    mirrored(3).attach(model)
    model.fit(X, Y, batch_size=8, verbose=0)
    model.fit(X[:9], Y[:9], batch_size=9, verbose=0)
    assert [str(v.value.dtype) for v in model.variables] == before


def test_an_array_that_a_user_took_stays_valid():
    model = keras.Sequential([keras.Input((3,)), dense(1)])
    model.compile(**TRAINING)
    mirrored(2).attach(model)
    model.fit(X, Y, batch_size=8, verbose=0)
    taken = [v.value for v in model.variables + model.optimizer.variables]
    copies = [np.array(v) for v in taken]
    model.fit(X, Y, batch_size=8, verbose=0)
    model.evaluate(X, Y, verbose=0)
    for value, copy in zip(taken, copies, strict=True):
        assert not value.is_deleted()
        np.testing.assert_array_equal(value, copy)


def test_variables_that_share_a_buffer_train_apart():
    # jaxlib crashes on a buffer that is donated twice.
    model = keras.Sequential(
        [keras.Input((3,)), dense(3, seed=1), dense(3, seed=2)]
    )
    model.compile(**TRAINING)
    mirrored(2).attach(model)
    first, second = model.layers
    second.kernel.assign(first.kernel)
    targets = np.concatenate([Y, Y, Y], axis=1)
    model.fit(X, targets, batch_size=8, verbose=0)
    assert (np.asarray(first.kernel) != np.asarray(second.kernel)).any()
    pointers = {
        v.value.addressable_shards[0].data.unsafe_buffer_pointer()
        for v in model.trainable_variables
    }
    assert len(pointers) == len(model.trainable_variables)


def test_the_source_of_an_adopted_variable_is_not_deleted():
    model = keras.Sequential([keras.Input((3,)), dense(1)])
    model.compile(**TRAINING)
    sources = [v.value for v in model.variables]
    copies = [np.array(v) for v in sources]
    mirrored(2).attach(model)
    model.fit(X, Y, batch_size=8, verbose=0)
    for value, copy in zip(sources, copies, strict=True):
        assert not value.is_deleted()
        np.testing.assert_array_equal(value, copy)
        assert isinstance(value.sharding, jax.sharding.SingleDeviceSharding)


@pytest.mark.parametrize("replicas", [2, 4])
def test_an_infinite_loss_of_a_row_stays_infinite(replicas):
    """Metrics' changes are summed, and inf - inf would be NaN."""
    y = np.array(Y)
    y[5] = np.inf

    def scaled():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))

    def fit(model):
        options = {"batch_size": 8, "shuffle": False, "verbose": 0}
        return model.fit(X, y, epochs=2, **options).history

    def build():
        return keras.Sequential([keras.Input((3,)), dense()])

    (plain, _), (ours, _) = run_both(
        build, fit, replicas=replicas, optimizer=scaled, loss="mse"
    )
    assert ours["loss"] == plain["loss"] == [np.inf, np.inf]

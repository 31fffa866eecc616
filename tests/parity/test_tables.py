"""Models with tables that are sharded by columns give one device's numbers.

A step of theirs gathers ids and exchanges rows; it gathers no table. The
invariant is that of tests/parity/test_sharded.py.
"""

import functools
import re

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks
from benchmarks.large_steps.recommender import FEATURES
from benchmarks.large_steps.recommender import make_model as make_recommender
from keras_strategies.testing import assert_replicated
from keras_strategies.variables.model_variables import all_variables
from tests.support.combinations import combine, cover, some
from tests.support.strategies import make_strategy

WORDS, WIDTH, LENGTH = 600, 24, 3
TABLES = 2, 40, 200, 900, 5000
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
}


def table(words=WORDS, width=WIDTH, **options):
    seed = keras.initializers.RandomNormal(seed=words)
    return layers.Embedding(
        words, width, embeddings_initializer=seed, **options
    )


def make(inputs, value, optimizer="adam"):
    value = layers.Dense(
        1, kernel_initializer=keras.initializers.GlorotUniform(3), name="out"
    )(value)
    model = keras.Model(inputs, value)
    model.compile(OPTIMIZERS[optimizer](), "mse", metrics=["mae"])
    return model


def pooled(optimizer="adam", **options):
    ids = keras.Input((LENGTH,), dtype="int32")
    rows = table(**options)(ids)
    return make(ids, layers.GlobalAveragePooling1D()(rows), optimizer)


def masked():
    return pooled(mask_zero=True)


def regularized():
    return pooled(embeddings_regularizer="l2")


def constrained():
    return pooled(embeddings_constraint="unit_norm")


def looked_up_twice():
    ids = keras.Input((LENGTH,), dtype="int32")
    shared = table()
    values = shared(ids) * shared(ids[:, ::-1])
    return make(ids, layers.Flatten()(values))


class Tied(layers.Layer):
    """A table whose transpose is the head."""

    def __init__(self, **options):
        super().__init__(**options)
        self.table = layers.ReversibleEmbedding(
            WORDS,
            WIDTH,
            embeddings_initializer=keras.initializers.RandomNormal(seed=1),
        )

    def build(self, shape):
        self.table.build(shape)

    def call(self, ids):
        rows = ops.tanh(self.table(ids))
        return ops.logsumexp(self.table(rows, reverse=True), axis=-1)


def tied():
    ids = keras.Input((LENGTH,), dtype="int32")
    return make(ids, Tied()(ids))


class Taken(layers.Layer):
    """Reads its table with `ops.take`, some of its ids out of range."""

    def build(self, shape):
        self.table = self.add_weight(
            shape=(WORDS, WIDTH),
            initializer=keras.initializers.RandomNormal(seed=2),
            name="embeddings",
        )

    def call(self, ids):
        rows = ops.take(self.table, ids - WORDS // 2, axis=0)
        return ops.mean(ops.tanh(rows), axis=1)


def taken():
    ids = keras.Input((LENGTH,), dtype="int32")
    return make(ids, Taken()(ids))


def in_bfloat16():
    ids = keras.Input((LENGTH,), dtype="int32")
    rows = table(dtype="mixed_bfloat16")(ids)
    return make(ids, layers.Flatten(dtype="float32")(ops.tanh(rows)))


def with_lora():
    ids = keras.Input((LENGTH,), dtype="int32")
    embedding = table()
    model = make(ids, layers.GlobalAveragePooling1D()(embedding(ids)))
    embedding.enable_lora(
        8,
        a_initializer=keras.initializers.RandomNormal(seed=4),
        b_initializer=keras.initializers.RandomNormal(seed=5),
    )
    model.compile(OPTIMIZERS["adam"](), "mse", metrics=["mae"])
    return model


def accumulated():
    model = pooled()
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


def recommender(optimizer="adam"):
    """Tables of several sizes and dense features, as DLRM has them."""
    keras.utils.set_random_seed(7)
    return make_recommender(TABLES, OPTIMIZERS[optimizer](), WIDTH, 16)


MODELS = {
    f.__name__: f
    for f in (
        *(pooled, masked, regularized, constrained, looked_up_twice, tied),
        *(taken, in_bfloat16, with_lora, accumulated),
    )
}
# bfloat16 has 8 significant bits.
TOLERANCES = {"in_bfloat16": 2**-7}


def make_data(model, rows):
    random = np.random.default_rng(rows)
    ids = random.integers(0, WORDS, (rows, LENGTH)).astype("int32")
    ids[::4, 1] = 0
    y = random.normal(size=(rows, 1)).astype("float32")
    if len(model.inputs) == 1:
        return ids, y
    ids = random.integers(0, max(TABLES), (rows, len(TABLES)))
    features = random.normal(size=(rows, FEATURES)).astype("float32")
    return [ids.astype("int32"), features], np.float32(y > 0)


def train(model, rows, batch_size):
    x, y = make_data(model, rows)
    options = {"batch_size": batch_size, "verbose": 0}
    history = model.fit(x, y, epochs=2, shuffle=False, **options).history
    return {
        "history": history,
        "state": [np.asarray(v) for v in all_variables(model)],
        "evaluate": model.evaluate(x, y, return_dict=True, **options),
        "predict": model.predict(x, **options),
    }


def assert_equal(found, wanted, tolerance=3e-5):
    def check(ours, plain):
        np.testing.assert_allclose(ours, plain, rtol=tolerance, atol=tolerance)

    jax.tree.map(check, found, wanted)


def compile_text(strategy, model, rows=8):
    x, y = make_data(model, rows)
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (x, y)
    )
    return strategy.compile_step(model, shapes).as_text()


def count_exchanges(text):
    return len(re.findall(r" all-to-all(?:-start)?\(", text))


@functools.cache
def on_one_device(make, args, rows, batch_size):
    return train(make(*args), rows, batch_size)


def check(make, strategy, rows, batch_size, tolerance=3e-5, args=()):
    wanted = on_one_device(make, args, rows, batch_size)
    with strategy.scope():
        model = make(*args)
    assert_equal(train(model, rows, batch_size), wanted, tolerance)
    assert_replicated(model)
    return model


NAMES = ["sharded2", "sharded3", "sharded4", "sharded8"]


@pytest.mark.parametrize(
    ("name", "optimizer"),
    combine([*NAMES, "sharded8_in_groups_of_4"], OPTIMIZERS, every=3),
)
@pytest.mark.parametrize(
    ("rows", "batch_size"), [(48, 24), (53, 24)], ids=["even", "uneven"]
)
def test_every_optimizer_equals_one_device(name, optimizer, rows, batch_size):
    strategy = make_strategy(name)
    model = check(pooled, strategy, rows, batch_size, args=(optimizer,))
    (embeddings,) = [v for v in model.weights if v.name == "embeddings"]
    assert tuple(embeddings.value.sharding.spec) == (None, "replica")
    text = compile_text(strategy, model, 24)
    # The rows, and their gradient.
    assert count_exchanges(text) == 2
    assert f"{WORDS},{WIDTH}]" not in text


@pytest.mark.parametrize(
    ("name", "optimizer", "rows"), cover(NAMES, OPTIMIZERS, [48, 53])
)
def test_a_recommender_equals_one_device(name, optimizer, rows):
    strategy = make_strategy(name)
    model = check(recommender, strategy, rows, 24, args=(optimizer,))
    tables = [v for v in model.weights if v.name == "embeddings"]
    sharded = [v for v in tables if not v.value.sharding.is_fully_replicated]
    assert len(tables) == len(TABLES)
    # Small ones are gathered: ids and rows would be more bytes.
    count = count_exchanges(compile_text(strategy, model, 24))
    assert 0 < count < 2 * len(sharded)


@pytest.mark.parametrize(
    "name",
    some(
        MODELS, set(MODELS) - {"constrained", "looked_up_twice", "accumulated"}
    ),
)
def test_every_model_equals_one_device(name):
    tolerance = TOLERANCES.get(name, 3e-5)
    for rows, batch_size in ((32, 16), (37, 15)):
        check(
            MODELS[name], make_strategy("sharded4"), rows, batch_size, tolerance
        )


@pytest.mark.parametrize("name", ["pooled", "tied"])
def test_slots_that_are_sharded_by_columns(name):
    strategy = make_strategy("sharded_slots4")
    model = check(MODELS[name], strategy, 32, 16)
    # The gradient alone.
    assert count_exchanges(compile_text(strategy, model, 16)) == 1


@pytest.mark.parametrize(
    "layout_map",
    [{".*out/kernel": (None, None)}, {".*/embeddings": ("model", None)}],
    ids=["replicated", "rows-over-cores"],
)
@pytest.mark.parametrize("name", ["pooled", "tied"])
def test_replicas_of_several_cores(name, layout_map):
    strategy = make_strategy("sharded2_of_2_cores", layout_map)
    model = check(MODELS[name], strategy, 32, 16)
    (embeddings,) = [v for v in model.weights if v.name == "embeddings"]
    rows = "model" if ".*/embeddings" in layout_map else None
    assert tuple(embeddings.value.sharding.spec) == (rows, "replica")
    assert count_exchanges(compile_text(strategy, model, 16)) == 2


@pytest.mark.parametrize("partitioner", [0, 1])
def test_checkpoints_resume_in_the_other_layout(partitioner, tmp_path):
    """Bit for bit, in both directions."""

    def by_rows(path, shape, dtype):
        return 0 if shape and shape[0] % 2 == 0 else None

    partitioners = by_rows, ks.experimental.FullySharded(min_size=1)
    states = []
    for k in (partitioner, 1 - partitioner):
        keras.backend.clear_session()
        strategy = ks.MirroredStrategy(
            jax.devices()[:2], variable_partitioner=partitioners[k]
        )
        with strategy.scope():
            model = pooled()
            model.optimizer.build(model.trainable_variables)
        parts = {"model": model, "optimizer": model.optimizer}
        checkpoint = ks.checkpoint.Checkpoint(**parts)
        manager = ks.checkpoint.CheckpointManager(checkpoint, tmp_path)
        x, y = make_data(model, 16)
        type(model)._symbolic_build(model, data_batch=(x, y, None))
        if not states:
            model.fit(x, y, batch_size=8, epochs=2, verbose=0)
            manager.save()
        else:
            assert manager.restore_or_initialize()
        manager.close()
        states.append([np.asarray(v) for v in all_variables(model)][:4])
        (embeddings,) = [v for v in model.weights if v.name == "embeddings"]
        spec = tuple(embeddings.value.sharding.spec)
        assert spec == ((None, "replica") if k else ("replica",))
    for one, other in zip(*states, strict=True):
        np.testing.assert_array_equal(one, other)

"""Replicas whose cores share sequences: one device's numbers."""

import functools

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.support.strategies import cores_strategy

LENGTH, WIDTH, WORDS = 16, 16, 40
ROWS, BATCH = 22, 8


class Block(layers.Layer):
    """A block of a decoder, with positions and a mask of its own."""

    def __init__(self, window=None, is_packed=False, **options):
        super().__init__(**options)
        self.window, self.is_packed = window, is_packed
        self.attention = layers.GroupQueryAttention(4, 4, 2)
        self.norms = [layers.RMSNormalization() for _ in range(2)]
        self.up, self.down = layers.Dense(32, "silu"), layers.Dense(WIDTH)

    def build(self, shape):
        shape = shape[0] if self.is_packed else shape
        self.attention.build(shape, shape)
        for norm in self.norms:
            norm.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 32))

    def call(self, inputs):
        x, segments = inputs if self.is_packed else (inputs, None)
        places = ops.arange(x.shape[1])
        mask = places[:, None] >= places
        if self.window is not None:
            mask &= places[:, None] - places < self.window
        mask = ops.broadcast_to(mask[None], (ops.shape(x)[0], *mask.shape))
        if segments is not None:
            mask &= segments[:, :, None] == segments[:, None]
        y = self.norms[0](x)
        y += ops.sin(ops.cast(places, "float32"))[:, None]
        x = x + self.attention(y, y, attention_mask=mask)
        return x + self.down(self.up(self.norms[1](x)))


def llama():
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(words)
    for _ in range(2):
        x = Block()(x)
    return keras.Model(words, layers.Dense(WORDS)(x))


def gemma():
    """A tied head with a soft cap, computed by blocks of words."""
    words = keras.Input((LENGTH,), dtype="int32")
    table = layers.ReversibleEmbedding(WORDS, WIDTH, logit_soft_cap=5.0)
    x = Block()(Block(window=5)(table(words)))
    model = keras.Model(words, table(x, reverse=True))
    ks.experimental.blocked_head(model, block_size=128)
    return model


def bert():
    """No causal mask, but padding; the first token's class."""
    words = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, mask_zero=True)(words)
    for _ in range(2):
        x = layers.LayerNormalization()(
            x + layers.MultiHeadAttention(4, 4, dropout=0.0)(x, x)
        )
    return keras.Model(words, layers.Dense(3)(x[:, 0]))


def packed():
    words = keras.Input((LENGTH,), dtype="int32", name="words")
    segments = keras.Input((LENGTH,), dtype="int32", name="segments")
    x = layers.Embedding(WORDS, WIDTH)(words)
    for _ in range(2):
        x = Block(is_packed=True)([x, segments])
    inputs = {"words": words, "segments": segments}
    return keras.Model(inputs, layers.Dense(WORDS)(x))


MODELS = {"llama": llama, "gemma": gemma, "bert": bert, "packed": packed}


def draw(name):
    rng = np.random.default_rng(3)
    x = rng.integers(1, WORDS, (ROWS, LENGTH))
    y = rng.integers(0, WORDS, (ROWS, LENGTH))
    weights = rng.uniform(size=(ROWS, LENGTH)).astype("float32")
    if name == "bert":
        x *= np.arange(LENGTH) < rng.integers(2, LENGTH, (ROWS, 1))
        return x, y[:, 0] % 3, weights[:, 0]
    if name == "packed":
        segments = np.sort(rng.integers(0, 3, (ROWS, LENGTH)))
        return {"words": x, "segments": segments}, y, weights
    return x, y, weights


def train(strategy, name, **options):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = MODELS[name]()
        model.compile(
            keras.optimizers.Adam(0.01, epsilon=0.01),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["sparse_categorical_accuracy"],
            **options,
        )
    x, y, weights = draw(name)
    options = {"batch_size": BATCH, "verbose": 0}
    history = model.fit(x, y, sample_weight=weights, shuffle=False, **options)
    found = {
        "history": history.history,
        "evaluate": model.evaluate(x, y, sample_weight=weights, **options),
        "predict": model.predict(x, **options),
        "weights": model.get_weights(),
    }
    return model, found


@functools.cache
def on_one_device(name):
    return train(ks.OneDeviceStrategy("cpu:0"), name)[1]


def make(replicas, cores, shards=None):
    partitioner = None
    if shards is not None:
        partitioner = ks.experimental.FullySharded(shards, min_size=1)
    return cores_strategy(
        replicas, cores, partitioner=partitioner, context_parallel=True
    )


STRATEGIES = {
    "1x4": (1, 4),
    "2x2": (2, 2),
    "2x4": (2, 4),
    "1x8": (1, 8),
    "3x2": (3, 2),
    "sharded 2x2": (2, 2, 2),
    "sharded 2x4": (2, 4, 2),
}
QUICK = {("gemma", "sharded 2x2"), ("bert", "1x8")}


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        pytest.param(
            name,
            strategy,
            marks=() if (name, strategy) in QUICK else pytest.mark.slow,
        )
        for name in MODELS
        for strategy in STRATEGIES
    ],
)
def test_numbers_are_those_of_one_device(name, strategy):
    """With 22 rows in batches of 8: even and indivisible ones."""
    model, found = train(make(*STRATEGIES[strategy]), name)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5),
        found,
        on_one_device(name),
    )
    assert_replicated(model)
    if strategy.startswith("sharded"):
        kernels = [v for v in model.trainable_variables if len(v.shape) > 1]
        axes = [set(v.value.sharding.spec) - {None} for v in kernels]
        assert {"replica", "model"} in axes


def test_cores_draw_the_masks_of_one_device():
    def fit(strategy):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            x = words = keras.Input((LENGTH,), dtype="int32")
            x = layers.Embedding(WORDS, WIDTH)(x)
            x = layers.Dropout(0.3, seed=3)(x)
            x += layers.MultiHeadAttention(4, 4, dropout=0.2, seed=5)(x, x)
            x = layers.SpatialDropout1D(0.2, seed=4)(x)
            model = keras.Model(words, layers.Dense(3)(x))
            model.compile("sgd", "mse")
        words = draw("llama")[0]
        targets = np.ones((ROWS, LENGTH, 3), "float32")
        fitted = model.fit(words, targets, batch_size=BATCH, verbose=0)
        return fitted.history["loss"], model.get_weights()

    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6),
        fit(make(1, 4)),
        fit(ks.OneDeviceStrategy("cpu:0")),
    )


@pytest.mark.slow
def test_several_steps_in_one_execution():
    found = train(make(2, 4), "llama", steps_per_execution=2)[1]
    for name in ("evaluate", "predict", "weights"):
        wanted = on_one_device("llama")[name]
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, atol=2e-5),
            found[name],
            wanted,
        )


@pytest.mark.slow
def test_bfloat16():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        found, wanted = (
            train(strategy, "llama")[1]["evaluate"]
            for strategy in (make(2, 4), ks.OneDeviceStrategy("cpu:0"))
        )
    finally:
        keras.config.set_dtype_policy(policy)
    np.testing.assert_allclose(found, wanted, atol=0.02)


def test_functions_that_run_on_replicas():
    strategy = make(2, 4)
    values = np.arange(4 * LENGTH * 3).reshape(4, LENGTH, 3)
    rows = strategy.experimental_distribute_values_from_function(
        lambda context: values[2 * context.replica_id_in_sync_group :][:2]
    )

    def compute(x):
        return jax.numpy.cumsum(x, axis=1)[:, ::-1]

    for dtype in ("int32", "float32", "bfloat16"):
        found = strategy.run(lambda x, d=dtype: compute(x.astype(d)), (rows,))
        parts = strategy.experimental_local_results(found)
        wanted = np.cumsum(values, axis=1)[:, ::-1]
        np.testing.assert_allclose(
            np.concatenate([np.asarray(p, "float32") for p in parts]),
            wanted,
            rtol=0.02 if dtype == "bfloat16" else 0,
        )


def compile_on_cores(*blocks):
    strategy = make(1, 4)
    with strategy.scope():
        words = keras.Input((LENGTH,), dtype="int32")
        x = layers.Embedding(WORDS, WIDTH)(words)
        for block in blocks:
            x = block(x)
        model = keras.Model(words, layers.Dense(WORDS)(x))
        model.compile("sgd", "mse")
    x = jax.ShapeDtypeStruct((4, LENGTH), "int32")
    y = jax.ShapeDtypeStruct((4, LENGTH, WORDS), "float32")
    return strategy.compile_step(model, (x, y)).as_text()


def test_activations_are_divided_along_tokens():
    text = compile_on_cores(Block(), Block())
    assert f"[4,{LENGTH // 4},{WIDTH}]" in text
    assert f"[4,{LENGTH},{WIDTH}]" not in text


def test_blocks_of_words_keep_the_tokens_divided():
    strategy = make(2, 4, 2)
    with strategy.scope():
        model = gemma()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss)
        batch = jax.ShapeDtypeStruct((8, LENGTH), "int32")
        text = strategy.compile_step(model, (batch, batch)).as_text()
    assert f"[4,{LENGTH // 4},{WIDTH}]" in text
    for shape in (f"4,{LENGTH},{WIDTH}", f"{4 * LENGTH},{WIDTH}"):
        assert f"[{shape}]" not in text

"""Losses over blocks of words: numbers, programs, and what reads all logits."""

import contextlib
import functools
import inspect
import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers, losses, metrics

import keras_strategies as ks
from keras_strategies.kernels.blocked_head import count_logit_bytes
from keras_strategies.passes.loop_storage import rewrite_loops
from keras_strategies.testing import assert_replicated
from tests.support.strategies import make_strategy

WORDS, WIDTH, LENGTH = 301, 8, 5
RANDOM = np.random.default_rng(0)
HIDDEN = RANDOM.normal(size=(3, LENGTH, WIDTH)).astype("float32")
KERNEL = RANDOM.normal(size=(WIDTH, WORDS)).astype("float32")
BIAS = RANDOM.normal(size=WORDS).astype("float32")
LABELS = RANDOM.integers(-2, WORDS + 2, size=(3, LENGTH))
X = RANDOM.integers(0, WORDS, size=(22, LENGTH))
Y = RANDOM.integers(0, WORDS, size=(22, LENGTH))
Y[:, :2] = X[:, :2] = 3
WEIGHTS = RANDOM.random((22, LENGTH)).astype("float32")
cross_entropy = ks.experimental.linear_cross_entropy
NAMES = inspect.signature(losses.SparseCategoricalCrossentropy).parameters
# Keras 3.15 has no smoothing.
SMOOTHING = {"label_smoothing": 0.2} if "label_smoothing" in NAMES else {}


def expected(hidden, kernel, bias, *, cap=None, smoothing=0.0):
    logits = hidden @ kernel + bias
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)
    labels = jax.nn.one_hot(LABELS, WORDS) * (1 - smoothing) + smoothing / WORDS
    labels *= ((LABELS >= 0) & (LABELS < WORDS))[..., None]
    return -(labels * jax.nn.log_softmax(logits)).sum(-1)


@pytest.mark.parametrize("block_size", [128, 256, 8192])
@pytest.mark.parametrize("words_first", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"cap": 3.0}, {"smoothing": 0.2}], ids=str
)
def test_losses_and_gradients(block_size, words_first, options):
    def compute(hidden, kernel, bias):
        return cross_entropy(
            hidden,
            kernel.T if words_first else kernel,
            LABELS,
            bias=bias,
            words_first=words_first,
            soft_cap=options.get("cap"),
            label_smoothing=options.get("smoothing", 0.0),
            block_size=block_size,
        )

    arrays, given = (HIDDEN, KERNEL, BIAS), HIDDEN[..., 0]
    wanted, back = jax.vjp(lambda *a: expected(*a, **options), *arrays)
    found, derive = jax.vjp(compute, *arrays)
    np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-6)
    for a, b in zip(derive(given), back(given), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_products_of_bfloat16_add_up_in_float32():
    hidden, kernel = (jnp.asarray(a, "bfloat16") for a in (HIDDEN, KERNEL))
    found, derive = jax.vjp(
        lambda h, k: cross_entropy(h, k, LABELS, ignore_label=3), hidden, kernel
    )
    exact = [a.astype("float32") for a in (hidden, kernel)]
    wanted, back = jax.vjp(lambda h, k: expected(h, k, 0.0), *exact)
    assert found.dtype == "float32"
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
    for a, b in zip(derive(wanted), back(wanted), strict=True):
        assert a.dtype == "bfloat16"
        error = jnp.abs(a.astype("float32") - b).max() / jnp.abs(b).max()
        assert error < 1e-2


@pytest.mark.parametrize("dtype", ["int64", "uint8"])
def test_labels_to_ignore(dtype):
    labels = np.full((3, LENGTH), 7, dtype)
    assert not np.any(cross_entropy(HIDDEN, KERNEL, labels, ignore_label=7))
    assert np.all(np.asarray(cross_entropy(HIDDEN, KERNEL, labels)) > 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kernel": KERNEL.T}, ValueError, "See `words_first`"),
        ({"labels": LABELS[:2]}, ValueError, "the labels' shape"),
        ({"labels": LABELS * 1.0}, TypeError, "must be integers"),
        ({"label_smoothing": 2.0}, ValueError, "from 0 to 1"),
        ({"soft_cap": 0.0}, ValueError, "`soft_cap` must be > 0"),
        ({"block_size": -1}, ValueError, "`block_size` must be > 0"),
    ],
)
def test_wrong_arguments(change, error, message):
    given = {"hidden": HIDDEN, "kernel": KERNEL, "labels": LABELS}
    with pytest.raises(error, match=message):
        cross_entropy(**given | change)


def make_model(kind, *, is_blocked=True):
    inputs = keras.Input((LENGTH,), dtype="int32")
    if kind == "dense":
        embed = layers.Embedding(WORDS, WIDTH, mask_zero=True)
        x = layers.LSTM(WIDTH, return_sequences=True)(embed(inputs))
        outputs = layers.Dense(WORDS)(x)
    else:
        embed = layers.ReversibleEmbedding(
            WORDS,
            WIDTH,
            tie_weights=kind != "untied",
            logit_soft_cap=5.0 if kind == "capped" else None,
        )
        x = layers.Dense(WIDTH, "tanh")(embed(inputs))
        outputs = embed(x, reverse=True)
    model = keras.Model(inputs, outputs)
    if is_blocked:
        ks.experimental.blocked_head(model, block_size=128)
    model.compile(
        keras.optimizers.Adam(0.01),
        losses.SparseCategoricalCrossentropy(
            from_logits=True,
            ignore_class=3 if kind == "untied" else None,
            **SMOOTHING if kind == "capped" else {},
        ),
        weighted_metrics=[metrics.SparseCategoricalAccuracy()],
    )
    return model


def train(kind, strategy=None, weights=None, **options):
    keras.utils.set_random_seed(0)
    scope = strategy.scope() if strategy else contextlib.nullcontext()
    with scope:
        model = make_model(kind, **options)
    history = model.fit(
        X,
        Y,
        sample_weight=weights,
        batch_size=8,
        epochs=2,
        verbose=0,
        validation_data=(X[:5], Y[:5]),
        shuffle=False,
    ).history
    return model, history


@pytest.mark.parametrize(
    ("kind", "name", "weights"),
    [
        ("capped", "mirrored2", None),
        ("untied", "sharded3", WEIGHTS),
        ("dense", "mirrored3", WEIGHTS),
        ("tied", "sharded8", None),
    ],
)
def test_equals_one_device(kind, name, weights, recwarn):
    plain, wanted = train(kind, weights=weights, is_blocked=False)
    model, history = train(kind, make_strategy(name), weights)
    assert not [w for w in recwarn if "global batch" in str(w.message)]
    for key, values in wanted.items():
        np.testing.assert_allclose(history[key], values, atol=3e-5)
    for a, b in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)
    one, two = (m.predict(X[:3], verbose=0) for m in (model, plain))
    np.testing.assert_allclose(one, two, atol=3e-5)
    assert_replicated(model)


@pytest.mark.parametrize("is_blocked", [False, True])
def test_logits_are_not_stored(is_blocked):
    strategy = make_strategy("mirrored2")
    with strategy.scope():
        model = make_model("capped", is_blocked=is_blocked)
    text = strategy.compile_step(model, (X[:8], Y[:8])).as_text()
    shapes = (f"[4,{LENGTH},{WORDS}]", f"[{4 * LENGTH},{WORDS}]")
    assert any(shape in text for shape in shapes) != is_blocked


def test_a_sharded_kernel_is_gathered_by_blocks():
    strategy = make_strategy("sharded2")
    with strategy.scope():
        model = make_model("untied")
    text = strategy.compile_step(model, (X[:8], Y[:8])).as_text()
    gathered = re.findall(r"= f32(\S+)\{.*\} all-gather\(", text)
    assert f"[{WIDTH},128]" in gathered
    assert f"[{WIDTH},{WORDS}]" not in gathered
    scattered = re.findall(r"= f32(\S+)\{.*\} reduce-scatter\(", text)
    assert f"[{WIDTH // 2},128]" in scattered
    assert f"[{WIDTH // 2},{WORDS}]" not in scattered


def test_what_blocks_compute_is_not_kept():
    def loss(kernel):
        labels = jnp.arange(2)
        given = jnp.ones((2, 64)), kernel, labels
        return cross_entropy(*given, block_size=128).sum()

    traced = jax.make_jaxpr(jax.grad(loss))(jnp.ones((64, 512)))
    assert str(rewrite_loops(traced)) == str(traced)


def test_plans_advise_it():
    strategy = make_strategy("mirrored2")
    batch = jax.ShapeDtypeStruct((1024, LENGTH), "int32")
    options = {"strategies": "replicated"}
    make = functools.partial(make_model, "tied", is_blocked=False)
    (step,) = strategy.plan(make, (batch, batch), **options).steps
    advice = "`ks.experimental.blocked_head(model)` computes the loss without"
    assert advice in step.advice


def test_the_bytes_of_logits_are_counted():
    models = [make_model("tied", is_blocked=b) for b in (False, True)]
    shape = jax.ShapeDtypeStruct((8, LENGTH), "int32")
    found = [count_logit_bytes(model, shape) for model in models]
    assert found == [2 * 8 * LENGTH * WORDS * 4, 0]


@pytest.mark.parametrize(
    ("loss", "metric", "reader"),
    [
        (
            losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics.SparseTopKCategoricalAccuracy(name="top"),
            "The metric 'top'",
        ),
        (losses.MeanSquaredError(), None, "The loss 'MeanSquaredError'"),
    ],
)
def test_what_reads_all_logits_is_named(loss, metric, reader):
    inputs = keras.Input((WIDTH,))
    strategy = make_strategy("mirrored2")
    with strategy.scope():
        model = keras.Model(inputs, layers.Dense(WORDS)(inputs))
        ks.experimental.blocked_head(model)
        model.compile("sgd", loss, metrics=[metric] if metric else None)
    labels = np.arange(8) if metric else np.ones((8, WORDS))
    with pytest.warns(UserWarning, match=f"{reader} reads all logits"):
        model.fit(np.ones((8, WIDTH)), labels, verbose=0)


def test_metrics_of_ones_own_read_logits():
    class Model(keras.Model):
        def compute_metrics(self, x, y, y_pred, sample_weight=None):
            return {"largest": keras.ops.mean(keras.ops.max(y_pred, axis=-1))}

    inputs = keras.Input((WIDTH,))
    found = []
    for is_blocked in (False, True):
        keras.utils.set_random_seed(0)
        strategy = make_strategy("mirrored2")
        with strategy.scope():
            model = Model(inputs, layers.Dense(WORDS)(inputs))
            if is_blocked:
                ks.experimental.blocked_head(model)
            loss = losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile("sgd", loss)
        x = HIDDEN.reshape(-1, WIDTH)[:8]
        history = model.fit(x, np.arange(8), verbose=0).history
        found.append(history["largest"])
    np.testing.assert_allclose(*found, rtol=1e-6)


@pytest.mark.parametrize(
    "end",
    [layers.Dense(WORDS, "softmax"), layers.ReLU(), lambda x: x * 2.0],
    ids=["softmax", "layer", "operation"],
)
def test_a_model_that_does_not_end_in_logits_is_refused(end):
    inputs = keras.Input((WIDTH,))
    with pytest.raises(ValueError, match="end in a `Dense` layer without"):
        ks.experimental.blocked_head(keras.Model(inputs, end(inputs)))


def test_a_loss_of_ones_own_stays_mapped(recwarn):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.embed = layers.Embedding(WORDS, WIDTH)
            self.head = layers.Dense(WORDS)

        def build(self, shape):
            self.embed.build(shape)
            self.head.build((None, None, WIDTH))

        def call(self, x):
            return self.embed(x)

        def compute_loss(self, x, y, y_pred, *args, **kwargs):
            given = y_pred, self.head.kernel, y
            return keras.ops.mean(cross_entropy(*given, bias=self.head.bias))

    def fit(scope):
        keras.utils.set_random_seed(0)
        with scope:
            model = Model()
            model.compile("adam")
        model.fit(X, Y, batch_size=8, verbose=0, shuffle=False)
        return model.get_weights()

    wanted = fit(contextlib.nullcontext())
    for name in ("mirrored2", "sharded3"):
        found = fit(make_strategy(name).scope())
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, atol=3e-6)
    assert not [w for w in recwarn if "global batch" in str(w.message)]

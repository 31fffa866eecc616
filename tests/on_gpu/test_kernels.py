"""cuDNN's kernels on a GPU: the numbers of plain operations on a CPU."""

import jax
import keras
import numpy as np
import pytest
from keras import layers

import keras_strategies as ks

pytestmark = pytest.mark.on_gpu

LENGTH, WIDTH = 128, 64


@pytest.fixture(autouse=True)
def dtype_policy():
    yield
    keras.config.set_dtype_policy("float32")


class Causal(layers.Layer):
    """Causal attention, which a padding mask may restrict."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, WIDTH // 2)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return x + self.attention(x, x, use_causal_mask=True)


def attention(has_padding=False):
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(9, WIDTH, mask_zero=has_padding)(tokens)
    if has_padding:
        x = layers.MultiHeadAttention(2, WIDTH // 2)(x, x, use_causal_mask=True)
    else:
        x = Causal()(x)
    return keras.Model(tokens, layers.Dense(4, dtype="float32")(x))


def grouped():
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(9, WIDTH)(tokens)
    x = layers.GroupQueryAttention(16, 4, 2)(x, x, use_causal_mask=True)
    return keras.Model(tokens, layers.Dense(4, dtype="float32")(x))


def lstm():
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(9, WIDTH)(tokens)
    x = layers.Bidirectional(layers.LSTM(32, return_sequences=True))(x)
    return keras.Model(tokens, layers.Dense(4, dtype="float32")(x))


# A model, its policy, what names its kernel in a program, and the tolerance.
CASES = {
    "attention, bfloat16": (attention, "mixed_bfloat16", "fmha", 3e-2),
    "attention, float16": (attention, "mixed_float16", "fmha", 5e-3),
    "attention, padding": (
        lambda: attention(has_padding=True),
        *("mixed_bfloat16", "fmha", 3e-2),
    ),
    "attention, float32": (attention, "float32", "", 1e-4),
    "grouped": (grouped, "mixed_bfloat16", "fmha", 3e-2),
    "lstm, float32": (lstm, "float32", "cudnn_rnn", 1e-3),
    "lstm, bfloat16": (lstm, "mixed_bfloat16", "", 3e-2),
}


def train(strategy, make, rows):
    """Returns the model, its batch, and what three steps give."""
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = make()
        model.compile(keras.optimizers.SGD(0.1, clipnorm=1.0), "mse")
    random = np.random.default_rng(0)
    x = random.integers(0, 9, (rows, LENGTH)).astype("int32")
    y = random.normal(size=(rows, LENGTH, 4)).astype("float32")
    losses = [float(model.train_on_batch(x, y)) for _ in range(3)]
    weights = [np.asarray(v) for v in model.trainable_variables]
    found = (losses, weights, model.predict(x, verbose=0))
    return model, (x, y), found


@pytest.mark.parametrize(
    ("make", "policy", "kernel", "tolerance"), CASES.values(), ids=CASES
)
def test_a_model_has_the_numbers_of_a_cpu(make, policy, kernel, tolerance):
    keras.config.set_dtype_policy(policy)
    rows = 8
    gpu = ks.MirroredStrategy(jax.devices("gpu")[:1])
    model, batch, found = train(gpu, make, rows)
    if policy == "mixed_float16":
        # XLA cannot compute JAX's attention in float16 on CPUs.
        keras.config.set_dtype_policy("float32")
    # A strategy of CPU devices in a process with a GPU takes no kernels.
    cpu = ks.MirroredStrategy(jax.devices("cpu")[:2])
    _, _, expected = train(cpu, make, rows)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, rtol=tolerance, atol=tolerance
        ),
        *(found, expected),
    )
    text = gpu.compile_step(model, batch).as_text()
    assert ("fmha" in text) == (kernel == "fmha")
    assert ("cudnn_rnn" in text) == (kernel == "cudnn_rnn")

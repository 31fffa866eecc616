"""What Keras does with attention on TPUs: kernels/attention.py.

The kernel is interpreted here. When a test of it fails, Keras may call it as it
should.
"""

import importlib
import inspect
import types

import jax
import keras
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from keras_strategies.keras_bridge.keras_names import NN as keras_nn
from keras_strategies.kernels.attention import LAYERS

LENGTH, DEPTH = 128, 128


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    shape = (3, 1, LENGTH, 1, DEPTH)
    return tuple(rng.normal(size=shape).astype("float32"))


def on_tpu(monkeypatch, arrays, **given):
    class Jax:
        def __getattr__(self, name):
            return getattr(jax, name)

        def devices(self):
            return [types.SimpleNamespace(platform="tpu")]

    def attention(query, key, value):
        return keras_nn.dot_product_attention(query, key, value, **given)

    with monkeypatch.context() as patch, pltpu.force_tpu_interpret_mode():
        patch.setattr(keras_nn, "jax", Jax())
        return np.asarray(jax.jit(attention)(*arrays))


def own(arrays, **given):
    return np.asarray(keras_nn.dot_product_attention(*arrays, **given))


def test_traced_arrays_refer_to_their_equations():
    """kernels/mask_values.py follows them."""
    outer = []

    def inner(x):
        y = jax.numpy.multiply(x, outer[0])
        equation = y.parent
        assert equation.primitive.name == "mul"
        assert list(equation.outvars) == [y.val]
        one, two = equation.invars
        assert one.full_lower() is x
        # A value of the outer trace.
        assert two.full_lower() is outer[0]
        return y

    def call(x):
        outer.append(x + 1)
        assert x.parent is None
        assert outer[0].parent.invars[1].full_lower() == 1
        return jax.checkpoint(inner)(x)

    jax.jit(call)(1.0)


def test_the_arguments_are_those_that_are_replaced():
    names = list(inspect.signature(keras_nn.dot_product_attention).parameters)
    assert names == [
        *("query", "key", "value", "bias", "mask", "scale", "is_causal"),
        *("flash_attention", "attn_logits_soft_cap"),
    ]


def test_attention_without_a_mask_is_causal_and_not_scaled(monkeypatch, arrays):
    found = on_tpu(monkeypatch, arrays)
    assert np.abs(found - own(arrays)).max() > 1
    wanted = own(arrays, is_causal=True, scale=1.0)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_causal_attention_has_no_cap_of_its_scores(monkeypatch, arrays):
    given = {"is_causal": True, "attn_logits_soft_cap": 0.01}
    found = on_tpu(monkeypatch, arrays, **given)
    np.testing.assert_allclose(found, own(arrays, is_causal=True), atol=1e-5)


def test_without_the_kernel_it_is_what_its_arguments_say(monkeypatch, arrays):
    found = on_tpu(monkeypatch, arrays, flash_attention=False)
    np.testing.assert_allclose(found, own(arrays), atol=1e-5)


def test_attention_looks_at_the_first_of_jax_s_devices(monkeypatch):
    """kernels/kernels.py replaces `jax` in Keras's module."""
    asked = []

    class Jax:
        def __getattr__(self, name):
            return getattr(jax, name)

        def devices(self):
            asked.append("devices")
            return [types.SimpleNamespace(platform="cpu")]

    monkeypatch.setattr(keras_nn, "jax", Jax())
    own(np.zeros((3, 1, 8, 1, 8), "float32"))
    assert len(asked) == 2


def test_an_lstm_asks_whether_a_gpu_is_there(monkeypatch):
    """It computes a loop where JAX's LSTM raises an error."""
    module = importlib.import_module("keras.src.backend.jax.rnn")
    asked = []

    def lstm(*args, **kwargs):
        asked.append("kernel")
        raise NotImplementedError

    def is_available():
        asked.append("gpu")
        return True

    x = np.ones((2, 3, 4), "float32")
    layer = keras.layers.LSTM(5)
    wanted = layer(x)
    monkeypatch.setattr("jax.experimental.rnn.lstm", lstm)
    monkeypatch.setattr(module, "_is_gpu_available", is_available)
    np.testing.assert_array_equal(layer(x), wanted)
    assert asked == ["gpu", "kernel"]
    both = keras.layers.Bidirectional(layer)
    asked.clear()
    both(x)
    assert asked[:2] == ["gpu", "kernel"]


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_compute_attention_with_these_arguments(layer):
    used = list(inspect.signature(layer._compute_attention).parameters)
    assert used[1:5] == ["query", "key", "value", "attention_mask"]


def test_layers_forget_that_they_are_to_use_no_kernel():
    """docs/tpu.md names `disable_flash_attention()` instead."""
    off = {"flash_attention": False}
    one = keras.layers.MultiHeadAttention(2, 8, **off)
    two = keras.layers.GroupQueryAttention(8, 2, 2, **off)
    assert [one._flash_attention, two._flash_attention] == [None, None]

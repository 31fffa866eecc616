"""Attention in steps that are compiled for TPUs: `./run test -m tpu`."""

import types

import jax
import keras
import pytest

import keras_strategies as ks
from keras_strategies.keras_bridge.keras_names import NN as keras_nn
from keras_strategies.keras_bridge.steps import attention

pytestmark = pytest.mark.tpu

LENGTH, WIDTH = 128, 256
KERNEL = "tpu_custom_call"


@pytest.fixture(autouse=True)
def on_tpu(monkeypatch):
    """In which Keras takes the machine for a TPU's."""

    class Jax:
        def __getattr__(self, name):
            return getattr(jax, name)

        def devices(self):
            return [types.SimpleNamespace(platform="tpu")]

    monkeypatch.setattr(keras_nn, "jax", Jax())


def text_of(kind, is_sharded=False, cores=1):
    partitioner = ks.experimental.FullySharded() if is_sharded else None
    strategy = ks.TPUStrategy.for_topology(
        "v5e:2x2",
        variable_partitioner=partitioner,
        computation_shape=(1, cores, 1, 1),
    )
    with strategy.scope(), ks.abstract():
        x = inputs = keras.Input((LENGTH, WIDTH))
        x = keras.layers.MultiHeadAttention(2, WIDTH // 2)(x, x)
        model = keras.Model(inputs, x)
        model.compile("sgd", "mse")
    x = jax.ShapeDtypeStruct((8, LENGTH, WIDTH), "float32")
    if kind == "run":
        return strategy.compile_run(model, (x,)).as_text()
    return strategy.compile_step(model, (x, x), kind=kind).as_text()


CASES = [
    ("train", {}),
    ("train", {"is_sharded": True}),
    ("test", {}),
    ("predict", {}),
    ("run", {}),
]


@pytest.mark.parametrize(("kind", "case"), CASES)
def test_steps_have_no_kernel_that_keras_would_take(monkeypatch, kind, case):
    assert KERNEL not in text_of(kind, **case)
    monkeypatch.setattr(attention._patches, "_find", list)
    assert KERNEL in text_of(kind, **case)


@pytest.mark.parametrize("kind", ["train", "predict", "run"])
def test_cores_that_share_a_model_have_none(monkeypatch, kind):
    assert KERNEL not in text_of(kind, cores=2)
    monkeypatch.setattr(attention._patches, "_find", list)
    # XLA cannot divide it.
    with pytest.raises(NotImplementedError, match="Mosaic"):
        text_of(kind, cores=2)

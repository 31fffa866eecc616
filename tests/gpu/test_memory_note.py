"""Notes on errors of GPUs whose memory is exhausted."""

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks


class Failing(keras.callbacks.Callback):
    """Raises an error of JAX at the first batch."""

    def __init__(self, text):
        super().__init__()
        self.text = text

    def on_train_batch_end(self, batch, logs=None):
        raise jax.errors.JaxRuntimeError(self.text)


def fit(text):
    with ks.MirroredStrategy(jax.devices()[:2]).scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((4, 2))
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        model.fit(x, x[:, :1], verbose=0, callbacks=[Failing(text)])
    return "".join(getattr(raised.value, "__notes__", []))


EXHAUSTED = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 5 GiB"


def test_an_error_of_memory_names_other_processes(monkeypatch):
    assert not fit(EXHAUSTED)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in fit(EXHAUSTED)
    assert not fit("INTERNAL: another error")

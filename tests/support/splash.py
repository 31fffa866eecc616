"""The splash kernel, interpreted on CPUs."""

import functools

import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
)

from keras_strategies._core import splash_attention


@pytest.fixture
def interpreted(monkeypatch):
    """Makes kernels that CPUs can run."""
    made = functools.partial(kernels.make_splash_mha, interpret=True)
    monkeypatch.setattr(kernels, "make_splash_mha", made)
    cached = splash_attention._make_kernel
    cached.cache_clear()
    yield
    cached.cache_clear()

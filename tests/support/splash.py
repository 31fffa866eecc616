"""The splash kernel, interpreted on CPUs."""

import functools

import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
)

from keras_strategies.kernels import attention, splash_attention


@pytest.fixture
def interpreted(monkeypatch):
    """Makes kernels that CPUs can run."""
    made = functools.partial(kernels.make_splash_mha, interpret=True)
    monkeypatch.setattr(kernels, "make_splash_mha", made)
    caches = (splash_attention._make_kernel, attention._make_call)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()

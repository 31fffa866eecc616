"""The checks at import: Keras must run on JAX, without NNX variables."""

import os
import sys


def require_jax_backend() -> None:
    """Chooses Keras's JAX backend, or says why that cannot be.

    Raises:
      ImportError: Keras was imported with another backend, or with
        KERAS_NNX_ENABLED.
    """
    if "keras" not in sys.modules:
        os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    if keras.config.backend() != "jax":
        raise ImportError(
            "keras_strategies needs Keras on the JAX backend. Received: "
            f"backend {keras.config.backend()!r}. Set KERAS_BACKEND=jax in the "
            "environment before keras is imported (or import "
            "keras_strategies first with KERAS_BACKEND unset)."
        )
    if keras.config.is_nnx_enabled():
        raise ImportError(
            "keras_strategies needs Keras's own variables. Received: "
            "KERAS_NNX_ENABLED is on. Unset it before keras is imported."
        )

"""Checks at import that Keras runs on JAX, without NNX variables."""

import os
import sys

_BACKEND = "KERAS_BACKEND"
_NNX = "KERAS_NNX_ENABLED"
_COMMAND = "keras-strategies"
_COMMAND_MODULE = "keras_strategies.cli"


def is_command() -> bool:
    """Returns whether this process runs the command `keras-strategies`.

    The command must start even if Keras's backend is not JAX, so that its
    subcommand `doctor` can report the wrong backend.
    """
    name = os.path.basename((getattr(sys, "argv", None) or [""])[0])
    if name == "-m":  # `python -m` has not found the module's file yet.
        words = [word.removeprefix("-m") for word in sys.orig_argv]
        return _COMMAND_MODULE in words
    return name.removesuffix(".exe").removesuffix("-script.py") == _COMMAND


def choose_backend() -> None:
    """Selects JAX as Keras's backend if none is selected.

    Does not import keras.

    Raises:
      ImportError: if another backend or NNX variables are selected, either in
        an already imported keras or in the environment.
    """
    if "keras" in sys.modules:
        require_jax_backend()
        return
    backend = os.environ.setdefault(_BACKEND, "jax")
    _check(backend, has_nnx=is_switched_on(os.environ.get(_NNX, "")))


def require_jax_backend() -> None:
    """Imports keras, and checks that it runs on JAX without NNX variables.

    Raises:
      ImportError: if Keras was imported with another backend or with
        KERAS_NNX_ENABLED.
    """
    if "keras" not in sys.modules:
        os.environ.setdefault(_BACKEND, "jax")
    import keras

    _check(keras.config.backend(), has_nnx=keras.config.is_nnx_enabled())


def is_switched_on(value: str) -> bool:
    """Returns whether Keras reads an environment variable's value as "on"."""
    return value.lower() in ("true", "1")


def _check(backend: str, *, has_nnx: bool) -> None:
    if backend != "jax":
        raise ImportError(
            "keras_strategies needs Keras on the JAX backend. Received: "
            f"backend {backend!r}. Set KERAS_BACKEND=jax in the "
            "environment before keras is imported (or import "
            "keras_strategies first with KERAS_BACKEND unset)."
        )
    if has_nnx:
        raise ImportError(
            "keras_strategies does not support NNX variables, but "
            "KERAS_NNX_ENABLED is set. Unset this environment variable "
            "before keras is imported."
        )

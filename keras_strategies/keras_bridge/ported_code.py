"""Errors and warnings for code of TensorFlow, which name its replacement."""

import contextlib
import itertools
import os
import sys
import traceback
import warnings
from collections.abc import Iterator

import jax
import keras

_NEEDS_VALUE = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_SEE = "docs/migration.md shows how to port a script"


@contextlib.contextmanager
def explaining_errors(caller: str) -> Iterator[None]:
    """Replaces errors of code that was written for TensorFlow.

    Args:
      caller: The method that runs the code, such as `run`. If it is `run`,
        errors of code that reads the values of arrays are replaced, too.

    Raises:
      TypeError: if the code calls TensorFlow with the values of a trace, or
        reads them.
      AttributeError: if the code calls `optimizer.minimize`.
    """
    try:
        yield
    except Exception as error:
        explain_error(error, caller)
        raise


def explain_error(error: BaseException, caller: str) -> None:
    """Raises what `explaining_errors` raises instead of an error, if any."""
    is_value = isinstance(error, _NEEDS_VALUE)
    if is_value or "Tracer" in str(error):
        line = _find_tensorflow_call(error)
        if line:
            raise TypeError(
                "TensorFlow's operations and `tf.GradientTape` must not be "
                f"used in code that `{caller}` runs, because JAX traces this "
                f"code. Received: {line}. Use `keras.ops` and "
                f"`ks.GradientTape` instead; {_SEE}."
            ) from error
    if is_value and caller == "run":
        raise TypeError(
            "A function given to `run` is traced by JAX, so Python code in it "
            "cannot read the values of arrays. This function converts an array "
            "to a number, a condition or a numpy array "
            f"({type(error).__name__}). Use `keras.ops` (`where`, `cond`, "
            "`cast`), or print values in `with strategy.debug():`."
        ) from error
    owner = getattr(error, "obj", None)
    is_minimize = getattr(error, "name", None) == "minimize"
    if is_minimize and isinstance(owner, keras.optimizers.Optimizer):
        raise AttributeError(
            "Optimizers of Keras 3 have no `minimize`. Received: `minimize` of "
            f"{type(owner).__name__}. Compute gradients with a "
            "`ks.GradientTape` and pass them to "
            f"`optimizer.apply(gradients, variables)`; {_SEE}."
        ) from error


def _find_tensorflow_call(error: BaseException) -> str:
    """Finds the user's line that called TensorFlow, in an error's traceback.

    Returns:
      The line with its place, or "" if TensorFlow was not called.
    """
    tensorflow = sys.modules.get("tensorflow")
    file = getattr(tensorflow, "__file__", None)
    if file is None:
        return ""
    directory = os.path.join(os.path.dirname(file), "")
    frames = traceback.extract_tb(error.__traceback__)
    for caller, called in itertools.pairwise(frames):
        if called.filename.startswith(directory):
            place = f"{os.path.basename(caller.filename)}:{caller.lineno}"
            return f"`{caller.line or caller.name}` ({place})"
    return ""


def warn_of_tensorflow_scope() -> None:
    """Warns if a scope of `tf.distribute` is open."""
    distribute = getattr(sys.modules.get("tensorflow"), "distribute", None)
    if distribute is not None and distribute.has_strategy():
        name = type(distribute.get_strategy()).__name__
        warnings.warn(
            "A scope of `tf.distribute` has no effect on Keras with JAX. "
            f"Received: an open scope of TensorFlow's {name}. Open the scope "
            f"of a strategy of keras_strategies in its place; {_SEE}.",
            UserWarning,
            stacklevel=2,
        )

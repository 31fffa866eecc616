"""Facts about traces: whether one is under way, where an equation is from."""

import importlib.util
import os
from typing import Any

import jax.numpy as jnp
from jax.core import Tracer


def is_traced() -> bool:
    """Whether this thread runs a function that JAX traces to compile it.

    What it reads from Python is then read once, and not in every call. Under
    a gradient that is computed on the spot it is not so.
    """
    from jax._src import core

    # The second look costs an operation.
    return not core.trace_state_clean() and isinstance(
        jnp.add(jnp.int32(0), 0), Tracer
    )


def place_of(equation: Any) -> str:
    """Returns the file and line of the user's code that an equation is from.

    Empty where nothing is known, or no frame is the user's.
    """
    info = getattr(equation, "source_info", None)
    traceback = getattr(info, "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        if not frame.file_name.startswith(_library_folders()):
            name = os.path.basename(frame.file_name)
            return f"{name}:{frame.line_num}"
    return ""


def _library_folders() -> tuple[str, ...]:
    names = ("jax", "keras", "keras_strategies", "functools", "contextlib")
    found = map(importlib.util.find_spec, names)
    origins = [spec.origin for spec in found if spec and spec.origin]
    folders = map(os.path.dirname, origins)
    return ("<", *dict.fromkeys(f"{folder}{os.sep}" for folder in folders))

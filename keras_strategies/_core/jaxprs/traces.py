"""The question whether code is being traced into a program."""

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

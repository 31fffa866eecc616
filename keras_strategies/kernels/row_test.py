"""A test by numbers whether a function computes each row by itself."""

import concurrent.futures
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from keras_strategies._types import Array
from keras_strategies.passes import stages

Arrays = list[Any]


def find_difference(
    of_all: ClosedJaxpr,
    of_half: ClosedJaxpr,
    have_rows: Sequence[bool],
    platform: str,
) -> str | None:
    """Compares what a function computes for some rows and for two halves.

    The numbers are random, except for arrays of the function that are known.

    Args:
      of_all: The function, traced with an even number of rows.
      of_half: The function, traced with half of the rows.
      have_rows: Whether each of its operands has rows.
      platform: The platform for which the function is written.

    Returns:
      What differs, for a message. None if all numbers agree, or if the function
      cannot run on this machine.
    """
    have_rows = [*[False] * len(of_all.consts), *have_rows]
    values = [*of_all.consts, *of_all.in_avals, *of_all.out_avals]
    if not all(jnp.issubdtype(v.dtype, np.generic) for v in values):
        return None
    numbers = list(map(_draw, values))
    operands, factors = numbers[: len(have_rows)], numbers[len(have_rows) :]
    halves = [
        [
            np.split(array, 2)[k] if has_rows else array
            for array, has_rows in zip(operands, have_rows, strict=True)
        ]
        for k in range(2)
    ]
    of_halves = [[np.split(array, 2)[k] for array in factors] for k in range(2)]
    of_floats = [
        has_rows
        for array, has_rows in zip(operands, have_rows, strict=True)
        if _is_inexact(array)
    ]
    tolerance = max(map(_find_tolerance, numbers))
    calls = [(of_all, operands, factors)]
    calls += [(of_half, *pair) for pair in zip(halves, of_halves, strict=True)]
    for name, compute, are_rows in (
        ("the results", _compute, [True] * len(factors)),
        ("the derivatives", _differentiate, of_floats),
    ):
        computed = [
            _run_in_thread(_run, compute, *call, platform) for call in calls
        ]
        runs = all(results is not None for results in computed)
        for k, is_rows in enumerate(are_rows if runs else ()):
            whole, one, two = (results[k] for results in computed if results)
            joined = np.concatenate([one, two]) if is_rows else one + two
            if not _are_close(whole, joined, tolerance):
                return name
    return None


def _compute(traced: ClosedJaxpr, operands: Arrays, factors: Arrays) -> Arrays:
    """Computes a function's results."""
    del factors
    jaxpr = stages.with_consts_as_inputs(traced)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, []))(*operands)


def _differentiate(
    traced: ClosedJaxpr, operands: Arrays, factors: Arrays
) -> Arrays:
    """Computes the gradients of the sum of a function's weighted results."""
    floats = [array for array in operands if _is_inexact(array)]

    def compute(floats: Arrays) -> Any:
        given = iter(floats)
        full = [next(given) if _is_inexact(a) else a for a in operands]
        results = _compute(traced, full, factors)
        return sum(
            jnp.sum(result * factor).real
            for result, factor in zip(results, factors, strict=True)
            if _is_inexact(factor)
        )

    return jax.grad(compute)(floats)


def _run_in_thread(fn: Callable[..., Any], *args: Any) -> Any:
    """Calls a function outside of the trace that the calling thread makes."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(fn, *args).result()


def _run(
    compute: Any,
    traced: ClosedJaxpr,
    operands: Arrays,
    factors: Arrays,
    platform: str,
) -> Arrays | None:
    """Computes a function of arrays; returns None if it cannot run here."""
    local = jax.local_devices()
    devices = [device for device in local if device.platform == platform]
    device = (devices or jax.local_devices(backend="cpu"))[0]
    program = jax.jit(functools.partial(compute, traced))
    # Only the compiler knows for which kernels it has code, and only a callback
    # which numbers it takes.
    try:
        with jax.default_device(device):
            compiled = program.lower(operands, factors).compile()
            return list(map(np.asarray, compiled(operands, factors)))
    except Exception:
        return None


def _draw(value: Any) -> Any:
    """Draws an array of a value's shape, unless its numbers are known."""
    is_known = isinstance(value, np.ndarray | jax.Array)
    if is_known and not isinstance(value, Tracer):
        return np.asarray(value)
    draws = np.random.default_rng(0)
    if not jnp.issubdtype(value.dtype, np.inexact):
        return draws.integers(0, 2, value.shape).astype(value.dtype)
    return draws.normal(size=value.shape).astype(value.dtype)


def _is_inexact(array: Array) -> bool:
    return bool(jnp.issubdtype(array.dtype, np.inexact))


def _find_tolerance(array: Array) -> float:
    """Returns how much numbers of an array's precision may differ."""
    return float(jnp.finfo(array.dtype).eps) ** 0.5 if _is_inexact(array) else 0


def _are_close(one: Array, two: Array, tolerance: float) -> bool:
    """Returns whether arrays are equal, relative to their largest entry."""
    if not _is_inexact(one):
        return bool(np.array_equal(one, two))
    one, two = (np.asarray(array, "complex128") for array in (one, two))
    largest = np.max(np.abs(one), initial=0, where=np.isfinite(one))
    return np.allclose(
        *(one, two), rtol=tolerance, atol=tolerance * largest, equal_nan=True
    )

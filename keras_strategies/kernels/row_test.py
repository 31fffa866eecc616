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
from keras_strategies.passes.stages import with_consts_as_inputs
from keras_strategies.passes.value_numbers import is_inexact

Arrays = list[Any]


def find_difference(
    all_rows: ClosedJaxpr,
    half_rows: ClosedJaxpr,
    have_rows: Sequence[bool],
    platform: str,
) -> str | None:
    """Compares what a function computes for some rows and for two halves.

    The numbers are random, except for arrays of the function that are known.

    Args:
      all_rows: The function, traced with an even number of rows.
      half_rows: The function, traced with half of the rows.
      have_rows: Whether each of its operands has rows.
      platform: The platform for which the function is written.

    Returns:
      What differs, for a message. None if all numbers agree, or if the function
      cannot run on this machine.
    """
    have_rows = [*[False] * len(all_rows.consts), *have_rows]
    values = [*all_rows.consts, *all_rows.in_avals, *all_rows.out_avals]
    if not all(jnp.issubdtype(v.dtype, np.generic) for v in values):
        return None
    numbers = list(map(_draw, values))
    are_rows = [*have_rows, *[True] * len(all_rows.out_avals)]
    calls = [(all_rows, numbers)]
    for k in range(2):
        half = [
            np.split(array, 2)[k] if is_rows else array
            for array, is_rows in zip(numbers, are_rows, strict=True)
        ]
        calls.append((half_rows, half))
    tolerance = max(map(_find_tolerance, numbers))
    tests = {"the results": _compute, "the derivatives": _differentiate}
    for name, compute in tests.items():
        computed = _run_all(compute, calls, platform)
        for whole, *parts in zip(*computed, strict=True):
            has_rows = parts[0].shape != whole.shape
            joined = np.concatenate(parts) if has_rows else sum(parts)
            if not _are_close(whole, joined, tolerance):
                return name
    return None


def as_function(traced: ClosedJaxpr) -> Callable[..., list[Any]]:
    """Returns a trace as a function of its constants and operands."""
    jaxpr = with_consts_as_inputs(traced)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, []))


def _compute(traced: ClosedJaxpr, numbers: Arrays) -> Arrays:
    """Computes a function's results."""
    count = len(traced.consts) + len(traced.in_avals)
    return as_function(traced)(*numbers[:count])


def _differentiate(traced: ClosedJaxpr, numbers: Arrays) -> Arrays:
    """Computes the gradients of the sum of a function's weighted results."""
    count = len(traced.consts) + len(traced.in_avals)

    def compute(operands: Arrays) -> Any:
        results = as_function(traced)(*operands)
        return sum(
            jnp.sum(result * factor).real
            for result, factor in zip(results, numbers[count:], strict=True)
            if is_inexact(factor)
        )

    gradients = jax.grad(compute, allow_int=True)(numbers[:count])
    pairs = zip(gradients, numbers, strict=False)
    return [gradient for gradient, array in pairs if is_inexact(array)]


def _run_all(
    compute: Any, calls: Sequence[tuple[ClosedJaxpr, Arrays]], platform: str
) -> list[Arrays]:
    """Computes functions of arrays; returns [] if one cannot run here."""
    local = jax.local_devices()
    devices = [device for device in local if device.platform == platform]
    device = (devices or jax.local_devices(backend="cpu"))[0]

    def run(traced: ClosedJaxpr, numbers: Arrays) -> Arrays:
        program = jax.jit(functools.partial(compute, traced))
        with jax.default_device(device):
            return list(map(np.asarray, program(numbers)))

    # Another thread is outside of the trace that this one makes.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        # Only the compiler knows for which kernels it has code, and only a
        # callback which numbers it takes.
        try:
            return list(thread.map(run, *zip(*calls, strict=True)))
        except Exception:
            return []


def _draw(value: Any) -> Any:
    """Draws an array of a value's shape, unless its numbers are known."""
    is_known = isinstance(value, np.ndarray | jax.Array)
    if is_known and not isinstance(value, Tracer):
        return np.asarray(value)
    draws = np.random.default_rng(0)
    if not jnp.issubdtype(value.dtype, np.inexact):
        return draws.integers(0, 2, value.shape).astype(value.dtype)
    return draws.normal(size=value.shape).astype(value.dtype)


def _find_tolerance(array: Array) -> float:
    """Returns how much numbers of an array's precision may differ."""
    return float(jnp.finfo(array.dtype).eps) ** 0.5 if is_inexact(array) else 0


def _are_close(one: Array, two: Array, tolerance: float) -> bool:
    """Returns whether arrays are equal, relative to their largest entry."""
    if not is_inexact(one):
        return bool(np.array_equal(one, two))
    one, two = (np.asarray(array, "complex128") for array in (one, two))
    largest = np.max(np.abs(one), initial=0, where=np.isfinite(one))
    return np.allclose(
        *(one, two), rtol=tolerance, atol=tolerance * largest, equal_nan=True
    )

"""A first look whether a loss may be other than a mean over the rows.

The mean of the replicas' losses is the whole batch's loss where that is a
mean over rows, plus what knows no rows. A sum is not, and no loss that mixes
rows. `row_degrees` is sure of it and needs two more traces; here one trace is
looked through for rows that are added up and not divided by their number.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from keras_strategies.keras_bridge.row_checks import row_degrees

_MEAN = "ks_mean_over_rows"


def _share_of_a_sum(values: Any, num_replicas: int) -> Any:
    return jnp.sum(values) * num_replicas


_share_of_a_sum.__name__ = row_degrees.EXACT
share_of_a_sum = jax.jit(_share_of_a_sum, static_argnums=1)
"""A replica's sum over its rows, such that the mean of all is their sum."""


def mean_of(reduce: Callable[[Any], Any], values: Any) -> Any:
    """A mean over values of rows, that a trace shows as one."""

    def mean(values: Any) -> Any:
        return reduce(values)

    mean.__name__ = _MEAN
    return jax.jit(mean)(values)


def is_suspect(jaxpr: Any, loss: int, data: Sequence[int], rows: int) -> bool:
    """Whether a loss may be other than a mean over rows; quick, and unsure.

    Args:
      jaxpr: A trace of the step; closed.
      loss: Which of its outputs the loss is.
      data: Which of its inputs have rows.
      rows: How many.
    """
    inner = jaxpr.jaxpr
    tainted = {inner.invars[k] for k in data}
    needed = row_degrees.needed_for(inner, [inner.outvars[loss]])
    return _reduces_rows(inner, needed, tainted, rows)


def _reduces_rows(jaxpr: Any, needed: Any, tainted: Any, rows: int) -> bool:
    """Whether a row is reduced over in another way than to a mean."""
    users: dict[Any, list[Any]] = {}
    makers = {var: e for e in needed for var in e.outvars}
    for equation in needed:
        for var in row_degrees.variables_of(equation.invars):
            users.setdefault(var, []).append(equation)
    for equation in needed:
        mine = [
            v for v in row_degrees.variables_of(equation.invars) if v in tainted
        ]
        if not mine:
            continue
        tainted.update(equation.outvars)
        if equation.params.get("name") in (row_degrees.EXACT, _MEAN):
            continue
        inner_trace = row_degrees.trace_called(equation)
        if inner_trace is not None:
            inner, _ = inner_trace
            inside = {
                into
                for into, v in zip(inner.invars, equation.invars, strict=True)
                if not isinstance(v, Literal) and v in tainted
            }
            all_needed = row_degrees.needed_for(inner, inner.outvars)
            if _reduces_rows(inner, all_needed, inside, rows):
                return True
        counts = _counts(equation, mine, rows)
        if counts and not _is_divided(
            equation.outvars[0], counts, users, makers
        ):
            return True
    return False


def _counts(equation: Any, tainted: Any, rows: int) -> list[int]:
    """How many entries are added up, where rows may be among them."""
    name, params = equation.primitive.name, equation.params
    shape = equation.invars[0].aval.shape
    if name == "reduce_sum" and 0 in params["axes"] and _has(shape, rows):
        return [math.prod(shape[axis] for axis in params["axes"])]
    if name == "dot_general" and _meets_rows(equation, tainted, rows):
        return [0]
    if name in ("cumsum", "cumlogsumexp", "reduce_prod", "sort", "scan"):
        has_rows = [_has(v.aval.shape, rows) for v in tainted]
        return [0] if any(has_rows) else []
    return []


def _meets_rows(equation: Any, tainted: Any, rows: int) -> bool:
    """Whether a product adds up rows, or has each row beside each other."""
    contracted, batch = equation.params["dimension_numbers"]
    num_free = 0
    for var, dims, of_batch in zip(
        equation.invars, contracted, batch, strict=True
    ):
        if isinstance(var, Literal) or var not in tainted:
            continue
        shape = var.aval.shape
        if 0 in dims and _has(shape, rows):
            return True
        free = set(range(len(shape))) - {*dims, *of_batch}
        num_free += any(_has(shape[dim:], rows) for dim in free)
    return num_free == 2 and not batch[0]


def _has(shape: Sequence[int], rows: int) -> bool:
    return len(shape) > 0 and shape[0] > 0 and shape[0] % rows == 0


_SHAPING = ("reshape", "broadcast_in_dim", "convert_element_type", "squeeze")


def _is_divided(var: Any, counts: list[int], users: Any, makers: Any) -> bool:
    """Whether a sum is divided by the number of its entries, wherever used."""
    uses = users.get(var, [])
    for use in uses:
        name = use.primitive.name
        if name in _SHAPING:
            if _is_divided(use.outvars[0], counts, users, makers):
                continue
            return False
        value = _number(use.invars[-1], makers)
        if value is None:
            return False
        is_mean = name == "div" and value == counts[0]
        is_mean |= name == "mul" and math.isclose(value * counts[0], 1.0)
        if not is_mean:
            return False
    return bool(uses)


def _number(var: Any, makers: Any) -> float | None:
    """The one number that an array consists of, if that is plain to see."""
    while not isinstance(var, Literal):
        maker = makers.get(var)
        if maker is None or maker.primitive.name not in _SHAPING:
            return None
        var = maker.invars[0]
    return None if np.ndim(var.val) else float(var.val)

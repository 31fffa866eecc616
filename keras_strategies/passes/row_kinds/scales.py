"""Finds numbers of rows in gradients, updates and states.

A replica's number of rows is not that of the global batch, so a step that
computes with it elsewhere than in a mean or a sum over rows (`gradient *
4 / x.shape[0]` in an optimizer) has other results than on one device. Such a
number is a constant that differs between two traces of the step.
"""

import math
from collections.abc import Sequence
from typing import Any

from keras_strategies.passes import traces
from keras_strategies.passes.row_kinds.kinds import (
    MEAN_POWER,
    PLAIN,
    Kind,
    is_constant,
)
from keras_strategies.passes.row_kinds.marks import (
    CHANGE,
    COUNT,
    SHARE,
)
from keras_strategies.passes.row_kinds.separate_parts import is_part


def is_wrong(kind: Kind, mark: str) -> bool:
    """Returns whether a marked value depends on a replica's number of rows.

    Args:
      kind: The value's kind.
      mark: The value's mark: `LOG` or `CHANGE`.
    """
    if mark == CHANGE:
        is_plain = kind.is_const or kind.is_rows
        return not is_plain and kind.power not in (0.0, None)
    if kind.is_const:
        return depends_on_count(kind)
    if kind.is_sum:
        return kind.power not in (0.0, MEAN_POWER, None)
    # A variance, for example, divides by the number of rows twice.
    return kind.is_mixed and (kind.scale > 0 or kind.scale % 1 != 0)


def is_shown(kind: Kind, mark: str, ratio: float = 1.0) -> bool:
    """Returns whether a marked value's merge is shown to be one device's.

    Gradients, weights, states and logs are averaged over the replicas. Counts
    and gradients of scaled losses are summed.

    Args:
      kind: The value's kind.
      mark: The value's mark, one of `USED`.
      ratio: See `scale_results`.
    """
    if kind.is_zero:
        return True
    if mark == SHARE and kind.is_const:
        # The gradient of a loss that is linear in the weights.
        return kind.power_in(ratio) == 1.0 and not kind.scale
    if mark in (COUNT, SHARE):
        return kind.is_sum and kind.power == 0.0
    if kind.is_const:
        is_exact = kind.is_global or is_constant(kind)
        return is_exact and not kind.scale
    return _is_mean(kind)


def depends_on_count(kind: Kind) -> bool:
    """Returns whether a constant depends on a replica's number of rows."""
    is_plain = kind.is_const and not (kind.is_random or kind.is_global)
    return is_plain and not is_constant(kind)


def scale_results(
    calls: Sequence[Any],
    kinds: Sequence[Kind],
    results: list[Kind],
    ratio: float,
) -> list[Kind]:
    """Returns the kinds of an equation's results with their `Kind.scale`.

    Args:
      calls: The equation, after those in whose jaxprs it is.
      kinds: The kinds of its operands.
      results: The kinds of its results.
      ratio: The number of rows of the second trace, divided by that of the
        first.
    """
    results = [_with_term(k, kinds) for k in results]
    scaled = next((kind for kind in kinds if kind.scale), PLAIN)
    scale = scaled.scale + _find_exponent(calls, kinds, ratio)
    if not scale:
        return results
    why = scaled.why or calls[-1]
    is_global = any(kind.is_global for kind in kinds)
    return [
        k.but(scale=scale, why=k.why or why)
        if (is_global or not k.is_const) and not _is_mean(k)
        else k
        for k in results
    ]


def updates_by_count(calls: Sequence[Any], kinds: Sequence[Kind]) -> bool:
    """Returns whether an optimizer's update computes with a number of rows.

    Args:
      calls: The equation, after those in whose jaxprs it is.
      kinds: The kinds of its operands.
    """
    return (
        any(map(depends_on_count, kinds))
        and any(map(traces.is_update, calls))
        and not _is_within(calls, "jvp(")
    )


def _is_mean(kind: Kind) -> bool:
    """Returns whether a value is a mean, which user code may have divided."""
    return kind.is_sum and kind.power == MEAN_POWER


def _with_term(kind: Kind, kinds: Sequence[Kind]) -> Kind:
    """Keeps the exponent of the sums from which a value is computed."""
    if not kind.is_mixed or any(k.is_mixed or k.is_rows for k in kinds):
        return kind
    powers = {k.power for k in kinds if k.is_sum}
    if not powers or None in powers:
        return kind
    return kind.but(power=powers.pop() if len(powers) == 1 else math.nan)


def _find_exponent(
    calls: Sequence[Any], kinds: Sequence[Kind], ratio: float
) -> float:
    """Returns the exponent of num_rows in a factor that user code applies."""
    by = list(filter(depends_on_count, kinds))
    if not by:
        return 0.0
    has_rows = any(kind.is_sum or kind.is_mixed for kind in kinds)
    # Losses and metrics compute with the gathered rows of all replicas.
    is_gathered = _is_within(calls, "jvp(")
    has_rows |= not is_gathered and any(kind.is_global for kind in kinds)
    if not has_rows or not _is_forward_user_code(calls):
        return 0.0
    name, first = calls[-1].primitive.name, by[0]
    is_inverse = name == "div" and first is kinds[-1]
    if len(by) > 1 or not (name == "mul" or is_inverse):
        return math.inf
    power = first.power_in(ratio)
    if power is None or math.isnan(power):
        return math.inf
    return -power if is_inverse else power


def _is_forward_user_code(calls: Sequence[Any]) -> bool:
    calls = [equation for equation in calls if not is_part(equation)]
    if any(map(traces.is_of_package, calls)):
        return False
    makers = (traces.is_made_by_user(equation) for equation in reversed(calls))
    is_user_code = next((m for m in makers if m is not None), False)
    return is_user_code and not _is_within(calls, "transpose(")


def _is_within(calls: Sequence[Any], transform: str) -> bool:
    return any(transform in str(e.source_info.name_stack) for e in calls)

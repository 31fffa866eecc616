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
    Kind,
    is_constant,
)
from keras_strategies.passes.row_kinds.marks import (
    CHANGE,
    COUNT,
    SHARE,
)


def is_wrong(kind: Kind, mark: str) -> bool:
    """Returns whether a marked value depends on a replica's number of rows.

    Args:
      kind: The value's kind.
      mark: The value's mark: `LOG` or `CHANGE`.
    """
    if mark == CHANGE:
        is_plain = kind.is_const or kind.is_rows
        return not is_plain and kind.power not in (0.0, math.inf, None)
    is_other_sum = kind.is_sum and kind.power not in (0.0, MEAN_POWER, None)
    return is_other_sum or depends_on_count(kind)


def is_shown(kind: Kind, mark: str, ratio: float = 1.0) -> bool:
    """Returns whether a marked value's merge is shown to be one device's.

    Gradients, weights, states and logs are averaged over the replicas. Counts
    and gradients of scaled losses are summed.

    Args:
      kind: The value's kind.
      mark: The value's mark, one of `USED`.
      ratio: The number of rows of the second trace, divided by that of the
        first.
    """
    if kind.is_zero:
        return True
    if mark == SHARE and kind.is_const:
        # The gradient of a loss that is linear in the weights.
        return kind.power_in(ratio) == 1.0
    if mark in (COUNT, SHARE):
        return kind.is_sum and kind.power == 0.0
    if kind.is_const:
        return kind.is_global or is_constant(kind)
    return kind.is_sum and kind.power == MEAN_POWER


def depends_on_count(kind: Kind) -> bool:
    """Returns whether a constant depends on a replica's number of rows."""
    is_plain = kind.is_const and not (kind.is_random or kind.is_global)
    return is_plain and not is_constant(kind)


def updates_by_count(calls: Sequence[Any], kinds: Sequence[Kind]) -> bool:
    """Returns whether an optimizer's update computes with a number of rows.

    Args:
      calls: The equation, after those in whose jaxprs it is.
      kinds: The kinds of its operands.
    """
    return (
        any(map(depends_on_count, kinds))
        and any(map(traces.is_update, calls))
        # Losses and metrics compute with the gathered rows of all replicas.
        and not any("jvp(" in str(e.source_info.name_stack) for e in calls)
    )


def with_term(kind: Kind, kinds: Sequence[Kind]) -> Kind:
    """Returns a kind with the exponent of the sums that a value is of.

    Args:
      kind: The kind of an equation's result.
      kinds: The kinds of its operands.
    """
    if not kind.is_mixed or any(k.is_mixed or k.is_rows for k in kinds):
        return kind
    powers = {k.power for k in kinds if k.is_sum}
    if not powers or None in powers:
        return kind
    return kind.but(power=powers.pop() if len(powers) == 1 else math.nan)

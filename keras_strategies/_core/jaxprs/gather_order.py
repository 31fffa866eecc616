"""The order in which a traced function's equations gather sharded values.

Only its shard is needed to gather a value. So a compiler may gather all values
at the start, or before a loop, and keep all of them gathered at once. The next
value to gather is therefore tied to the current computation.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Var

from keras_strategies._core.jaxprs.stages import variables

Gathered = tuple[Var, ...]
"""A value, followed by the values that it was cast from."""


def find_gathers(
    equations: Sequence[Any],
    sharded: set[Var],
    *,
    casts: Callable[[Any], bool],
    gathers_again: Callable[[Any], bool],
) -> dict[int, list[Gathered]]:
    """Returns the values that equations gather, by the equations' positions.

    Values that another equation reads later, as the backward pass does, are
    left out: they stay gathered until then.

    Args:
      equations: The equations, in their order.
      sharded: Values whose shards are known.
      casts: Returns whether an equation casts its operand. Casts apply to
        shards, before the gather.
      gathers_again: Returns whether an equation gathers only for itself.
    """
    origins: dict[Var, Gathered] = {v: (v,) for v in sharded}
    reads: dict[int, list[Var]] = {}
    holders: Counter[Var] = Counter()
    for place, equation in enumerate(equations):
        operands = variables(equation.invars)
        if casts(equation) and operands and operands[0] in origins:
            cast = equation.outvars[0]
            origins[cast] = cast, *origins[operands[0]]
            continue
        reads[place] = [v for v in dict.fromkeys(operands) if v in origins]
        if not gathers_again(equation):
            holders.update(reads[place])
    gathers: dict[int, list[Gathered]] = {}
    for place, read in reads.items():
        is_again = gathers_again(equations[place])
        gathered = [origins[v] for v in read if is_again or holders[v] == 1]
        if gathered:
            gathers[place] = gathered
    return gathers

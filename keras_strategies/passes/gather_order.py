"""Determines where a traced function gathers its sharded values.

Gathering a value needs only its shards, so nothing stops a compiler from
gathering all values at the start or before a loop, which needs memory for all
gathered values at the same time. Therefore each gather is made to depend on the
computation just before the equation that reads the value.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Var

from keras_strategies.passes.stages import variables

Gathered = tuple[Var, ...]
"""A variable, followed by the variables that it was cast from."""


def find_gathers(
    equations: Sequence[Any],
    sharded: set[Var],
    *,
    casts: Callable[[Any], bool],
    gathers_again: Callable[[Any], bool],
) -> dict[int, list[Gathered]]:
    """Finds the values that each equation must gather before it is computed.

    Values that several equations read, for example in the forward and the
    backward pass, are left out, because they stay gathered between the reads.

    Args:
      equations: The equations, in their order.
      sharded: The variables of which only this replica's shard is available.
      casts: A function that returns whether an equation casts its operand to
        another dtype. Casts are applied to shards, before they are gathered.
      gathers_again: A function that returns whether an equation gathers its
        operands for itself alone, even if other equations gather them too.

    Returns:
      A dict from the position of an equation to the values that it gathers.
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

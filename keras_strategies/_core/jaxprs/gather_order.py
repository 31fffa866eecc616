"""The order in which a traced function's equations gather divided values.

Nothing but a value's shard is needed to gather it. So a compiler may gather all
values at the start, or before a loop, and hold them whole at once. What comes
next is therefore tied to what is computed now.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Var

from keras_strategies._core.jaxprs.stages import variables

Gathered = tuple[Var, ...]
"""A value, and then those that it was cast from."""


def gathers_of(
    equations: Sequence[Any],
    divided: set[Var],
    *,
    casts: Callable[[Any], bool],
    gathers_again: Callable[[Any], bool],
) -> dict[int, list[Gathered]]:
    """What equations gather, by their positions, in their order.

    Left out is what another equation reads again, as the backward pass does:
    it is held until then.

    Args:
      equations: The equations.
      divided: Values of which a shard is known.
      casts: Whether an equation casts its operand; a shard is cast.
      gathers_again: Whether an equation gathers for itself alone.
    """
    origins: dict[Var, Gathered] = {v: (v,) for v in divided}
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
    found: dict[int, list[Gathered]] = {}
    for place, read in reads.items():
        is_again = gathers_again(equations[place])
        gathered = [origins[v] for v in read if is_again or holders[v] == 1]
        if gathered:
            found[place] = gathered
    return found

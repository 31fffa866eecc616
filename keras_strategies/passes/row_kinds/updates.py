"""The kinds of the values that an optimizer's update computes.

The update of a step is traced once, so it does not depend on the number of
rows. Its results mix rows only if they depend on a gradient that does.
"""

from collections.abc import Sequence
from typing import Any

from keras_strategies.passes.marked_updates import is_same_update
from keras_strategies.passes.row_kinds.kinds import PLAIN, Kind, is_constant
from keras_strategies.passes.stages import variables


def kinds_of_update(
    equations: Sequence[Any], kinds: Sequence[Kind]
) -> list[Kind] | None:
    """Returns the `Kind` of each result of an update that both traces share.

    Args:
      equations: The same equation in one or two traces.
      kinds: The kinds of its operands.

    Returns:
      None if the equations are not such an update, or if an operand neither
      mixes rows nor is a constant.
    """
    are_known = all(
        k.is_mixed or (k.is_const and is_constant(k)) for k in kinds
    )
    if not are_known or not is_same_update(equations):
        return None
    jaxpr = equations[0].params["jaxpr"].jaxpr
    pairs = zip(jaxpr.invars, kinds, strict=True)
    mixed = {v: kind for v, kind in pairs if kind.is_mixed}
    for equation in jaxpr.eqns:
        wrong = [mixed[v] for v in variables(equation.invars) if v in mixed]
        if wrong:
            mixed |= dict.fromkeys(equation.outvars, wrong[0])
    exact = PLAIN.but(is_global=True)
    return [
        mixed.get(v, exact) if variables([v]) else exact for v in jaxpr.outvars
    ]

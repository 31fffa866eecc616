"""Decides whether traced losses and metrics compute by rows, or add sums.

The sum of the sums over rows that the replicas add is what one device adds.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr

from keras_strategies.passes.row_kinds import marks, scales
from keras_strategies.passes.row_kinds.call import Different
from keras_strategies.passes.row_kinds.inner_functions import find_terms
from keras_strategies.passes.row_kinds.interpreter import Interpreter
from keras_strategies.passes.row_kinds.kinds import PLAIN, make_rows
from keras_strategies.passes.row_kinds.rules import RANDOM
from keras_strategies.passes.stages import has_primitives


def find_additions(traced: ClosedJaxpr, num_states: int) -> list[Any] | None:
    """Finds the values that an update adds to the values of its states.

    Args:
      traced: A traced function. Its first inputs are the states, and its
        outputs the new states.
      num_states: The number of states.

    Returns:
      The added (or subtracted) values, which do not depend on the states; or
      None if the function computes a new state in another way.
    """
    jaxpr = traced.jaxpr
    terms = find_terms(jaxpr, jaxpr.invars[:num_states], ("sub",))
    return None if terms is None else list(itertools.chain(*terms))


def adds_sums(
    traced: ClosedJaxpr,
    more: ClosedJaxpr,
    are_rows: Sequence[bool],
    rows: Sequence[int],
) -> bool:
    """Returns whether an update adds sums over the rows of its arguments.

    Args:
      traced: The traced update; see `find_additions`.
      more: A trace with more rows.
      are_rows: Whether the dimension 0 of each argument is the rows; arguments
        are the inputs after the states.
      rows: The numbers of rows of both traces.
    """
    if has_primitives(traced, *RANDOM):
        # One device draws other numbers for a replica's rows.
        return False
    num_states = len(traced.jaxpr.outvars)
    jaxprs = []
    for trace in (traced, more):
        added = find_additions(trace, num_states)
        if added is None:
            return False
        terms = trace.jaxpr.replace(outvars=added)
        jaxprs.append(ClosedJaxpr(terms, trace.consts))
    inputs = [PLAIN] * num_states
    inputs += [make_rows(0) if has_rows else PLAIN for has_rows in are_rows]
    ratio = rows[1] / rows[0]
    try:
        kinds = Interpreter(rows[0], ratio).interpret(jaxprs, inputs)
    except Different:
        return False
    # A constant that grows as the number of rows is a sum over them.
    return all(scales.is_shown(kind, marks.SHARE, ratio) for kind in kinds)


def computes_by_rows(traced: ClosedJaxpr, rows: int) -> bool:
    """Returns whether a function computes each row from that row alone.

    Args:
      traced: The traced function. Its inputs have rows, except for scalars.
      rows: The number of rows, which equals no other size.
    """
    are_rows = [aval.shape[:1] == (rows,) for aval in traced.in_avals]
    inputs = [make_rows(0) if has_rows else PLAIN for has_rows in are_rows]
    kinds = Interpreter(rows, 1.0).interpret([traced], inputs)
    return all(k.is_rows and (k.axis, k.outer) == (0, 1) for k in kinds)

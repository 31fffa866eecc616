"""Finds how many iterations the loops of a compiled program have."""

import re

from keras_strategies.planning.seam import (
    hlo,
)

_KNOWN = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_DIRECTION = re.compile(r"direction=(\w+)")
_INDEX = re.compile(r"index=(\d+)")


def count_iterations(
    program: hlo.Program, computation: hlo.Computation, loop: hlo.Instruction
) -> int | None:
    """Returns the number of iterations of a `while` instruction.

    XLA's text contains the number only for some programs. Otherwise it is
    computed for a loop that counts up from a constant to a constant.

    Args:
      program: The program.
      computation: The computation that contains the loop.
      loop: The `while` instruction.

    Returns:
      The number of iterations, or None if it depends on values.
    """
    known = _KNOWN.search(loop.attributes)
    if known is not None:
        return int(known[1])
    condition = program.computations[loop.get_called("condition") or ""]
    body = program.computations[loop.get_called("body") or ""]
    state = computation.by_name[loop.operands[0]]
    compared = condition.root
    direction = _DIRECTION.search(compared.attributes)
    is_less = {"LT": 0, "LE": 1}.get(direction[1] if direction else "")
    if compared.opcode != "compare" or is_less is None:
        return None
    if not state.opcode == body.root.opcode == "tuple":
        return None
    counter, last = (_resolve(condition, x) for x in compared.operands)
    if counter is None or counter[0] is None or last is None:
        return None
    first = _resolve(computation, state.operands[counter[0]])
    step = _resolve(body, body.root.operands[counter[0]])
    if last[0] is not None:
        # The limit must be an element of the state that the body keeps.
        if _resolve(body, body.root.operands[last[0]]) != (last[0], 0):
            return None
        last = _resolve(computation, state.operands[last[0]])
    if first is None or last is None or step is None or step[0] != counter[0]:
        return None
    if first[0] is not None or last[0] is not None or step[1] <= 0:
        return None
    return max(-(-(last[1] + is_less - first[1]) // step[1]), 0)


def _resolve(
    computation: hlo.Computation, name: str
) -> tuple[int | None, int] | None:
    """Returns an element of the state and the constant that is added to it.

    The element is None for a constant. Returns None for all other values.
    """
    x = computation.by_name[name]
    if x.opcode == "constant" and x.literal.lstrip("-").isdecimal():
        return None, int(x.literal)
    if x.opcode in ("copy", "bitcast", "convert"):
        return _resolve(computation, x.operands[0])
    if x.opcode == "get-tuple-element":
        is_state = computation.by_name[x.operands[0]].opcode == "parameter"
        index = _INDEX.search(x.attributes)
        return (int(index[1]), 0) if is_state and index else None
    if x.opcode != "add":
        return None
    terms = [_resolve(computation, operand) for operand in x.operands]
    places = {place for place, _ in filter(None, terms)} - {None}
    if None in terms or len(places) > 1:
        return None
    return next(iter(places), None), sum(n for _, n in filter(None, terms))

"""Finds how many turns the loops of a compiled program take."""

import re

from keras_strategies.planning.program.hlo import (
    Computation,
    Instruction,
    Program,
)

_KNOWN = re.compile(r'known_trip_count":\{"n":"(\d+)"')
_DIRECTION = re.compile(r"direction=(\w+)")
_INDEX = re.compile(r"index=(\d+)")


def count_turns(
    program: Program, computation: Computation, loop: Instruction
) -> int | None:
    """Returns the number of turns of a `while` instruction.

    XLA's text contains the number only for some programs. Otherwise it is
    computed for a loop that counts up from a constant to a constant.

    Args:
      program: The program.
      computation: The computation that contains the loop.
      loop: The `while` instruction.

    Returns:
      The number of turns, or None if it depends on values.
    """
    known = _KNOWN.search(loop.attributes)
    if known is not None:
        return int(known[1])
    condition = program.computations[loop.get_called("condition") or ""]
    body = program.computations[loop.get_called("body") or ""]
    compared = condition.root
    direction = _DIRECTION.search(compared.attributes)
    if compared.opcode != "compare" or direction is None:
        return None
    is_less = {"LT": 0, "LE": 1}.get(direction[1])
    left, right = (condition.by_name[name] for name in compared.operands)
    place = _find_place(condition, left)
    if is_less is None or place is None:
        return None
    first = _find_initial(computation, loop, place)
    last = _find_constant(condition, right)
    fixed = _find_place(condition, right)
    if fixed is not None and _is_kept(body, fixed):
        last = _find_initial(computation, loop, fixed)
    each = _find_increment(body, place)
    if first is None or last is None or not each or each < 0:
        return None
    return max(-(-(last + is_less - first) // each), 0)


def _find_initial(
    computation: Computation, loop: Instruction, place: int
) -> int | None:
    """Returns the constant with which an element of the state begins."""
    state = computation.by_name.get(loop.operands[0])
    if state is None or state.opcode != "tuple":
        return None
    start = computation.by_name.get(state.operands[place])
    return None if start is None else _find_constant(computation, start)


def _find_constant(
    computation: Computation, instruction: Instruction
) -> int | None:
    """Returns the value of a constant, or of a copy of one; otherwise None."""
    while instruction.opcode in ("copy", "bitcast", "convert"):
        instruction = computation.by_name[instruction.operands[0]]
    text = instruction.literal
    is_number = text.lstrip("-").isdecimal()
    if instruction.opcode == "constant" and is_number:
        return int(text)
    return None


def _find_place(
    computation: Computation, instruction: Instruction
) -> int | None:
    """Returns which element of the state an instruction reads, or None."""
    while instruction.opcode in ("copy", "bitcast"):
        instruction = computation.by_name[instruction.operands[0]]
    if instruction.opcode != "get-tuple-element":
        return None
    of = computation.by_name[instruction.operands[0]]
    match = _INDEX.search(instruction.attributes)
    if of.opcode != "parameter" or match is None:
        return None
    return int(match[1])


def _is_kept(body: Computation, place: int) -> bool:
    """Returns whether a loop's body does not change an element of the state."""
    if body.root.opcode != "tuple":
        return False
    result = body.by_name[body.root.operands[place]]
    return _find_place(body, result) == place


def _find_increment(body: Computation, place: int) -> int | None:
    """Returns the constant that the body adds to an element of the state."""
    if body.root.opcode != "tuple":
        return None
    result = body.by_name[body.root.operands[place]]
    while result.opcode in ("copy", "bitcast"):
        result = body.by_name[result.operands[0]]
    if result.opcode != "add":
        return None
    left, right = (body.by_name[name] for name in result.operands)
    if _find_place(body, left) == place:
        return _find_constant(body, right)
    if _find_place(body, right) == place:
        return _find_constant(body, left)
    return None

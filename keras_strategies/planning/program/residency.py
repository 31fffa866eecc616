"""Chooses the arrays of a computation that stay in on-chip memory.

Programs for training are compiled at full effort, at which XLA keeps results
that are soon used again in on-chip memory. At low effort it keeps none there.
"""

import re
from collections.abc import Iterator, Mapping

import numpy as np

from keras_strategies.planning.program.hlo import Computation, Instruction

_INDEX = re.compile(r"index=(\d+)")


def locate(computation: Computation, name: str) -> str:
    """Returns the name of the result that a value is, or is an element of.

    An element k of a tuple that an instruction writes is named "x:k".
    """
    instruction = computation.by_name.get(name)
    while instruction is not None and instruction.opcode == "bitcast":
        name = instruction.operands[0]
        instruction = computation.by_name.get(name)
    if instruction is None or instruction.opcode != "get-tuple-element":
        return name
    match = _INDEX.search(instruction.attributes)
    of = computation.by_name.get(instruction.operands[0])
    if of is None or match is None or of.opcode in ("parameter", "while"):
        return name
    return f"{of.name}:{match[1]}"


def choose_resident(
    computation: Computation,
    written: Mapping[str, Mapping[str, float]],
    limit: float,
) -> frozenset[str]:
    """Returns the names of results that fit in on-chip memory while needed.

    Results that are needed for the shortest time are chosen first. Parameters
    and results of the computation are in the main memory.

    Args:
      computation: The computation.
      written: For each instruction, the bytes of its results by their names.
      limit: The bytes of on-chip memory that may be used.
    """
    ends = _find_last_uses(computation)
    spans: list[tuple[int, float, int, str]] = []
    for start, instruction in enumerate(computation.instructions):
        for name, size in written.get(instruction.name, {}).items():
            end = ends.get(name)
            if end is not None:
                spans.append((end - start, size, start, name))
    used = np.zeros(len(computation.instructions) + 1)
    chosen: set[str] = set()
    for length, size, start, name in sorted(spans):
        part = used[start : start + length + 1]
        if part.max() + size <= limit:
            part += size
            chosen.add(name)
    return frozenset(chosen)


def _find_last_uses(computation: Computation) -> dict[str, int]:
    """Returns where each value is used last, without the results' values."""
    ends: dict[str, int] = {}
    kept: set[str] = {locate(computation, computation.root.name)}
    for place, instruction in enumerate(computation.instructions):
        for name in _list_values(computation, instruction):
            ends[name] = place
            if instruction.opcode in ("tuple", "while"):
                # The state of a loop, or the results.
                kept.add(name)
    return {name: place for name, place in ends.items() if name not in kept}


def _list_values(
    computation: Computation, instruction: Instruction
) -> Iterator[str]:
    if instruction.opcode in ("bitcast", "get-tuple-element"):
        return
    for name in instruction.operands:
        yield locate(computation, name)

"""Describes which operation of which layer an instruction was compiled from."""

import re

from keras_strategies.passes.hlo_text import KERNELS
from keras_strategies.planning.program.hlo import Instruction

_WRAPPED = re.compile(r"^(?:jvp|transpose|vmap)\((.*)\)$")
_NO_LAYER = re.compile(
    r"^(?:jit\(.*|pjit|shard_map|while|body|cond|branch_\d+_fun|closed_call|"
    r"checkpoint|remat2?|rematted_computation|custom_[jv][vj]p_call\w*|)$"
)
_LONGEST = 80


def describe_source(instruction: Instruction) -> str:
    """Returns a text such as "gather in random_rotation"."""
    parts = [_unwrap(part) for part in instruction.source.split("/")]
    operation = parts[-1] or instruction.opcode
    layers = [part for part in parts[:-1] if not _NO_LAYER.match(part)]
    where = "/".join(layers)[:_LONGEST] or "the step"
    return f"{operation[:_LONGEST]} in {where}"


def count_inner_loops(instruction: Instruction) -> int:
    """Returns the number of loops inside the scope of attention's kernels."""
    _, found, inner = instruction.source.partition(KERNELS)
    return inner.split("/").count("while") if found else 0


def _unwrap(part: str) -> str:
    while match := _WRAPPED.match(part):
        part = match[1]
    return part

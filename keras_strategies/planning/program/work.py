"""Counts the operations and the bytes of an instruction of a program.

Only operations of matrix products, convolutions and attention's kernels are
counted.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence

from keras_strategies._core.jaxprs.flops import count_positions
from keras_strategies._core.jaxprs.hlo_text import KERNELS
from keras_strategies.planning.program.hlo import (
    Computation,
    Instruction,
    Program,
)
from keras_strategies.planning.program.residency import locate

_TILE = (8, 128)
_TILE_BYTES = 4096
"""The bytes of a tile of 8 by 128 numbers, which are read to gather one."""

_FREE = frozenset(
    (
        *("parameter", "constant", "tuple", "get-tuple-element", "bitcast"),
        *("after-all", "opt-barrier", "partition-id", "replica-id"),
        *("while", "conditional", "call"),
    )
)
"""Instructions that neither read nor write memory themselves."""
_FREE_CALLS = re.compile(
    r'custom_call_target="(AllocateBuffer|ConcatBitcast|Sharding|'
    r"AsyncCollective\w+|AssumeGather\w+|GatherScatterIndicesBitpacked)\""
)
_SAME = ("bitcast", "convert", "copy", "transpose", "reshape")
"""Instructions that compute each element of their result from one element."""
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_SUMMED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_SLICE = re.compile(r"slice_sizes=\{([\d,]*)\}")
_UPDATED = re.compile(r"update_window_dims=\{([\d,]*)\}")
_KERNEL = re.compile(rf"{KERNELS}(\d+)/.*splash_m[hq]a_(fwd|dq|dkv)")
_PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
"""For each kernel of attention, its number of matrix products."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The operations and the bytes of an instruction.

    Attributes:
      flops: Number of multiplications and additions.
      kernel_flops: Those of attention's kernels; not a part of `flops`.
      read: The bytes of each array that is read as a whole, by its name. See
        `residency.locate`.
      written: The bytes of each array that is written as a whole.
      parts: The bytes of slices of larger arrays.
      on_chip: Those of arrays that the compiler placed in on-chip memory.
    """

    flops: float = 0.0
    kernel_flops: float = 0.0
    read: Mapping[str, float] = dataclasses.field(default_factory=dict)
    written: Mapping[str, float] = dataclasses.field(default_factory=dict)
    parts: float = 0.0
    on_chip: float = 0.0


def count_work(
    program: Program, computation: Computation, instruction: Instruction
) -> Work:
    """Counts the work of an instruction, without the bodies of loops."""
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done"):
        return Work()
    of_kernels = 0.0
    if opcode == "custom-call":
        if _FREE_CALLS.search(instruction.attributes):
            return Work()
        of_kernels = _of_kernel(instruction)
    counter = _Counter(program)
    counter.read(computation, instruction)
    counter.write(computation, instruction)
    return Work(
        flops=_count_flops(program, computation, instruction),
        kernel_flops=of_kernels,
        read=counter.reads,
        written=counter.writes,
        parts=counter.parts,
        on_chip=counter.on_chip,
    )


class _Counter:
    """Adds up the bytes of an instruction."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.reads: dict[str, float] = {}
        self.writes: dict[str, float] = {}
        self.parts = self.on_chip = 0.0

    def read(self, computation: Computation, instruction: Instruction) -> None:
        """Adds the bytes of an instruction's operands."""
        for place, name in enumerate(instruction.operands):
            operand = computation.by_name.get(name)
            if operand is None:
                continue
            part = _count_part(self._program, instruction, place)
            if part is None:
                size = sum(self._list_sizes(operand).values())
                if size:
                    self.reads[locate(computation, name)] = size
            else:
                self.parts += part

    def write(self, computation: Computation, instruction: Instruction) -> None:
        """Adds the bytes of an instruction's result."""
        part = _count_update(self._program, computation, instruction)
        if part is None:
            changed = self._list_sizes(instruction)
        else:
            changed, parts = part
            self.parts += parts
        is_tuple = instruction.result.startswith("(")
        for place, size in changed.items():
            name = instruction.name
            self.writes[f"{name}:{place}" if is_tuple else name] = size

    def _list_sizes(self, instruction: Instruction) -> dict[int, float]:
        """Returns the bytes in main memory of the arrays of a result."""
        sizes: dict[int, float] = {}
        for place, array in enumerate(instruction.arrays):
            if array.is_on_chip:
                self.on_chip += array.padded
            elif array.dims:
                sizes[place] = float(array.padded)
        return sizes


def _count_part(
    program: Program, instruction: Instruction, place: int
) -> float | None:
    """Returns the bytes of an operand that are read; None for all."""
    opcode = instruction.opcode
    if opcode in ("slice", "dynamic-slice") and place == 0:
        return _size_of(instruction)
    if opcode == "dynamic-update-slice" and place == 0:
        return 0.0
    if opcode == "gather" and place == 0:
        return _count_gathered(instruction)
    if opcode == "scatter" and place == 0:
        # `_count_update` counts the reading and the writing.
        return 0.0
    inner = program.computations.get(instruction.get_called() or "")
    if opcode != "fusion" or inner is None:
        return None
    parameter = inner.parameters.get(place)
    return parameter and _count_part_in(program, inner, parameter.name)


def _count_part_in(
    program: Program, computation: Computation, name: str
) -> float | None:
    """Returns the bytes of a value that its users read; None for all."""
    total = 0.0
    for user in computation.users.get(name, ()):
        if user.opcode in _SAME and user is not computation.root:
            part = _count_part_in(program, computation, user.name)
            if part is None:
                return None
            total += part
            continue
        for place, operand in enumerate(user.operands):
            if operand == name:
                part = _count_part(program, user, place)
                if part is None:
                    return None
                total += part
    return total


def _count_update(
    program: Program, computation: Computation, instruction: Instruction
) -> tuple[dict[int, float], float] | None:
    """Returns what an instruction writes that updates arrays in place.

    Returns:
      The sizes of the results that are written as a whole, by their places, and
      the bytes that are written in the others. None if it updates no array.
    """
    opcode = instruction.opcode
    if opcode == "dynamic-update-slice":
        update = computation.by_name[instruction.operands[1]]
        return {}, _size_of(update)
    if opcode == "scatter":
        updates = computation.by_name[instruction.operands[-1]]
        return {}, _count_scattered(updates, instruction)
    if opcode in _SAME and instruction.operands:
        operand = computation.by_name[instruction.operands[0]]
        return _count_update(program, computation, operand)
    inner = program.computations.get(instruction.get_called() or "")
    if opcode == "fusion" and inner is not None:
        return _count_update(program, inner, inner.root)
    if opcode != "tuple":
        return None
    parts, changed, is_update = 0.0, dict[int, float](), False
    for place, name in enumerate(instruction.operands):
        result = computation.by_name[name]
        part = _count_update(program, computation, result)
        if part is None:
            changed[place] = _size_of(result)
        else:
            is_update = True
            parts += part[1]
    return (changed, parts) if is_update else None


def _count_gathered(gather: Instruction) -> float:
    """Returns the bytes that a gather reads of its operand."""
    match = _SLICE.search(gather.attributes)
    sizes = [int(n) for n in match[1].split(",") if n] if match else []
    return _count_tiles(_count_elements(gather), sizes) * _TILE_BYTES


def _count_scattered(updates: Instruction, scatter: Instruction) -> float:
    """Returns the bytes that a scatter reads and writes of its result."""
    match = _UPDATED.search(scatter.attributes)
    dims = [int(n) for n in match[1].split(",") if n] if match else []
    sizes = [updates.arrays[0].dims[dim] for dim in dims]
    return 2 * _count_tiles(_count_elements(updates), sizes) * _TILE_BYTES


def _count_tiles(elements: float, sizes: Sequence[int]) -> float:
    """Returns the number of tiles that contain the elements of slices."""
    rows, columns = (1, 1, *sizes)[-2:]
    others = math.prod(sizes[:-2])
    tiles = others * -(-rows // _TILE[0]) * -(-columns // _TILE[1])
    return elements / max(math.prod(sizes), 1) * tiles


def _count_elements(instruction: Instruction) -> float:
    return float(sum(math.prod(x.dims) for x in instruction.arrays))


def _size_of(instruction: Instruction) -> float:
    return float(sum(x.padded for x in instruction.arrays if x.dims))


def _count_flops(
    program: Program, computation: Computation, instruction: Instruction
) -> float:
    opcode = instruction.opcode
    if opcode == "convolution":
        return _of_convolution(computation, instruction)
    if opcode == "dot":
        return _of_product(computation, instruction)
    inner = program.computations.get(instruction.get_called() or "")
    if opcode != "fusion" or inner is None:
        return 0.0
    return sum(_count_flops(program, inner, x) for x in inner.instructions)


def _of_kernel(call: Instruction) -> float:
    """Returns the operations of attention's kernels, which XLA does not know.

    A kernel's scope names the products of all turns of the loops inside it.
    """
    match = _KERNEL.search(call.source)
    return 0.0 if match is None else 2.0 * int(match[1]) * _PRODUCTS[match[2]]


def _of_product(computation: Computation, dot: Instruction) -> float:
    match = _SUMMED.search(dot.attributes)
    sizes = computation.by_name[dot.operands[0]].arrays[0].dims
    dims = [int(n) for n in match[1].split(",") if n] if match else []
    return 2.0 * _count_elements(dot) * math.prod(sizes[d] for d in dims)


def _of_convolution(computation: Computation, conv: Instruction) -> float:
    labels = _LABELS.search(conv.attributes)
    if labels is None:
        return 0.0
    arrays = [
        computation.by_name[name].arrays[0].dims for name in conv.operands
    ]
    lhs, kernel = (
        dict(zip(labels[k + 1], arrays[k], strict=True)) for k in (0, 1)
    )
    out = dict(zip(labels[3], conv.arrays[0].dims, strict=True))
    window = _parse_window(conv.attributes)
    total = 2.0 * kernel["i"] * out["b"] * out["f"]
    for dim in filter(str.isdigit, labels[3]):
        place = int(dim)
        stride, spread, holes = (
            window.get(name, {}).get(place, 1)
            for name in ("stride", "lhs_dilate", "rhs_dilate")
        )
        before = window.get("pad", {}).get(place, 0)
        total *= _count_positions(
            *(lhs[dim], kernel[dim], out[dim]),
            *(stride, before, spread, holes),
        )
    return total


_count_positions = functools.lru_cache(maxsize=1024)(count_positions)


def _parse_window(attributes: str) -> dict[str, dict[int, int]]:
    """Returns the numbers of a convolution's window, by name and dimension.

    Of the padding, those before the array.
    """
    match = _WINDOW.search(attributes)
    if match is None:
        return {}
    found: dict[str, dict[int, int]] = {}
    for field in match[1].split():
        name, _, text = field.partition("=")
        found[name] = {
            place: int(number.split("_")[0])
            for place, number in enumerate(text.split("x"))
        }
    return found

"""Counts the operations and the bytes of an instruction of a program.

Only operations of matrix products, convolutions and attention's kernels are
counted.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from keras_strategies.planning.program.hlo import (
    Computation,
    Instruction,
    Program,
)
from keras_strategies.planning.program.products import (
    count_kernel,
    list_products,
)
from keras_strategies.planning.program.residency import locate

_TILE = (8, 128)
_TILE_BYTES = 4096
"""The bytes of a tile of 8 by 128 numbers, which are read to gather one."""
_SECTOR_BYTES = 32
"""The least number of bytes that a GPU reads from its memory."""

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
_SLICE = re.compile(r"slice_sizes=\{([\d,]*)\}")
_UPDATED = re.compile(r"update_window_dims=\{([\d,]*)\}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The operations and the bytes of an instruction.

    Attributes:
      products: Number of multiplications and additions, by the dtype that is
        multiplied. See `Product`.
      kernel_flops: Those of attention's kernels; not a part of `products`.
      read: The bytes of each array that is read as a whole, by its name. See
        `residency.locate`.
      written: The bytes of each array that is written as a whole.
      parts: The bytes of slices of larger arrays.
      on_chip: Those of arrays that the compiler placed in on-chip memory.
    """

    products: Mapping[str, float] = dataclasses.field(default_factory=dict)
    kernel_flops: float = 0.0
    read: Mapping[str, float] = dataclasses.field(default_factory=dict)
    written: Mapping[str, float] = dataclasses.field(default_factory=dict)
    parts: float = 0.0
    on_chip: float = 0.0

    @property
    def flops(self) -> float:
        """The number of multiplications and additions of all products."""
        return sum(self.products.values())


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
        of_kernels = count_kernel(computation, instruction)
    counter = _Counter(program)
    counter.read(computation, instruction)
    counter.write(computation, instruction)
    products = collections.defaultdict[str, float](float)
    for product in list_products(program, computation, instruction):
        products[product.dtype] += product.flops
    return Work(
        products=products,
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
        return _count_gathered(program, instruction)
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
        return {}, _count_scattered(program, updates, instruction)
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


def _count_gathered(program: Program, gather: Instruction) -> float:
    """Returns the bytes that a gather reads of its operand."""
    match = _SLICE.search(gather.attributes)
    sizes = [int(n) for n in match[1].split(",") if n] if match else []
    return _count_slices(program, gather, sizes)


def _count_scattered(
    program: Program, updates: Instruction, scatter: Instruction
) -> float:
    """Returns the bytes that a scatter reads and writes of its result."""
    match = _UPDATED.search(scatter.attributes)
    dims = [int(n) for n in match[1].split(",") if n] if match else []
    sizes = [updates.arrays[0].dims[dim] for dim in dims]
    return 2 * _count_slices(program, updates, sizes)


def _count_slices(
    program: Program, instruction: Instruction, sizes: Sequence[int]
) -> float:
    """Returns the bytes that are moved for the elements of slices.

    Args:
      program: The program.
      instruction: The instruction whose result contains the elements.
      sizes: The sizes of a slice.
    """
    rows, columns = (1, 1, *sizes)[-2:]
    number = _count_elements(instruction) / max(math.prod(sizes), 1)
    others = math.prod(sizes[:-2])
    if not program.is_tiled:
        array = instruction.arrays[0]
        width = array.size / max(math.prod(array.dims), 1)
        sectors = math.ceil(columns * width / _SECTOR_BYTES)
        return number * others * rows * sectors * _SECTOR_BYTES
    tiles = others * -(-rows // _TILE[0]) * -(-columns // _TILE[1])
    return number * tiles * _TILE_BYTES


def _count_elements(instruction: Instruction) -> float:
    return float(sum(math.prod(x.dims) for x in instruction.arrays))


def _size_of(instruction: Instruction) -> float:
    return float(sum(x.padded for x in instruction.arrays if x.dims))

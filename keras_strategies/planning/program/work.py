"""Counts the operations and the bytes of an instruction of a program.

Only operations of matrix products, convolutions and attention's kernels are
counted, and the integer operations that compute random bits.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

from keras_strategies.planning.program.products import (
    count_kernel,
    is_convolution,
    list_products,
)
from keras_strategies.planning.seam import (
    hlo,
)

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
_BITS = ("add", "xor", "or", "shift-left", "shift-right-logical")
"""Operations of 32-bit integers that compute random bits (Threefry)."""
_SLICE = re.compile(r"slice_sizes=\{([\d,]*)\}")
_UPDATED = re.compile(r"update_window_dims=\{([\d,]*)\}")
_INDEX = re.compile(r"index=(\d+)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The operations and the bytes of an instruction.

    Attributes:
      products: Number of multiplications and additions, by the dtype that is
        multiplied. See `list_products`.
      kernel_flops: The operations in attention kernels; not a part of
        `products`.
      integers: Number of integer operations of random bits on a TPU. On a GPU,
        a kernel computes them.
      is_convolution: Whether it is a convolution of cuDNN.
      read: The bytes of each array that is read as a whole, by its name. See
        `locate`.
      written: The bytes of each array that is written as a whole.
      parts: The bytes of slices of larger arrays.
      on_chip: The bytes of arrays that the compiler placed in on-chip memory.
    """

    products: Mapping[str, float] = dataclasses.field(default_factory=dict)
    kernel_flops: float = 0.0
    integers: float = 0.0
    is_convolution: bool = False
    read: Mapping[str, float] = dataclasses.field(default_factory=dict)
    written: Mapping[str, float] = dataclasses.field(default_factory=dict)
    parts: float = 0.0
    on_chip: float = 0.0

    @property
    def flops(self) -> float:
        """The number of multiplications and additions of all products."""
        return sum(self.products.values())


def locate(computation: hlo.Computation, name: str) -> str:
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


def count_work(
    program: hlo.Program,
    computation: hlo.Computation,
    instruction: hlo.Instruction,
    *,
    is_tiled: bool = True,
) -> Work:
    """Counts the work of an instruction, without the bodies of loops.

    Args:
      program: The program.
      computation: The computation that contains the instruction.
      instruction: The instruction.
      is_tiled: Whether arrays are stored in tiles of 8 by 128 numbers, as on
        TPUs.
    """
    opcode = instruction.opcode
    is_call = opcode == "custom-call"
    if opcode in _FREE or opcode.endswith("-done"):
        return Work()
    if is_call and _FREE_CALLS.search(instruction.attributes):
        return Work()
    reader = _Reader(program, is_tiled)
    read: dict[str, float] = {}
    written: dict[str, float] = {}
    parts = on_chip = 0.0
    for place, name in enumerate(instruction.operands):
        operand = computation.by_name.get(name)
        part = reader.count_part(instruction, place)
        if part is not None:
            parts += part
        elif operand is not None:
            slow = sum(x.padded for x in operand.arrays if x.dims)
            fast = sum(x.padded for x in operand.arrays if x.is_on_chip)
            on_chip += fast
            if slow > fast:
                read[locate(computation, name)] = float(slow - fast)
    updates = reader.list_updates(computation, instruction)
    is_tuple = instruction.result.startswith("(")
    pairs = zip(instruction.arrays, updates, strict=False)
    for place, (array, update) in enumerate(pairs):
        if update is not None:
            parts += update
        elif array.is_on_chip:
            on_chip += array.padded
        elif array.dims:
            name = instruction.name
            key = f"{name}:{place}" if is_tuple else name
            written[key] = float(array.padded)
    products = collections.defaultdict[str, float](float)
    for dtype, flops in list_products(program, computation, instruction):
        products[dtype] += flops
    return Work(
        products=products,
        kernel_flops=count_kernel(computation, instruction) if is_call else 0.0,
        integers=_count_integers(program, instruction),
        is_convolution=is_call and is_convolution(instruction),
        read=read,
        written=written,
        parts=parts,
        on_chip=on_chip,
    )


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Finds arrays of which an instruction reads or writes only parts."""

    program: hlo.Program
    is_tiled: bool

    def count_part(
        self, instruction: hlo.Instruction, place: int
    ) -> float | None:
        """Returns the bytes of an operand that are read; None for all."""
        opcode = instruction.opcode
        if place == 0 and opcode in ("slice", "dynamic-slice"):
            return _count_bytes(instruction)
        if place == 0 and opcode in ("dynamic-update-slice", "scatter"):
            # `list_updates` counts the reading and the writing.
            return 0.0
        if place == 0 and opcode == "gather":
            match = _SLICE.search(instruction.attributes)
            sizes = [int(n) for n in match[1].split(",")] if match else []
            return self._count_slices(instruction, sizes)
        inner = self.program.find_called(instruction)
        if opcode != "fusion" or inner is None or place not in inner.parameters:
            return None
        return self._count_inner_part(inner, inner.parameters[place].name)

    def _count_inner_part(
        self, computation: hlo.Computation, name: str
    ) -> float | None:
        """Returns the bytes of a value that its users read; None for all."""
        total = 0.0
        for user in computation.users.get(name, ()):
            if user.opcode in _SAME and user is not computation.root:
                parts = [self._count_inner_part(computation, user.name)]
            else:
                parts = [
                    self.count_part(user, place)
                    for place, operand in enumerate(user.operands)
                    if operand == name
                ]
            for part in parts:
                if part is None:
                    return None
                total += part
        return total

    def list_updates(
        self, computation: hlo.Computation, instruction: hlo.Instruction
    ) -> list[float | None]:
        """Returns the bytes that are written in place in each of the results.

        They are None for a result that is written as a whole.
        """
        opcode, operands = instruction.opcode, instruction.operands
        inner = self.program.find_called(instruction)
        if opcode == "dynamic-update-slice":
            return [_count_bytes(computation.by_name[operands[1]])]
        if opcode == "scatter":
            updates = computation.by_name[operands[-1]]
            match = _UPDATED.search(instruction.attributes)
            dims = [int(n) for n in match[1].split(",") if n] if match else []
            sizes = [updates.arrays[0].dims[dim] for dim in dims]
            return [2 * self._count_slices(updates, sizes)]
        if opcode in _SAME and operands:
            return self.list_updates(
                computation, computation.by_name[operands[0]]
            )
        if opcode == "fusion" and inner is not None:
            return self.list_updates(inner, inner.root)
        if opcode == "tuple":
            return [
                next(iter(self.list_updates(computation, operand)), None)
                for operand in map(computation.by_name.__getitem__, operands)
            ]
        return [None] * len(instruction.arrays)

    def _count_slices(
        self, instruction: hlo.Instruction, sizes: Sequence[int]
    ) -> float:
        """Returns the bytes that are moved for the elements of slices.

        Args:
          instruction: The instruction whose result contains the elements.
          sizes: The sizes of a slice.
        """
        rows, columns = (1, 1, *sizes)[-2:]
        array = instruction.arrays[0]
        number = math.prod(array.dims) / max(math.prod(sizes), 1)
        others = math.prod(sizes[:-2])
        if not self.is_tiled:
            width = array.size / max(math.prod(array.dims), 1)
            sectors = math.ceil(columns * width / _SECTOR_BYTES)
            return number * others * rows * sectors * _SECTOR_BYTES
        tiles = others * -(-rows // _TILE[0]) * -(-columns // _TILE[1])
        return number * tiles * _TILE_BYTES


def _count_integers(program: hlo.Program, fusion: hlo.Instruction) -> float:
    inner = program.find_called(fusion)
    return sum(
        float(math.prod(x.arrays[0].dims))
        if x.opcode in _BITS and x.result.startswith("u32[")
        else _count_integers(program, x)
        for x in (() if inner is None else inner.instructions)
    )


def _count_bytes(instruction: hlo.Instruction) -> float:
    """Returns the bytes of a result, with the padding of its tiles."""
    return float(sum(x.padded for x in instruction.arrays if x.dims))

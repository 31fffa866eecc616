"""Parses the text of a compiled program (HLO), and finds its collectives.

An asynchronous collective of a TPU appears several times: in the computation
that starts it, and in the computations that overlap with it, which have the
same chain id. It is listed once.

References:
  - Syntax: https://openxla.org/xla/hlo_dumps
  - Tiled layouts: https://openxla.org/xla/tiled_layout
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from keras_strategies.passes.stages import names_in

COLLECTIVES = names_in(
    "all-reduce all-gather reduce-scatter collective-permute all-to-all"
)
"""XLA's names of the collectives that are counted."""

KERNELS = "splash_attention_"
"""The name scope of attention's kernels, before the number of products of two
entries that one matrix product of a kernel computes."""

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(")
_NAME = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_SOURCE = re.compile(r'op_name="([^"]*)"')
_ARRAY = re.compile(
    r"\b([a-z]+)(\d*)(?:[a-z]\w*)?\[([\d,]*)\](?:\{([\d,]*)(?::([^{}]*))?\})?"
)
_TILE = re.compile(r"T\(([\d,]+)\)")

CHAIN = re.compile(r'chain_id="?(\d+)')
# A call runs beside other instructions in the sparse cores of a TPU v7.
_CALLED = {"fusion": "calls", "async-start": "calls", "call-start": "to_apply"}
_END = re.compile(r'\}(?:, execution_thread="\w+")?')
_STARTED = 'custom_call_target="AsyncCollectiveStart"'
_LISTED = re.compile(
    r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}"
)
_TILED = re.compile(
    r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
)
_OF_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\]"
    r"(?:, device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))\))?"
    r" \{([^}]*)\}"
)
_AXIS = re.compile(r"'([^']*)'(?:=(\d+)|:\((\d+)\)(\d+))?")

Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Array:
    """The shape and layout of an array.

    Attributes:
      dims: The sizes of the dimensions.
      size: The bytes of the elements.
      padded: The bytes in memory, where tiles of the layout are filled up.
      is_on_chip: Whether the array is stored in the chip's on-chip memory.
    """

    dims: tuple[int, ...]
    size: int
    padded: int
    is_on_chip: bool


@functools.lru_cache(maxsize=4096)
def _parse_arrays(text: str) -> tuple[Array, ...]:
    return tuple(map(_make_array, _ARRAY.finditer(text)))


def _make_array(match: re.Match[str]) -> Array:
    kind, bits, sizes, order, layout = match.groups("")
    # A boolean (`pred`) takes a byte.
    width = 8 if kind == "pred" else int(bits or 0)
    dims = _parse_numbers(sizes)
    tile = _TILE.search(layout)
    tiled = _parse_numbers(tile[1])[::-1] if tile is not None and dims else ()
    minor = _parse_numbers(order) or range(len(dims))
    # If there are more tiled dimensions than dimensions, these have size 1.
    columns = itertools.zip_longest(
        [dims[dim] for dim in minor], tiled, fillvalue=1
    )
    padded = math.prod(-(-size // number) * number for size, number in columns)
    return Array(
        dims=dims,
        size=math.prod(dims) * width // 8,
        padded=padded * width // 8,
        is_on_chip="S(1)" in layout,
    )


def _parse_numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """An instruction of a computation.

    Attributes:
      name: Its name, which is unique in the program.
      opcode: What it does, such as "fusion".
      operands: The names of its operands. For a parameter or a constant, empty.
      literal: The text between the operands' parentheses.
      attributes: The text after the operands.
      result: The text of its result's shape.
      is_root: Whether its result is that of the computation.
    """

    name: str
    opcode: str
    operands: Sequence[str]
    literal: str
    attributes: str
    result: str
    is_root: bool = False

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of its result; several if it is a tuple."""
        return _parse_arrays(self.result)

    @property
    def source(self) -> str:
        """The scopes and the operation that it was compiled from, or ""."""
        match = _SOURCE.search(self.attributes)
        return "" if match is None else match[1]

    def get_called(self, key: str = "calls") -> str | None:
        """Returns the name of a computation in an attribute, or None."""
        match = re.search(rf"\b{key}=%?([\w.\-]+)", self.attributes)
        return None if match is None else match[1]


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """A computation: instructions in the order in which they run."""

    instructions: Sequence[Instruction]
    root: Instruction

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        """The instructions by their names."""
        return {x.name: x for x in self.instructions}

    @functools.cached_property
    def users(self) -> Mapping[str, Sequence[Instruction]]:
        """For each name, the instructions that have it as an operand."""
        users: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for name in dict.fromkeys(instruction.operands):
                users.setdefault(name, []).append(instruction)
        return users

    @functools.cached_property
    def parameters(self) -> Mapping[int, Instruction]:
        """The parameters by their numbers."""
        return {
            int(x.literal): x
            for x in self.instructions
            if x.opcode == "parameter"
        }


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """A compiled program.

    Attributes:
      computations: Its computations by their names.
      entry: The computation that runs first.
    """

    computations: Mapping[str, Computation]
    entry: Computation

    def find_called(self, instruction: Instruction) -> Computation | None:
        """Returns the computation of a fusion or a start, or None."""
        key = _CALLED.get(instruction.opcode)
        name = None if key is None else instruction.get_called(key)
        return None if name is None else self.computations.get(name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of a program.

    Attributes:
      kind: Its kind, such as "all-reduce".
      size: Bytes of the full array: the result of an all-gather, the reduced
        array of an all-reduce, or the sum before it is scattered.
      groups: The groups of devices, by their places in the program's mesh. For
        a collective-permute: pairs of a source and a target.
      key: If it is asynchronous: what its end is recognized by. None otherwise.
    """

    kind: str
    size: float
    groups: Groups
    key: str | None = None


def parse(text: str) -> Program:
    """Parses the text of a compiled program.

    Raises:
      ValueError: if the text contains no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    for name, is_entry, lines in _split(text):
        listed = list(map(_parse_instruction, lines))
        if listed:
            root = next((x for x in listed if x.is_root), listed[-1])
            computations[name] = Computation(listed, root)
            entry = computations[name] if is_entry else entry
    if entry is None:
        raise ValueError(
            "A program's text must contain an entry computation. Received: "
            f"{text[:100]!r}. Pass the text of a compiled program."
        )
    return Program(computations, entry)


def list_collectives(program: Program) -> list[Collective]:
    """Returns a program's collectives. One in a loop is listed once."""
    return [
        collective
        for computation in program.computations.values()
        for instruction in computation.instructions
        for collective in find_collective(computation, instruction)
    ]


def find_collective(
    computation: Computation, instruction: Instruction
) -> Iterator[Collective]:
    """Yields the collective that an instruction performs or starts, if any."""
    kind = instruction.opcode.removesuffix("-start")
    if kind not in COLLECTIVES:
        return
    chain = CHAIN.search(instruction.attributes)
    key = None if kind == instruction.opcode else instruction.name
    if chain is not None:
        users = computation.users.get(instruction.name, ())
        if not any(_STARTED in user.attributes for user in users):
            return
        key = chain[1]
    groups = parse_groups(instruction.attributes)
    operands = map(computation.by_name.__getitem__, instruction.operands)
    size = sum(array.size for x in operands for array in x.arrays)
    if kind == "all-gather" and groups:
        size *= len(groups[0])
    yield Collective(kind=kind, size=float(size), groups=groups, key=key)


def parse_groups(attributes: str) -> Groups:
    """Parses the groups of devices in a collective's attributes.

    XLA has three notations: lists of numbers; the rows of a transposed array of
    all numbers; and axes of a mesh. For a collective-permute, the groups are
    the pairs of a source and a target.

    Args:
      attributes: The text after the collective's operands.

    Returns:
      The groups, or () if the text contains none.
    """
    if (tiled := _TILED.search(attributes)) is not None:
        count, members, dims, order = tiled.groups()
        numbers = _make_numbers(dims, order).reshape(int(count), int(members))
        return _list_rows(numbers)
    if (of_mesh := _OF_MESH.search(attributes)) is not None:
        return _parse_mesh(*of_mesh.groups())
    listed = _LISTED.search(attributes)
    texts = re.findall(r"\{([\d,]+)\}", listed[1]) if listed else ()
    return tuple(map(_parse_numbers, texts))


@functools.lru_cache(maxsize=256)
def _parse_mesh(
    mesh: str, dims: str | None, order: str | None, ids: str | None, axes: str
) -> Groups:
    """Parses groups that are the devices along axes of a mesh.

    Args:
      mesh: The axes of the mesh, such as "'x'=4,'y'=2".
      dims: If the devices are those of a transposed array: its sizes.
      order: The order of its dimensions.
      ids: The devices, if they are listed.
      axes: The axes of the groups, such as "'x'". An axis of 8 of which only a
        part of size 2 that follows one of size 4 is meant: "'x':(4)2".
    """
    sizes = {name: int(n) for name, n, _, _ in _AXIS.findall(mesh)}
    shape, names = tuple(sizes.values()), tuple(sizes)
    numbers = _make_numbers(dims or str(math.prod(shape)), order)
    if ids:
        numbers = np.array(_parse_numbers(ids))
    # The place in the mesh of the first device of each device's group.
    firsts, members = np.indices(shape), 1
    for name, _, before, part in _AXIS.findall(axes):
        size = int(part or sizes[name])
        inner = sizes[name] // size // int(before or 1)
        place = firsts[names.index(name)]
        place -= place // inner % size * inner
        members *= size
    keys = np.ravel_multi_index(tuple(firsts), shape).ravel()
    grouped = numbers.ravel()[np.argsort(keys, kind="stable")]
    return _list_rows(grouped.reshape(-1, members))


def _make_numbers(dims: str, order: str | None) -> np.ndarray:
    """Returns the numbers from 0 in an array of some sizes, transposed."""
    sizes = _parse_numbers(dims)
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    return numbers.transpose(_parse_numbers(order)) if order else numbers


def _list_rows(numbers: np.ndarray) -> Groups:
    return tuple(map(tuple, numbers.tolist()))


def _split(text: str) -> Iterator[tuple[str, bool, list[str]]]:
    """Yields each computation's name, whether it is the entry, and lines."""
    name, is_entry, lines = "", False, list[list[str]]()
    for line in text.splitlines():
        is_head = line.endswith(" {") and ") -> " in line
        head = _HEAD.match(line) if is_head else None
        if head is not None:
            name, is_entry, lines = head[2], bool(head[1]), []
        elif _END.fullmatch(line):
            yield name, is_entry, ["".join(parts) for parts in lines]
        elif _NAME.match(line):
            lines.append([line])
        elif lines:
            # The attributes of kernels contain line breaks.
            lines[-1].append(line)


def _parse_instruction(line: str) -> Instruction:
    head = _NAME.match(line)
    assert head is not None
    start = head.end()
    is_tuple = line[start] == "("
    end = _find_end(line, start) if is_tuple else line.find(" ", start)
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        return Instruction(head[2], "", (), "", "", "", bool(head[1]))
    close = _find_end(line, opcode.end() - 1)
    literal = line[opcode.end() : close - 1]
    return Instruction(
        name=head[2],
        opcode=opcode[1],
        operands=tuple(_OPERAND.findall(literal)),
        literal=literal,
        attributes=line[close:],
        result=line[start:end],
        is_root=bool(head[1]),
    )


def _find_end(line: str, start: int) -> int:
    """Returns the position after the parenthesis that closes `line[start]`."""
    depth = 0
    for match in re.finditer(r"[()]", line[start:]):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return start + match.end()
    return len(line)

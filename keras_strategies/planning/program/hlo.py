"""Parses the text of a compiled program (HLO).

References:
  - Syntax: https://openxla.org/xla/hlo_dumps
  - Tiled layouts: https://openxla.org/xla/tiled_layout
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(")
_NAME = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([a-z][\w\-]*)\(")
_OPERAND = re.compile(r"%([\w.\-]+)")
_SOURCE = re.compile(r'op_name="([^"]*)"')
_ARRAY = re.compile(
    r"\b([a-z]+)(\d*)(?:[a-z]\w*)?\[([\d,]*)\](?:\{([\d,]*)(?::([^{}]*))?\})?"
)
_TILE = re.compile(r"T\(([\d,]+)\)")
_ON_CHIP = re.compile(r"S\(1\)")


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
    return tuple(
        _make_array(*match.groups()) for match in _ARRAY.finditer(text)
    )


def _make_array(
    kind: str, bits: str, sizes: str, order: str | None, layout: str | None
) -> Array:
    # A boolean (`pred`) takes a byte.
    width = 8 if kind == "pred" else int(bits or 0)
    dims = _parse_numbers(sizes)
    padded = list(dims)
    tile = _TILE.search(layout or "")
    tiled = _parse_numbers(tile[1])[::-1] if tile is not None and dims else ()
    rest = 1
    minor = _parse_numbers(order or "")
    for place, number in enumerate(tiled):
        if place < len(minor):
            dim = minor[place]
            padded[dim] = -(-padded[dim] // number) * number
        else:
            rest *= number
    return Array(
        dims=dims,
        size=math.prod(dims) * width // 8,
        padded=math.prod(padded) * rest * width // 8,
        is_on_chip=_ON_CHIP.search(layout or "") is not None,
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
    """

    name: str
    opcode: str
    operands: Sequence[str]
    literal: str
    attributes: str
    result: str

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
      is_tiled: Whether arrays are stored in tiles of 8 by 128 numbers, as on
        TPUs.
    """

    computations: Mapping[str, Computation]
    entry: Computation
    is_tiled: bool


def parse(text: str, *, is_tiled: bool = True) -> Program:
    """Parses the text of a compiled program.

    Args:
      text: The text.
      is_tiled: See `Program`.

    Raises:
      ValueError: if the text contains no entry computation.
    """
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    for name, is_entry, lines in _split(text):
        found = [_parse_instruction(line) for line in lines]
        listed = [x for _, x in found]
        roots = [x for is_root, x in found if is_root] or listed[-1:]
        if roots:
            computations[name] = Computation(listed, roots[0])
            entry = computations[name] if is_entry else entry
    if entry is None:
        raise ValueError(
            "A program's text must contain an entry computation. Received: "
            f"{text[:100]!r}. Pass the text of a compiled program."
        )
    return Program(computations, entry, is_tiled)


def _split(text: str) -> Iterator[tuple[str, bool, list[str]]]:
    """Yields each computation's name, whether it is the entry, and lines."""
    name, is_entry, lines = "", False, list[list[str]]()
    for line in text.splitlines():
        is_head = line.endswith(" {") and ") -> " in line
        head = _HEAD.match(line) if is_head else None
        if head is not None:
            name, is_entry, lines = head[2], bool(head[1]), []
        elif line == "}":
            yield name, is_entry, ["".join(parts) for parts in lines]
        elif _NAME.match(line):
            lines.append([line])
        elif lines:
            # The attributes of kernels contain line breaks.
            lines[-1].append(line)


def _parse_instruction(line: str) -> tuple[bool, Instruction]:
    """Returns whether an instruction is the root, and the instruction."""
    head = _NAME.match(line)
    assert head is not None
    start = head.end()
    end = (
        _find_end(line, start) if line[start] == "(" else line.find(" ", start)
    )
    opcode = _OPCODE.match(line, end)
    if opcode is None:
        return bool(head[1]), Instruction(head[2], "", (), "", "", "")
    close = _find_end(line, opcode.end() - 1)
    literal = line[opcode.end() : close - 1]
    return bool(head[1]), Instruction(
        name=head[2],
        opcode=opcode[1],
        operands=tuple(_OPERAND.findall(literal)),
        literal=literal,
        attributes=line[close:],
        result=line[start:end],
    )


def _find_end(line: str, start: int) -> int:
    """Returns the position after the parenthesis that closes `line[start]`."""
    depth = 0
    for match in re.finditer(r"[()]", line[start:]):
        depth += 1 if match[0] == "(" else -1
        if not depth:
            return start + match.end()
    return len(line)

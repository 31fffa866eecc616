"""Finds equal blocks of a functional model: repeated parts of its graph.

Deep models repeat the same few layers, so a loop can compute them.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from keras_strategies.kernels.call_signatures import (
    call_signature,
    is_of_keras,
)

MIN_BLOCKS = 4
"""The smallest number of repetitions that are treated as blocks."""
_MAX_NODES = 5000


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """Equal blocks of a model, such as the blocks of a transformer.

    The blocks are consecutive repetitions of a part of the model's graph. Each
    block reads one output of the previous block, and otherwise only tensors
    that all blocks read (such as a mask).

    Attributes:
      model: The functional model that contains the blocks: the model itself,
        or one of its layers.
      segments: The operations of each block, in the order of the graph.
      trunks: The output of each block that the next block reads, its only
        output that is used outside of the block. It is described by the
        operation and the index of that operation's output.
      entering: The id of the symbolic tensor that enters the first block.
      num_entries: The number of parameters of one block: the total number of
        entries of its variables.
    """

    model: keras.Model
    segments: Sequence[Sequence[Any]]
    trunks: Sequence[tuple[Any, int]]
    entering: int
    num_entries: int

    @property
    def layers(self) -> list[keras.layers.Layer] | None:
        """The layer of each block, or None if blocks are not single layers."""
        if len(self.segments[0]) > 1:
            return None
        parts = [segment[0] for segment in self.segments]
        is_of_layers = all(isinstance(x, keras.layers.Layer) for x in parts)
        return parts if is_of_layers else None

    def __len__(self) -> int:
        return len(self.segments)


@dataclasses.dataclass(frozen=True, eq=False)
class _Node:
    """A call of an operation in a model's graph.

    Attributes:
      operation: The operation.
      inputs: The ids of its input tensors.
      outputs: The ids of its output tensors.
      kind: The signature of the call (see `call_signature`).
    """

    operation: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kind: Any


_Trunk = tuple[int, int, int]
"""The position of a call, the index of an output, and that tensor's id."""


def find_blocks(model: keras.Model) -> Blocks | None:
    """Finds the equal blocks that contain most of a model's variables.

    Args:
      model: A built model.

    Returns:
      The blocks, or None if the model has no graph or no part of the graph is
      repeated.
    """
    return max(
        find_all_blocks(model),
        key=lambda b: len(b) * b.num_entries,
        default=None,
    )


def find_all_blocks(model: keras.Model) -> Iterator[Blocks]:
    """Yields the runs of equal blocks in each of a model's graphs.

    Args:
      model: A built model.
    """
    for part in iter_functional_parts(model):
        yield from find_equal_blocks(part)


def iter_functional_parts(model: keras.Model) -> Iterator[keras.Model]:
    """Yields a model and its nested models, as far as they are functional.

    Models that override `call`, and models inside other layers, are left out.
    """
    if not model.built or not _has_graph(model) or _has_own_call(model):
        return
    yield model
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from iter_functional_parts(layer)


def _has_own_call(model: keras.Model) -> bool:
    """Returns whether a functional or sequential model overrides `call`."""
    return not is_of_keras(type(model).call)


def get_graph(model: keras.Model) -> Any:
    """Finds the object whose graph a model computes.

    Returns:
      The functional model inside a sequential model, or the model itself.
    """
    return getattr(model, "_functional", None) or model


def _has_graph(model: keras.Model) -> bool:
    return hasattr(get_graph(model), "_nodes_by_depth")


def find_equal_blocks(model: keras.Model) -> list[Blocks]:
    """Finds runs of equal blocks in a model's graph, the largest first.

    No two runs have a call in common.
    """
    nodes = list(_iter_nodes(model))
    found: list[Blocks] = []
    used: list[range] = []
    if MIN_BLOCKS <= len(nodes) <= _MAX_NODES:
        while largest := _find_largest(model, nodes, used):
            found.append(largest[0])
            used.append(largest[1])
    return found


def _find_largest(
    model: keras.Model, nodes: Sequence[_Node], used: Sequence[range]
) -> tuple[Blocks, range] | None:
    """Returns the largest run of blocks among calls that are not taken.

    Args:
      model: The model.
      nodes: The model's calls, in order.
      used: The positions of calls that belong to other runs.

    Returns:
      The blocks and the positions of their calls, or None.
    """
    best: tuple[Blocks, range] | None = None
    largest = 0
    for start, length, count in _find_repetitions(
        [node.kind for node in nodes]
    ):
        stop = start + length * count
        if any(start < r.stop and r.start < stop for r in used):
            continue
        segments = [
            range(first, first + length) for first in range(start, stop, length)
        ]
        blocks = _make_blocks(model, nodes, segments)
        size = 0 if blocks is None else len(blocks) * blocks.num_entries
        if blocks is not None and size > largest:
            best, largest = (blocks, range(start, stop)), size
    return best


def iter_calls(graph: Any) -> Iterator[Any]:
    """Yields the calls in a graph, nodes of Keras, in topological order."""
    by_depth = graph._nodes_by_depth
    for depth in sorted(by_depth, reverse=True):
        for node in by_depth[depth]:
            if not node.is_input:
                yield node


def _iter_nodes(model: keras.Model) -> Iterator[_Node]:
    """Yields a model's calls in topological order."""
    for node in iter_calls(get_graph(model)):
        yield _Node(
            node.operation,
            tuple(map(id, node.input_tensors)),
            tuple(map(id, node.output_tensors)),
            call_signature(node),
        )


def _find_repetitions(kinds: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """Yields (start, length, repetitions) for each periodic range of a list."""
    # Each possible length of a block is tried. If all entries in a range equal
    # the entries `length` positions later, the list is periodic there.
    ids: dict[Any, int] = {}
    numbers = [ids.setdefault(kind, len(ids)) for kind in kinds]
    size = len(numbers)
    for length in range(1, size // MIN_BLOCKS + 1):
        is_equal = [
            numbers[i] == numbers[i + length] for i in range(size - length)
        ]
        position = 0
        for equal, run in itertools.groupby(is_equal):
            count = len(list(run))
            if equal:
                # A block may begin at any position of the period.
                for shift in range(min(length, count)):
                    number = (count - shift) // length + 1
                    if number >= MIN_BLOCKS:
                        yield position + shift, length, number
            position += count


def _make_blocks(
    model: keras.Model, nodes: Sequence[_Node], segments: Sequence[range]
) -> Blocks | None:
    """Returns repeated parts of a graph as blocks; None if they form no chain.

    Args:
      model: The model that contains the repetitions.
      nodes: The model's calls, in order.
      segments: For each repetition, the positions of its calls in `nodes`.
    """
    trunks = _find_trunks(model, nodes, segments)
    if trunks is None:
        return None
    entering = _find_entering(nodes, segments[0], trunks[0])
    if entering is None or not _have_equal_wiring(
        nodes, segments, [entering, *(tensor for _, _, tensor in trunks)]
    ):
        return None
    operations = [[nodes[i].operation for i in segment] for segment in segments]
    calls = collections.Counter(id(node.operation) for node in nodes)
    if any(calls[id(x)] > 1 for segment in operations for x in segment):
        return None
    variables = {
        id(v): v for x in operations[0] for v in getattr(x, "variables", ())
    }
    return Blocks(
        model=model,
        segments=operations,
        trunks=[(nodes[i].operation, k) for i, k, _ in trunks],
        entering=entering,
        num_entries=sum(math.prod(v.shape) for v in variables.values()),
    )


def _find_trunks(
    model: keras.Model, nodes: Sequence[_Node], segments: Sequence[range]
) -> list[_Trunk] | None:
    """Returns each block's only output that is read outside of the block.

    Returns None if a block does not have exactly one such output (its trunk),
    or if calls after the next block also read it.
    """
    last_reads = {t: i for i, node in enumerate(nodes) for t in node.inputs}
    last_reads |= {id(tensor): len(nodes) for tensor in model.outputs}
    trunks: list[_Trunk] = []
    for segment in segments:
        leaving = [
            (i, k, tensor)
            for i in segment
            for k, tensor in enumerate(nodes[i].outputs)
            if last_reads.get(tensor, -1) >= segment.stop
        ]
        if len(leaving) != 1:
            return None
        trunks += leaving
    follow = all(
        last_reads[tensor] < following.stop
        for (_, _, tensor), following in zip(trunks, segments[1:], strict=False)
    )
    return trunks if follow else None


def _have_equal_wiring(
    nodes: Sequence[_Node],
    segments: Sequence[range],
    entering: Sequence[int],
) -> bool:
    """Returns whether the calls in all blocks have equivalent inputs.

    Args:
      nodes: The model's calls, in order.
      segments: For each block, the positions of its calls.
      entering: For each block, the tensor that enters it.
    """
    pairs = zip(segments, entering, strict=False)
    return len({_describe_wiring(nodes, *pair) for pair in pairs}) == 1


def _find_entering(
    nodes: Sequence[_Node], segment: range, trunk: _Trunk
) -> int | None:
    """Returns the tensor from which the first of the equal blocks starts.

    The first block reads this tensor at the position where the second block
    reads the trunk (the output) of the first block.
    """
    shift = segment.stop - segment.start
    for i in segment:
        pairs = zip(nodes[i].inputs, nodes[i + shift].inputs, strict=False)
        for tensor, next_tensor in pairs:
            if next_tensor == trunk[2]:
                return tensor
    return None


def _describe_wiring(
    nodes: Sequence[_Node], segment: range, entering: int
) -> tuple[Any, ...]:
    """Returns, for each call in a block, where its inputs come from."""
    sources = {
        tensor: (i - segment.start, k)
        for i in segment
        for k, tensor in enumerate(nodes[i].outputs)
    }

    def source(tensor: int) -> object:
        if tensor == entering:
            return "trunk"
        return sources.get(tensor, tensor)

    return tuple(tuple(map(source, nodes[i].inputs)) for i in segment)

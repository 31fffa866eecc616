"""Finds equal blocks of a functional model: repeated parts of its graph.

Deep models repeat the same few layers, so a loop can compute them.
"""

import collections
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras

from keras_strategies.kernels.call_signatures import (
    call_signature,
    is_of_keras,
)
from keras_strategies.spmd.identity import IdentitySet

MIN_BLOCKS = 4
"""The smallest number of repetitions that are treated as blocks."""
_MAX_NODES = 5000


@dataclasses.dataclass(kw_only=True, eq=False)
class Blocks:
    """Equal blocks of a model, such as the blocks of a transformer.

    The blocks are consecutive repetitions of a part of the model's graph. Each
    block reads one output of the previous block, and otherwise only tensors
    that all blocks read (such as a mask).

    Attributes:
      model: The functional model that contains the blocks: the model itself,
        or one of its layers.
      segments: The operations of each block, in the order of the graph.
      tensors: The ids of the symbolic tensors between the blocks: the one that
        enters the first block, and of each block the only one that is used
        outside of it, which the next block reads.
      reason: Why the last trace could not compute the blocks in a loop; "" if
        it did, and None if there was none.
    """

    model: keras.Model
    segments: Sequence[Sequence[Any]]
    tensors: Sequence[int]
    reason: str | None = None

    @property
    def layers(self) -> list[keras.layers.Layer] | None:
        """The layer of each block, or None if blocks are not single layers."""
        first, *others = self.segments[0]
        is_layer = isinstance(first, keras.layers.Layer) and not others
        return [segment[0] for segment in self.segments] if is_layer else None

    @functools.cached_property
    def size(self) -> int:
        """The number of parameters (entries of variables) of all blocks."""
        variables = list_variables(self.segments[0])
        return len(self) * sum(math.prod(v.shape) for v in variables)

    def __len__(self) -> int:
        return len(self.segments)


def list_variables(operations: Sequence[Any]) -> list[keras.Variable]:
    """Returns the variables of operations, each once."""
    variables = (getattr(x, "variables", ()) for x in operations)
    return list(IdentitySet(itertools.chain.from_iterable(variables)))


def find_blocks(model: keras.Model) -> Blocks | None:
    """Finds the equal blocks that contain most of a model's variables.

    Args:
      model: A built model.

    Returns:
      The blocks, or None if the model has no graph or no part of the graph is
      repeated.
    """
    return max(
        find_all_blocks(model), key=lambda blocks: blocks.size, default=None
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
    has_graph = hasattr(get_graph(model), "_nodes_by_depth")
    if not model.built or not has_graph or not is_of_keras(type(model).call):
        return
    yield model
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from iter_functional_parts(layer)


def get_graph(model: keras.Model) -> Any:
    """Finds the object whose graph a model computes.

    Returns:
      The functional model inside a sequential model, or the model itself.
    """
    return getattr(model, "_functional", None) or model


def find_equal_blocks(model: keras.Model) -> list[Blocks]:
    """Finds runs of equal blocks in a model's graph, the largest first.

    No two runs have a call in common.
    """
    nodes = list(iter_calls(get_graph(model)))
    if not MIN_BLOCKS <= len(nodes) <= _MAX_NODES:
        return []
    runs: list[tuple[range, Blocks]] = []
    kinds = map(call_signature, nodes)
    for start, length, count in _find_repetitions(kinds):
        run = range(start, start + length * count)
        segments = [run[i : i + length] for i in range(0, len(run), length)]
        blocks = _make_blocks(model, nodes, segments)
        if blocks is not None and blocks.size:
            runs.append((run, blocks))
    found, used = [], set[int]()
    for run, blocks in sorted(runs, key=lambda run: -run[1].size):
        if used.isdisjoint(run):
            found.append(blocks)
            used.update(run)
    return found


def iter_calls(graph: Any) -> Iterator[Any]:
    """Yields the calls in a graph, nodes of Keras, in topological order."""
    by_depth = graph._nodes_by_depth
    for depth in sorted(by_depth, reverse=True):
        for node in by_depth[depth]:
            if not node.is_input:
                yield node


def _find_repetitions(kinds: Iterable[Any]) -> Iterator[tuple[int, int, int]]:
    """Yields (start, length, repetitions) for each periodic range of a list."""
    # Each possible length of a block is tried. If all entries in a range equal
    # the entries `length` positions later, the list is periodic there.
    ids: dict[Any, int] = {}
    numbers = [ids.setdefault(kind, len(ids)) for kind in kinds]
    for length in range(1, len(numbers) // MIN_BLOCKS + 1):
        is_equal = map(operator.eq, numbers, numbers[length:])
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
    model: keras.Model, nodes: Sequence[Any], segments: Sequence[range]
) -> Blocks | None:
    """Returns repeated parts of a graph as blocks; None if they form no chain.

    Args:
      model: The model that contains the repetitions.
      nodes: The model's calls, in order.
      segments: For each repetition, the positions of its calls in `nodes`.
    """
    leaving = _find_leaving(model, nodes, segments)
    if leaving is None:
        return None
    entering = _find_entering(nodes, segments[0], leaving[0])
    operations = [[nodes[i].operation for i in segment] for segment in segments]
    calls = collections.Counter(id(node.operation) for node in nodes)
    is_shared = any(calls[id(x)] > 1 for part in operations for x in part)
    if entering is None or is_shared:
        return None
    tensors = [entering, *leaving]
    return Blocks(model=model, segments=operations, tensors=tensors)


def _find_leaving(
    model: keras.Model, nodes: Sequence[Any], segments: Sequence[range]
) -> list[int] | None:
    """Returns each block's only tensor that is read outside of the block.

    Returns None if a block does not have exactly one such tensor, or if calls
    after the next block also read it.
    """
    last_reads = {
        id(tensor): i
        for i, node in enumerate(nodes)
        for tensor in node.input_tensors
    }
    last_reads |= {id(tensor): len(nodes) for tensor in model.outputs}
    found: list[int] = []
    for segment in segments:
        leaving = [
            id(tensor)
            for i in segment
            for tensor in nodes[i].output_tensors
            if last_reads.get(id(tensor), -1) >= segment.stop
        ]
        if len(leaving) != 1:
            return None
        found += leaving
    pairs = zip(found, segments[1:], strict=False)
    is_chain = all(last_reads[tensor] < after.stop for tensor, after in pairs)
    return found if is_chain else None


def _find_entering(
    nodes: Sequence[Any], segment: range, leaving: int
) -> int | None:
    """Returns the tensor from which the first of the equal blocks starts.

    The first block reads this tensor at the position where the second block
    reads the tensor that leaves the first block.
    """
    for i in segment:
        after = nodes[i + len(segment)]
        inputs = nodes[i].input_tensors, after.input_tensors
        for tensor, next_tensor in zip(*inputs, strict=False):
            if id(next_tensor) == leaving:
                return id(tensor)
    return None

"""Equal blocks of a functional model: a part of its graph that is repeated.

Deep models are the same few layers, over and over. What a step of such a model
needs grows by the same for each block, so that two short ones tell of a deep
one.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
from keras import tree

from keras_strategies._types import Tree
from keras_strategies.planning.compile.call_signatures import (
    call_signature,
    is_of_keras,
)

MIN_BLOCKS = 4
"""The fewest repetitions that count as blocks."""
_MAX_NODES = 5000


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Blocks:
    """Repetitions of a part of a model's graph, one after the other.

    Each takes one tensor of the one before, and what all of them take.

    Attributes:
      model: The functional model that they are in: the model itself, or one
        that it has as a layer.
      segments: The operations of each block, in the order of the graph.
      trunks: Where each block's only result that is used outside of it comes
        from: the operation, and which of its outputs.
      num_entries: Entries of one block's variables.
    """

    model: keras.Model
    segments: Sequence[Sequence[Any]]
    trunks: Sequence[tuple[Any, int]]
    num_entries: int

    @property
    def layers(self) -> list[keras.layers.Layer] | None:
        """Each block's layer, if it is one layer; else None."""
        if len(self.segments[0]) > 1:
            return None
        found = [segment[0] for segment in self.segments]
        is_of_layers = all(isinstance(x, keras.layers.Layer) for x in found)
        return found if is_of_layers else None

    def __len__(self) -> int:
        return len(self.segments)


@dataclasses.dataclass(frozen=True, eq=False)
class _Node:
    """A call of an operation.

    Attributes:
      operation: What is called.
      inputs: The tensors that it takes, by their ids.
      outputs: The tensors that it gives.
      kind: What is equal for calls that compute the same.
    """

    operation: Any
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kind: Any


_Trunk = tuple[int, int, int]
"""The position of a call, which of its outputs, and that tensor's id."""


def find_blocks(model: keras.Model) -> Blocks | None:
    """The blocks that most of a model's variables are in.

    Args:
      model: A built model.

    Returns:
      None: it has no graph, or no part of it is repeated.
    """
    found = [_blocks_of(part) for part in _functional_parts(model)]
    blocks = [b for b in found if b is not None]
    return max(blocks, key=lambda b: len(b) * b.num_entries, default=None)


def _functional_parts(model: keras.Model) -> Iterator[keras.Model]:
    """A model and those in its graph, all of which do what the graph says.

    Others that a layer holds cannot be replaced by shorter ones.
    """
    if not model.built or _graph_of(model) is None or _has_own_call(model):
        return
    yield model
    for layer in model.layers:
        if isinstance(layer, keras.Model):
            yield from _functional_parts(layer)


def _has_own_call(model: keras.Model) -> bool:
    """Whether a functional or sequential model does something else."""
    return not is_of_keras(type(model).call)


def _graph_of(model: keras.Model) -> Any:
    """The calls of a functional or sequential model, by their depths."""
    graph = getattr(model, "_functional", None) or model
    return getattr(graph, "_nodes_by_depth", None)


def _blocks_of(model: keras.Model) -> Blocks | None:
    nodes = list(_nodes_of(model))
    if not MIN_BLOCKS <= len(nodes) <= _MAX_NODES:
        return None
    best: Blocks | None = None
    for start, length, count in _repetitions([node.kind for node in nodes]):
        stop = start + length * count
        segments = [
            range(first, first + length) for first in range(start, stop, length)
        ]
        blocks = _checked(model, nodes, segments)
        if blocks is None:
            continue
        size = len(blocks) * blocks.num_entries
        if best is None or size > len(best) * best.num_entries:
            best = blocks
    return best if best is not None and best.num_entries else None


def _nodes_of(model: keras.Model) -> Iterator[_Node]:
    """A model's calls in an order in which each comes after its inputs."""
    by_depth = _graph_of(model)
    for depth in sorted(by_depth, reverse=True):
        for node in by_depth[depth]:
            if node.is_input:
                continue
            operation = node.operation
            yield _Node(
                operation,
                tuple(map(id, node.input_tensors)),
                tuple(map(id, node.output_tensors)),
                call_signature(node),
            )


def _repetitions(kinds: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """Where a sequence repeats a part: (start, length, number)."""
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
                # Parts may begin at any place of the first one.
                for shift in range(min(length, count)):
                    number = (count - shift) // length + 1
                    if number >= MIN_BLOCKS:
                        yield position + shift, length, number
            position += count


def _checked(
    model: keras.Model, nodes: Sequence[_Node], segments: Sequence[range]
) -> Blocks | None:
    """Returns repetitions as blocks, if they are alike and follow each other.

    Args:
      model: The model that has them.
      nodes: Its calls, in order.
      segments: The positions of each repetition's calls.
    """
    trunks = _trunks(model, nodes, segments)
    if trunks is None or not _are_wired_alike(nodes, segments, trunks):
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
        num_entries=sum(math.prod(v.shape) for v in variables.values()),
    )


def _trunks(
    model: keras.Model, nodes: Sequence[_Node], segments: Sequence[range]
) -> list[_Trunk] | None:
    """Returns each segment's only result that is read after it.

    None: a segment has another number of them, or one is read after the
    following segment.
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


def _are_wired_alike(
    nodes: Sequence[_Node],
    segments: Sequence[range],
    trunks: Sequence[_Trunk],
) -> bool:
    """Returns whether the calls of all segments get the same inputs."""
    entering = [
        _entering(nodes, segments[0], trunks[0]),
        *(tensor for _, _, tensor in trunks[:-1]),
    ]
    pairs = zip(segments, entering, strict=True)
    return len({_wiring(nodes, *pair) for pair in pairs}) == 1


def _entering(
    nodes: Sequence[_Node], segment: range, trunk: _Trunk
) -> int | None:
    """The tensor that the first block takes as the others take the trunk's.

    Of what it takes from outside, the one that the second takes elsewhere.
    """
    shift = segment.stop - segment.start
    for i in segment:
        pairs = zip(nodes[i].inputs, nodes[i + shift].inputs, strict=False)
        for own, of_next in pairs:
            if of_next == trunk[2]:
                return own
    return None


def _wiring(
    nodes: Sequence[_Node], segment: range, entering: int | None
) -> tuple[Any, ...]:
    """Where each call of a block gets its inputs from."""
    made = {
        tensor: (i - segment.start, k)
        for i in segment
        for k, tensor in enumerate(nodes[i].outputs)
    }

    def source(tensor: int) -> object:
        if tensor == entering:
            return "trunk"
        return made.get(tensor, tensor)

    return tuple(tuple(map(source, nodes[i].inputs)) for i in segment)


def shortened(model: keras.Model, blocks: Blocks, number: int) -> keras.Model:
    """A model of the same layers with the first `number` blocks alone.

    Args:
      model: The model; of which `blocks` were found.
      blocks: Its blocks.
      number: How many are kept, at least one.

    Returns:
      A functional model, not compiled. It shares the model's layers.
    """
    if isinstance(model, keras.Sequential):
        shorter = _shorter_sequential(model, blocks, number)
    elif model is blocks.model:
        shorter = _shorter_functional(model, blocks, number)
    else:
        inner = {
            id(layer): shortened(layer, blocks, number)
            for layer in model.layers
            if layer is blocks.model or _contains(layer, blocks.model)
        }
        shorter = _cloned(
            model,
            lambda layer: inner.get(id(layer), layer),
            lambda layer, *args, **kwargs: layer(*args, **kwargs),
        )
    # A model may be computed again as a whole. No config says so.
    shorter._remat_mode = model._remat_mode
    return shorter


def _cloned(
    model: keras.Model,
    layer_of: Callable[..., keras.layers.Layer],
    call: Callable[..., Tree],
) -> keras.Model:
    if model.compiled:
        # Keras would compile the clone by a config: lambdas have none.
        model = keras.Model(model.input, model.output, name=model.name)
    return keras.models.clone_model(
        model, clone_function=layer_of, call_function=call
    )


def _shorter_functional(
    model: keras.Model, blocks: Blocks, number: int
) -> keras.Model:
    dropped = {id(x) for part in blocks.segments[number:] for x in part}
    last, last_index = blocks.trunks[number - 1]
    end, end_index = blocks.trunks[-1]
    trunk: list[Any] = []

    def call(
        operation: keras.Operation, *args: object, **kwargs: object
    ) -> Tree:
        if id(operation) not in dropped:
            outputs = operation(*args, **kwargs)
            if operation is last:
                trunk.append(tree.flatten(outputs)[last_index])
            return outputs
        # Nothing that is kept takes them.
        outputs = tree.map_structure(
            lambda t: keras.KerasTensor(t.shape, t.dtype), operation.output
        )
        if operation is not end:
            return outputs
        leaves = tree.flatten(outputs)
        leaves[end_index] = trunk[0]
        return tree.pack_sequence_as(outputs, leaves)

    return _cloned(model, lambda layer: layer, call)


def _contains(layer: object, inner: object) -> bool:
    if not isinstance(layer, keras.Model):
        return False
    return any(part is inner for part in layer._flatten_layers())


def _shorter_sequential(
    model: keras.Model, blocks: Blocks, number: int
) -> keras.Model:
    dropped = {id(x) for part in blocks.segments[number:] for x in part}
    inputs = [
        keras.Input(batch_shape=t.shape, dtype=t.dtype) for t in model.inputs
    ]
    layers = [
        shortened(x, blocks, number)
        if x is blocks.model or _contains(x, blocks.model)
        else x
        for x in model.layers
        if id(x) not in dropped
    ]
    return keras.Sequential([*inputs, *layers])

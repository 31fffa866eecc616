"""Equal blocks of a functional model: a part of its graph that is repeated.

Deep models are the same few layers, over and over. What a step of such a model
needs grows by the same for each block, so that two short ones tell of a deep
one.
"""

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
        blocks = _checked(model, nodes, start, length, count)
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
    model: keras.Model,
    nodes: Sequence[_Node],
    start: int,
    length: int,
    count: int,
) -> Blocks | None:
    """The repetitions as blocks, if they are alike and follow each other."""
    consumers: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        for tensor in node.inputs:
            consumers.setdefault(tensor, []).append(i)
    kept = {id(tensor) for tensor in model.outputs}
    segments = [
        range(start + j * length, start + (j + 1) * length)
        for j in range(count)
    ]

    def is_read_from(tensor: int, place: int) -> bool:
        used = consumers.get(tensor, ())
        return tensor in kept or any(c >= place for c in used)

    trunks: list[tuple[int, int, int]] = []
    for segment in segments:
        leaving = [
            (i, k, tensor)
            for i in segment
            for k, tensor in enumerate(nodes[i].outputs)
            if is_read_from(tensor, segment.stop)
        ]
        if len(leaving) != 1:
            return None
        trunks += leaving
    if any(
        is_read_from(tensor, following.stop)
        for (_, _, tensor), following in zip(trunks, segments[1:], strict=False)
    ):
        return None
    wirings = set()
    previous = _entering(nodes, segments[0], trunks[0])
    for segment, trunk in zip(segments, trunks, strict=True):
        wirings.add(_wiring(nodes, segment, previous))
        previous = trunk[2]
    operations = [[nodes[i].operation for i in segment] for segment in segments]
    flat = [id(x) for segment in operations for x in segment]
    others = [id(n.operation) for n in nodes]
    if len(wirings) > 1 or any(others.count(x) > 1 for x in set(flat)):
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


def _entering(
    nodes: Sequence[_Node], segment: range, trunk: tuple[int, int, int]
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

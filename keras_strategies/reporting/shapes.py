"""The shapes of batches: their rows and tokens, and how they differ."""

import dataclasses
from typing import Any

import jax

from keras_strategies.spmd.batches import Segment

Signature = tuple[tuple[int, ...], ...]
"""The shapes of a segment's arrays, with the padding."""

_ENTRIES = ("x", "y", "sample_weight")


@dataclasses.dataclass(kw_only=True)
class ShapeCount:
    """The batches of one shape that were trained on.

    Attributes:
      text: The arrays' shapes by their names, with all rows of a batch.
      rows: Number of rows of a batch, without padding.
      tokens: Number of tokens of a batch; 0 if it contains none.
      x: The shapes and dtypes of the inputs, with all rows of a batch.
      steps: Number of steps.
    """

    text: dict[str, tuple[int, ...]]
    rows: int
    tokens: int
    x: Any
    steps: int = 0


def sign(segment: Segment) -> Signature:
    """Returns the shapes of a segment's arrays, in a fixed order."""
    try:
        # `data` is usually a tuple of arrays.
        shapes = [leaf.shape for leaf in segment.data]
    except AttributeError:
        shapes = [leaf.shape for leaf in jax.tree.leaves(segment.data)]
    return (*shapes, (segment.rows, segment.steps))


def describe(segment: Segment, *, has_tokens: bool) -> ShapeCount:
    """Describes the shapes of a segment's batches.

    Args:
      segment: The segment.
      has_tokens: Whether the model's integer inputs are sequences of tokens.
    """
    data, axis = segment.data, int(segment.steps > 1)
    named = jax.tree_util.tree_flatten_with_path(data)[0]
    shapes = {
        _name(path, isinstance(data, tuple)): _without_padding(leaf, segment)
        for path, leaf in named
    }
    x = data[0] if isinstance(data, tuple) else data
    inputs = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            _without_padding(leaf, segment), leaf.dtype
        ),
        x,
    )
    lengths = [
        leaf.shape[axis + 1]
        for leaf in jax.tree.leaves(x)
        if len(leaf.shape) == axis + 2
        and jax.numpy.issubdtype(leaf.dtype, jax.numpy.integer)
    ]
    longest = max(lengths, default=0) if has_tokens else 0
    return ShapeCount(
        text=shapes,
        rows=segment.rows,
        tokens=segment.rows * longest if longest > 1 else 0,
        x=inputs,
    )


def describe_change(new: ShapeCount, known: list[ShapeCount]) -> str:
    """Describes how a batch's shapes differ from those of earlier batches."""
    earlier = [one.text for one in known]
    changed = {
        name: shape
        for name, shape in new.text.items()
        if all(one.get(name) != shape for one in earlier)
    }
    if not changed:
        return "another combination of shapes"
    is_shorter = all(
        any(one.get(name, ())[1:] == shape[1:] for one in earlier)
        for name, shape in changed.items()
    )
    if is_shorter:
        return f"a batch of {new.rows} rows"
    return ", ".join(f"{name} {shape}" for name, shape in changed.items())


def _without_padding(leaf: Any, segment: Segment) -> tuple[int, ...]:
    return (segment.rows, *leaf.shape[int(segment.steps > 1) + 1 :])


def _name(path: tuple[Any, ...], has_entries: bool) -> str:
    keystr = jax.tree_util.keystr
    if not has_entries:
        return f"x{keystr(path)}"
    return f"{_ENTRIES[path[0].idx]}{keystr(path[1:])}"

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
    x: Any = None
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
    data = segment.data if isinstance(segment.data, tuple) else (segment.data,)
    first = 2 if segment.steps > 1 else 1
    named = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            (segment.rows, *leaf.shape[first:]), leaf.dtype
        ),
        dict(zip(_ENTRIES, data, strict=False)),
    )
    lengths = [
        leaf.shape[1]
        for leaf in jax.tree.leaves(named["x"])
        if has_tokens
        and len(leaf.shape) == 2
        and jax.numpy.issubdtype(leaf.dtype, jax.numpy.integer)
    ]
    longest = max(lengths, default=0)
    return ShapeCount(
        text={
            path[0].key + jax.tree_util.keystr(path[1:]): leaf.shape
            for path, leaf in jax.tree_util.tree_leaves_with_path(named)
        },
        rows=segment.rows,
        tokens=segment.rows * longest if longest > 1 else 0,
        x=named["x"],
    )


def describe_change(new: ShapeCount, known: list[ShapeCount]) -> str:
    """Describes how a batch's shapes differ from those of earlier batches.

    Returns "" if they do not differ, but the number of steps of a program does.
    """
    earlier = [one.text for one in known]
    if new.text in earlier:
        return ""
    changed = {
        name: shape
        for name, shape in new.text.items()
        if all(one.get(name) != shape for one in earlier)
    }
    if not changed:
        return "another combination of shapes"
    if all(
        any(one.get(name, ())[1:] == shape[1:] for one in earlier)
        for name, shape in changed.items()
    ):
        return f"a batch of {new.rows} rows"
    return ", ".join(f"{name} {shape}" for name, shape in changed.items())

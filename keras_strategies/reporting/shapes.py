"""The shapes of the batches that a run has trained on."""

import dataclasses
from typing import Any

import jax

from keras_strategies.spmd.batches import Segment

_ENTRIES = ("x", "y", "sample_weight")

Signature = tuple[tuple[int, ...], ...]
"""The shapes of a segment's arrays, with the padding."""


@dataclasses.dataclass(kw_only=True)
class ShapeCount:
    """The batches of one shape that were trained on.

    Attributes:
      text: The arrays' shapes by their names, with all rows of a batch.
      rows: Number of rows of a batch, without padding.
      tokens: Number of tokens of a batch; 0 if it contains none.
      x: The shapes and dtypes of the inputs, with all rows of a batch, until
        the operations are counted.
      steps: Number of steps.
      flops: Number of operations of a step, if known.
    """

    text: dict[str, tuple[int, ...]]
    rows: int
    tokens: int
    x: Any = None
    steps: int = 0
    flops: float | None = None


def sign(segment: Segment) -> Signature:
    """Returns the shapes of a segment's arrays, in a fixed order."""
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
    if new.text in [one.text for one in known]:
        return ""
    first = known[0].text if known else {}
    changed = {n: s for n, s in new.text.items() if s != first.get(n)}
    return ", ".join(f"{name} {shape}" for name, shape in changed.items())

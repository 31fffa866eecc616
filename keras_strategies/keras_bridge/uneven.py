"""A replica function whose replicas hold different numbers of rows.

One program: a switch over the different numbers, each branch on exactly its
rows; see `_core/replay.py` for the collectives in it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from keras_strategies._core.replay import (
    Concatenation,
    Reached,
    Replay,
    replay_scope,
)

Variant = tuple[int, ...]
"""Rows of each uneven argument."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Called:
    """What one branch computed.

    Attributes:
      outputs: The results that are arrays.
      new: The variables' values after it.
      start: What the change of each is counted from.
      note: Anything that is known when the branch is traced.
    """

    outputs: list[Any]
    new: list[Any]
    start: list[Any]
    note: Any


def with_rows(
    variant: Variant, is_uneven: list[bool], leaves: list[Any]
) -> list[Any]:
    """The arguments with the rows of one variant; see `call_unevenly`."""
    rows = iter(variant)
    return [
        leaf[:, : next(rows)] if uneven else leaf
        for leaf, uneven in zip(leaves, is_uneven, strict=True)
    ]


def call_unevenly(
    call: Callable[[list[Any], list[Any]], Called],
    variants: list[Variant],
    is_uneven: list[bool],
    places: list[int],
    replica: Any,
    state: list[Any],
    leaves: list[Any],
) -> tuple[Called, list[Any], list[list[tuple[int, ...]]]]:
    """Calls a function on each replica's own rows.

    Args:
      call: The function, of the state and the arguments.
      variants: The different numbers of rows of the uneven arguments.
      is_uneven: Which arguments are.
      places: Which variant each replica has.
      replica: Which replica this is, a traced integer.
      state: The values of variables.
      leaves: The arguments; uneven ones padded, (1, rows, ...).

    Returns:
      What was computed, outputs padded to one shape; the notes of all
      variants; and the true shapes of each variant's outputs.

    Raises:
      ValueError: the replicas' functions do not call the same collectives
        or return the same structure.
    """
    known: list[list[Any]] = []
    index = jnp.array(places)[replica]

    def traced(variant: Variant, found: dict[Any, Any]) -> Any:
        def branch(state: list[Any], leaves: list[Any], known: Any) -> Any:
            own = with_rows(variant, is_uneven, leaves)
            try:
                replay = Replay(known)
                with replay_scope(replay):
                    called = call(state, own)
                replay.check_not_swallowed()
            except Reached as reached:
                found[variant] = reached
                return reached.operands, [], []
            found[variant] = called
            return called.outputs, called.new, called.start

        return branch

    while True:
        found: dict[Any, Any] = {}
        shapes = [
            jax.eval_shape(traced(v, found), state, leaves, known)
            for v in variants
        ]
        ends = [found[v] for v in variants]
        outputs = [[leaf.shape for leaf in s[0]] for s in shapes]
        _check_alike(ends, shapes)
        padded = [
            tuple(map(max, zip(*column, strict=True)))
            for column in zip(*outputs, strict=True)
        ]
        branches = [_padding(traced(v, found), padded) for v in variants]
        result = jax.lax.switch(index, branches, state, leaves, known)
        if isinstance(ends[0], Called):
            called = Called(
                outputs=result[0], new=result[1], start=result[2], note=None
            )
            return called, [found[v].note for v in variants], outputs
        reduce = ends[0].reduce
        if any(o != outputs[0] for o in outputs):
            if isinstance(reduce, Concatenation):
                reduce = reduce.of_shapes([outputs[k][0] for k in places])
                known = [*known, reduce(result[0])]
                continue
            raise ValueError(
                "A collective's value must have one shape on all replicas. "
                f"Received: shapes {outputs} in a function given to `run` "
                "with an uneven batch. Reduce over the rows first, or make "
                "the batch even (`drop_remainder`)."
            )
        known = [*known, reduce(result[0])]


def variants_of(rows: Sequence[Variant]) -> list[Variant]:
    """The different numbers of rows, each once; the largest first."""
    return sorted(set(rows), reverse=True)


def shares_of(rows: Sequence[Variant]) -> list[float] | None:
    """Each replica's weight in averages: none without rows.

    Args:
      rows: Each replica's numbers of rows, of all uneven arguments.

    Returns:
      The weights, or None where all have the same.
    """
    has_rows = [any(variant) for variant in rows]
    if all(has_rows) or not any(has_rows):
        return None
    return [is_full / sum(has_rows) for is_full in has_rows]


def rows_of_all(
    own: Sequence[int], rows: Sequence[Variant]
) -> dict[int, set[tuple[int, ...]]]:
    """By a replica's own number of rows, those of all replicas.

    Args:
      own: The replica's numbers of rows, of all uneven arguments.
      rows: Those of each replica.
    """
    columns: dict[int, set[tuple[int, ...]]] = {}
    for count, column in zip(own, zip(*rows, strict=True), strict=True):
        columns.setdefault(count, set()).add(column)
    return columns


def _padding(branch: Callable[..., Any], shapes: list[Any]) -> Any:
    def with_padding(*args: Any) -> Any:
        outputs, new, start = branch(*args)
        padded = map(_padded, outputs, shapes)
        return list(padded), new, start

    return with_padding


def _padded(array: Any, shape: tuple[int, ...]) -> Any:
    if array.shape == shape:
        return array
    missing = zip(array.shape, shape, strict=True)
    return jnp.pad(array, [(0, most - size) for size, most in missing])


def _check_alike(ends: list[Any], shapes: list[Any]) -> None:
    kinds = {isinstance(end, Called) for end in ends}
    ranks = {
        tuple((len(leaf.shape), leaf.dtype) for leaf in s[0]) for s in shapes
    }
    if len(kinds) > 1 or len(ranks) > 1:
        raise ValueError(
            "All replicas must call the same collectives in the same order, "
            "and return results of one structure. Received: a function given "
            "to `run` that does something else for another number of rows. "
            "Make the batch even (`drop_remainder`), or treat all alike."
        )

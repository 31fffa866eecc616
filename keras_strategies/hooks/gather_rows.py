"""Recognizes arrays of batch rows, and gathers the rows of all replicas."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from keras import tree
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask

from keras_strategies._types import Array, Leaf, Tree
from keras_strategies.keras_bridge.step_context import StepContext
from keras_strategies.passes.row_kinds import marks
from keras_strategies.spmd.replica_map import all_concatenate


def has_rows(value: object, rows: int) -> bool:
    """Returns whether an array may have the rows of a batch.

    It may if its first dimension is a multiple of `rows`, the number of the
    batch's rows on this replica. If `rows` is 0, the dimension must be 0.
    """
    for size in tuple(getattr(value, "shape", ()))[:1]:
        return size % rows == 0 if rows else not size
    return False


def note_rows(step: StepContext, values: Tree, of: str) -> None:
    """Records which arrays of a nest are assumed to contain batch rows.

    Args:
      step: The step that is being traced.
      values: The nest of arrays.
      of: A description of the function that received the arrays, for
        messages.
    """
    for value in tree.flatten(values):
        for size in tuple(getattr(value, "shape", ()))[:1]:
            step.note_size(size, has_rows(value, step.facts.rows), of)


def gather_all_rows(step: StepContext, values: Tree) -> Tree:
    """Gathers the rows of all replicas for the arrays of a nest.

    In a model's step, the Keras masks of the arrays are gathered, too. In `run`
    the number of rows is unknown, so every array that is not a scalar is
    gathered.

    Returns:
      The nest, in which arrays of shape (rows, ...) are replaced by arrays
      with the rows of all replicas, in the replicas' order.
    """

    def gather(value: Leaf) -> Leaf:
        if step.facts.is_local:
            is_gathered = bool(jnp.ndim(value))
        else:
            is_gathered = has_rows(value, step.facts.rows)
        if not is_gathered:
            return value
        rows = all_concatenate(jnp.asarray(value), step.axis)
        mask = get_keras_mask(value)
        if mask is not None and not step.facts.is_local:
            set_keras_mask(rows, all_concatenate(mask, step.axis))
        return rows

    return tree.map_structure(gather, values)


def call_with_all_rows(
    step: StepContext, fn: Callable[..., Any], *args: Tree, **kwargs: Tree
) -> Array:
    """Calls a loss function with the gathered rows of all replicas.

    Returns:
      The result of `fn`.
    """
    args, kwargs = gather_all_rows(step, (args, kwargs))
    with step.flag("sees_global_batch"):
        loss = fn(*args, **kwargs)

    def mark(value: Leaf) -> Leaf:
        is_array = isinstance(value, jax.Array)
        return marks.mark(value, marks.GLOBAL) if is_array else value

    return tree.map_structure(mark, loss)

"""The rows of a batch, on one replica and on all."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from keras import tree
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask

from keras_strategies._core.replica_map import all_rows
from keras_strategies._core.row_kinds import losses
from keras_strategies._types import Array, Leaf, Tree
from keras_strategies.keras_bridge.step_context import StepContext


def has_rows(value: object, rows: int) -> bool:
    """Whether an array has entries for each of `rows` rows."""
    for size in tuple(getattr(value, "shape", ()))[:1]:
        return size % rows == 0 if rows else not size
    return False


def note_rows(step: StepContext, values: Tree, of: str) -> None:
    """Notes which arrays of a nest, given to `of`, are taken to have rows."""
    for value in tree.flatten(values):
        for size in tuple(getattr(value, "shape", ()))[:1]:
            step.took_for_rows(size, has_rows(value, step.facts.rows), of)


def gathered(step: StepContext, values: Tree) -> Tree:
    """The nest with the rows of all replicas, masks included.

    In `run`, where no number of rows is known, of arrays of any size.

    Returns:
      The nest; arrays of shape (rows, ...) have the rows of all replicas, in
      their order.
    """

    def gather(value: Leaf) -> Leaf:
        if step.facts.is_local:
            is_given = bool(jnp.ndim(value))
        else:
            is_given = has_rows(value, step.facts.rows)
        if not is_given:
            return value
        rows = all_rows(jnp.asarray(value), step.axis)
        mask = get_keras_mask(value)
        if mask is not None and not step.facts.is_local:
            set_keras_mask(rows, all_rows(mask, step.axis))
        return rows

    return tree.map_structure(gather, values)


def call_with_all(
    step: StepContext, fn: Callable[..., Any], *args: Tree, **kwargs: Tree
) -> Array:
    """Calls a loss with the rows of all replicas.

    Returns:
      What `fn` returns of them.
    """
    args, kwargs = gathered(step, (args, kwargs))
    with step.flag("sees_global_batch"):
        found = fn(*args, **kwargs)
    if isinstance(found, jax.Array):
        found = losses.mark(found, losses.GLOBAL)
    return found

"""Losses of a replica that add up to the global batch's."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from keras_strategies._types import Array
from keras_strategies.keras_bridge.step_context import current_step
from keras_strategies.strategy.default import get_strategy


def compute_average_loss(
    per_example_loss: Array,
    sample_weight: Array | None = None,
    global_batch_size: Array | None = None,
) -> jax.Array:
    """Divides a sum of the rows' losses by the rows of the global batch.

    In `run` an optimizer sums the gradients over the replicas, so a replica's
    loss is its part of the global mean.

    Args:
      per_example_loss: The losses of a replica's rows, (rows, ...); from a
        loss with `reduction="none"`.
      sample_weight: Their weights, (rows,) or as the losses.
      global_batch_size: Rows of all replicas. Left out, it is the replica's
        rows times the number of replicas; in a batch that they do not share
        evenly, the rows of that argument of `run` that has as many here.

    Returns:
      A scalar.

    Raises:
      ValueError: losses without rows, or a number of rows that several
        uneven arguments have here, and not the same in all.

    References:
      `tf.nn.compute_average_loss`.

    Example:
      >>> loss_of = keras.losses.MeanSquaredError(reduction="none")
      >>> losses = loss_of([[0.0], [0.0]], [[1.0], [2.0]])
      >>> float(ks.compute_average_loss(losses, global_batch_size=4))
      1.25
    """
    losses = jnp.asarray(per_example_loss)
    if not losses.ndim:
        raise ValueError(
            "The losses of rows are needed, of shape (rows, ...). Received: "
            'a scalar. Make the loss with `reduction="none"`.'
        )
    if global_batch_size is None:
        global_batch_size = _rows_of_all(losses.shape[0])
    if sample_weight is not None:
        weight = jnp.asarray(sample_weight, losses.dtype)
        extra = losses.ndim - weight.ndim
        losses = losses * weight.reshape(*weight.shape, *[1] * extra)
    return jnp.sum(losses) / global_batch_size


def _rows_of_all(rows: int) -> int:
    step = current_step()
    columns = () if step is None else step.facts.rows_of_all.get(rows, ())
    known = {sum(column) for column in columns}
    if len(known) > 1:
        raise ValueError(
            "Which rows the losses belong to decides what they are divided "
            f"by. Received: {rows} losses on this replica, where arguments "
            f"of `run` with as many rows have {sorted(known)} on all. Pass "
            "`global_batch_size`."
        )
    count = get_strategy().num_replicas_in_sync
    return next(iter(known), rows * count)


def scale_regularization_loss(
    regularization_loss: Array | Sequence[Array],
) -> jax.Array:
    """Divides a loss of the weights by the number of replicas.

    Every replica adds it, and gradients are summed in `run`.

    Args:
      regularization_loss: A scalar, an array or a list of them: `model.losses`.

    Returns:
      Their sum, by the number of replicas.

    References:
      `tf.nn.scale_regularization_loss`.

    Example:
      ```python
      def loss_fn(x, y):
          losses = (y - model(x, training=True)) ** 2
          loss = ks.compute_average_loss(losses, global_batch_size=64)
          return loss + ks.scale_regularization_loss(model.losses)

      loss = strategy.reduce("sum", strategy.run(loss_fn, batch), axis=None)
      ```
    """
    parts = regularization_loss
    if not isinstance(parts, list | tuple):
        parts = [parts]
    total = sum((jnp.sum(jnp.asarray(p)) for p in parts), jnp.zeros(()))
    return total / get_strategy().num_replicas_in_sync

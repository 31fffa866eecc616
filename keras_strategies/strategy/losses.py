"""Per-replica losses that add up to the loss of the global batch."""

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
    """Divides the sum of the losses by the global number of rows.

    In `run` an optimizer sums the gradients over the replicas, so the losses of
    the replicas must add up to the global mean.

    Args:
      per_example_loss: The losses of this replica's rows, of shape (rows, ...),
        for example from a Keras loss with `reduction="none"`.
      sample_weight: The weights of the rows, of shape (rows,) or of the same
        shape as the losses.
      global_batch_size: The number of rows of all replicas together. The
        default is the number of this replica's rows times the number of
        replicas. If the replicas have different numbers of rows, the arguments
        of `run` determine the default: if one of them has the same number of
        rows on this replica as there are losses, the default is its total
        number of rows over all replicas.

    Returns:
      A scalar.

    Raises:
      ValueError: if the losses are a scalar; or if several arguments of
        `run` have this number of rows on this replica, but different total
        numbers of rows over all replicas.

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
            "`per_example_loss` must contain a loss for each row, with shape "
            "(rows, ...), not a scalar. Create the Keras loss with "
            '`reduction="none"`.'
        )
    if global_batch_size is None:
        global_batch_size = _count_global_rows(losses.shape[0])
    if sample_weight is not None:
        weight = jnp.asarray(sample_weight, losses.dtype)
        extra = losses.ndim - weight.ndim
        losses = losses * weight.reshape(*weight.shape, *[1] * extra)
    return jnp.sum(losses) / global_batch_size


def _count_global_rows(rows: int) -> int:
    step = current_step()
    columns = () if step is None else step.facts.rows_of_all.get(rows, ())
    known = {sum(column) for column in columns}
    if len(known) > 1:
        raise ValueError(
            "The global batch size of the losses must be unambiguous. "
            f"Received: {rows} losses on this replica. Several arguments of "
            f"`run` have {rows} rows on this replica, but their total numbers "
            f"of rows on all replicas differ: {sorted(known)}. Pass "
            "`global_batch_size`."
        )
    count = get_strategy().num_replicas_in_sync
    return next(iter(known), rows * count)


def scale_regularization_loss(
    regularization_loss: Array | Sequence[Array],
) -> jax.Array:
    """Divides a regularization loss by the number of replicas.

    Every replica adds the full regularization loss, and `run` sums the
    gradients over the replicas; the division prevents counting the loss several
    times.

    Args:
      regularization_loss: A scalar, an array or a list of them, such as
        `model.losses`.

    Returns:
      The sum of all entries, divided by the number of replicas.

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

"""Losses of a replica that add up to the global batch's."""

from typing import Any

import jax.numpy as jnp

from keras_strategies.strategy.current import get_strategy


def compute_average_loss(
    per_example_loss: Any,
    sample_weight: Any = None,
    global_batch_size: Any = None,
) -> Any:
    """Divides a sum of the rows' losses by the rows of the global batch.

    In `run` an optimizer sums the gradients over the replicas, so a replica's
    loss is its part of the global mean.

    Args:
      per_example_loss: The losses of a replica's rows, (rows, ...); from a
        loss with `reduction="none"`.
      sample_weight: Their weights, (rows,) or as the losses.
      global_batch_size: Rows of all replicas. Left out, it is the replica's
        rows times the number of replicas; give it where a last batch is not
        shared evenly.

    Returns:
      A scalar.

    Raises:
      ValueError: losses without rows.

    References:
      `tf.nn.compute_average_loss`.
    """
    losses = jnp.asarray(per_example_loss)
    if not losses.ndim:
        raise ValueError(
            "The losses of rows are needed, of shape (rows, ...). Received: "
            'a scalar. Make the loss with `reduction="none"`.'
        )
    if global_batch_size is None:
        count = get_strategy().num_replicas_in_sync
        global_batch_size = losses.shape[0] * count
    if sample_weight is not None:
        weight = jnp.asarray(sample_weight, losses.dtype)
        extra = losses.ndim - weight.ndim
        losses = losses * weight.reshape(*weight.shape, *[1] * extra)
    return jnp.sum(losses) / global_batch_size


def scale_regularization_loss(regularization_loss: Any) -> Any:
    """Divides a loss of the weights by the number of replicas.

    Every replica adds it, and gradients are summed in `run`.

    Args:
      regularization_loss: A scalar, an array or a list of them: `model.losses`.

    Returns:
      Their sum, by the number of replicas.

    References:
      `tf.nn.scale_regularization_loss`.
    """
    parts = regularization_loss
    if not isinstance(parts, list | tuple):
        parts = [parts]
    total = sum((jnp.sum(jnp.asarray(p)) for p in parts), jnp.zeros(()))
    return total / get_strategy().num_replicas_in_sync

"""What users say about their own losses."""

from typing import TypeVar

Loss = TypeVar("Loss")


def global_batch_loss(loss: Loss) -> Loss:
    """Marks a loss whose value for one row depends on other rows.

    Such a loss (contrastive, ranking, overlap over the batch) sees the
    gathered rows of all replicas, as Keras's Dice, Tversky and Circle do.
    Costs one gather of y and y_pred a step.

    Args:
      loss: A function `loss(y_true, y_pred)`, a `keras.losses.Loss` or a
        subclass of it; may be used as a decorator.

    Returns:
      The loss.

    Example:
      ```python
      @ks.global_batch_loss
      def spread(y_true, y_pred):
          return keras.ops.var(y_pred - y_true)
      ```
    """
    loss._ks_global_batch = True  # type: ignore[attr-defined]
    return loss

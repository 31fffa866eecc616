"""Marks user-defined losses that mix the rows of a batch."""

import functools
import inspect
from typing import Any, TypeVar

import keras

from keras_strategies._types import Array, Tree
from keras_strategies.hooks.gather_rows import (
    call_with_all_rows,
    note_rows,
)
from keras_strategies.keras_bridge.step_context import current_step

Loss = TypeVar("Loss")


def global_batch_loss(loss: Loss) -> Loss:
    """Marks a loss whose value for one row depends on other rows.

    Examples are contrastive and ranking losses, and losses that compute an
    overlap or a denominator over all rows of the batch. A marked loss receives
    the rows of all replicas, as Keras's Dice, Tversky and Circle losses do. For
    this, the loss's arguments are gathered from the replicas once per step.

    Args:
      loss: One of: a function of arrays whose first dimension is the rows,
        which is passed to `compile` or called in a `train_step`; a method of
        a model, such as `compute_loss`; a `keras.losses.Loss` object; or a
        subclass of `keras.losses.Loss`. Functions, methods and classes can be
        marked with `global_batch_loss` as a decorator.

    Returns:
      The same object if `loss` is a loss object or class; a wrapper if it is
      a function or method.

    Raises:
      TypeError: if `loss` is not a function, a method or a loss.

    Example:
      ```python
      @ks.global_batch_loss
      def spread(y_true, y_pred):
          return keras.ops.var(y_pred - y_true)

      with strategy.scope():
          model.compile("adam", spread)
      ```
    """
    is_class = inspect.isclass(loss)
    if not callable(loss) or (
        is_class and not issubclass(loss, keras.losses.Loss)
    ):
        raise TypeError(
            "`loss` must be a function or a `keras.losses.Loss`. "
            f"Received: {loss!r} of type {type(loss).__name__}. Pass a loss "
            "function, or a loss object or class instead of the loss's name."
        )
    marked: Any = loss
    if not is_class and not isinstance(loss, keras.losses.Loss):

        @functools.wraps(loss)
        def on_all_rows(*args: Tree, **kwargs: Tree) -> Array:
            step = current_step()
            if step is None or not step.sees_replica_rows:
                return loss(*args, **kwargs)
            name = getattr(loss, "__qualname__", type(loss).__name__)
            note_rows(step, (args, kwargs), f"marked function {name!r}")
            return call_with_all_rows(step, loss, *args, **kwargs)

        marked = on_all_rows
    marked._ks_global_batch = True
    return marked

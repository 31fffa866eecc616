"""Fit's callbacks, without the work for those that no batch concerns.

Keras hands the end of every batch to a thread, which fetches the logs and
calls the callbacks, also when none of them listens: a sixth of the time of a
small step (keras 3.15).
"""

from typing import Any

import keras

_HOOKS = ("on_batch_end", "on_train_batch_end")


class QuietCallbackList(keras.callbacks.CallbackList):
    """A list of callbacks none of which listens to the end of a batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Does nothing, and fetches no logs."""


def quiet_list(arguments: dict[str, Any], model: keras.Model, feed: Any) -> Any:
    """The list that fit would make of its callbacks, quiet if it can be.

    Args:
      arguments: Those given to fit, by name. `verbose` other than 0 asks for
        a progress bar, which listens.
      model: The model.
      feed: The training data.

    Returns:
      A list for fit to use as it is, or the callbacks as given.
    """
    callbacks = arguments.get("callbacks")
    given = keras.tree.flatten(callbacks) if callbacks else []
    has_own_loop = type(model).fit is not keras.Model.fit
    is_capped = keras.config.max_epochs() or keras.config.max_steps_per_epoch()
    if (
        arguments.get("verbose") != 0
        or has_own_loop
        or is_capped
        or any(map(listens, given))
    ):
        return callbacks
    return QuietCallbackList(
        callbacks,
        add_history=True,
        model=model,
        verbose=0,
        epochs=arguments["epochs"],
        steps=arguments["steps_per_epoch"] or feed.num_batches,
    )


def listens(callback: Any) -> bool:
    """Whether a callback wants to know of every batch's end."""
    if isinstance(callback, keras.callbacks.CallbackList):
        return True
    default = keras.callbacks.Callback
    # A hook may also be set on the instance, as LambdaCallback does.
    hooks = [getattr(callback, name) for name in _HOOKS]
    return [getattr(hook, "__func__", hook) for hook in hooks] != [
        getattr(default, name) for name in _HOOKS
    ]

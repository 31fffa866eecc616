"""Fit's callbacks, without the work for those that no batch concerns.

Keras hands the end of every batch to a thread, which fetches the logs and
calls the callbacks, also when none of them listens: a sixth of the time of a
small step (keras 3.15).

A callback that wants the logs of few steps says so with a method
`wants_batch(batch) -> bool`, asked at the end of every execution: its
`on_train_batch_end` is called when that is true, with logs that are fetched
then. In a list of Keras's own it is called every time.
"""

from typing import Any

import keras
from keras.src.utils.python_utils import pythonify_logs

_HOOKS = ("on_batch_end", "on_train_batch_end")


class QuietCallbackList(keras.callbacks.CallbackList):
    """A list of callbacks few of which listen to the end of a batch.

    Args:
      callbacks: The callbacks, as given to fit.
      is_quiet: Whether none listens but those that say when.
      **options: Those of Keras's list.
    """

    def __init__(
        self, callbacks: Any, *, is_quiet: bool = True, **options: Any
    ) -> None:
        self._is_quiet = is_quiet
        given = keras.tree.flatten(callbacks) if callbacks else []
        self._choosy = [c for c in given if _is_choosy(c)]
        super().__init__(callbacks, **options)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Fetches logs, and tells of the batch, where somebody listens."""
        if not self._is_quiet:
            super().on_train_batch_end(batch, logs)
        for callback in self._choosy:
            if callback.wants_batch(batch):
                callback.on_train_batch_end(batch, logs=pythonify_logs(logs))

    def _configure_async_dispatch(self, callbacks: Any) -> None:
        # Those that choose keep no other from being called in Keras's thread.
        given = keras.tree.flatten(callbacks) if callbacks else []
        others = [c for c in given if not _is_choosy(c)]
        super()._configure_async_dispatch(others)

    def _on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        logs = pythonify_logs(logs)
        for callback in self.callbacks:
            if not _is_choosy(callback):
                callback.on_train_batch_end(batch, logs=logs)


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
    verbose = arguments.get("verbose")
    has_own_loop = type(model).fit is not keras.Model.fit
    is_capped = keras.config.max_epochs() or keras.config.max_steps_per_epoch()
    is_list = any(isinstance(c, keras.callbacks.CallbackList) for c in given)
    is_quiet = verbose == 0 and not any(map(listens, given))
    if (
        has_own_loop
        or is_capped
        or is_list
        or not (is_quiet or any(map(_is_choosy, given)))
    ):
        return callbacks
    return QuietCallbackList(
        callbacks,
        is_quiet=is_quiet,
        add_history=True,
        add_progbar=verbose != 0,
        model=model,
        verbose=verbose,
        epochs=arguments["epochs"],
        steps=arguments["steps_per_epoch"] or feed.num_batches,
    )


def _is_choosy(callback: Any) -> bool:
    return hasattr(callback, "wants_batch")


def listens(callback: Any) -> bool:
    """Whether a callback wants to know of every batch's end."""
    if _is_choosy(callback):
        return False
    default = keras.callbacks.Callback
    # A hook may also be set on the instance, as LambdaCallback does.
    hooks = [getattr(callback, name) for name in _HOOKS]
    return [getattr(hook, "__func__", hook) for hook in hooks] != [
        getattr(default, name) for name in _HOOKS
    ]

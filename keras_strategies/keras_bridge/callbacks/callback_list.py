"""Callbacks of a loop, without the work for those that no batch concerns.

Keras hands the end of every batch to a thread, which fetches the logs and
calls the callbacks, also when none of them listens: a sixth of the time of a
small step (keras 3.15).

A callback that wants the logs of few training steps says so with a method
`wants_batch(batch) -> bool`, asked at the end of every execution: its
`on_train_batch_end` is called when that is true, with logs that are fetched
then. In a list of Keras's own it is called every time.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import keras
from keras.src.utils.python_utils import pythonify_logs

from keras_strategies._types import Callbacks, Logs

if TYPE_CHECKING:
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter

_LOOPS = {"fit": "train", "evaluate": "test", "predict": "predict"}
"""The loops, and what the hooks of their batches are named after."""

_HOOKS = {
    "train": ("on_batch_end", "on_train_batch_end"),
    "test": ("on_test_batch_end",),
    "predict": ("on_predict_batch_end",),
}


class QuietCallbackList(keras.callbacks.CallbackList):
    """A list of callbacks few of which listen to the end of a batch.

    Args:
      callbacks: The callbacks, as given to the loop.
      quiet: The kinds of batches to whose end nobody listens, but for those
        who say when; see `quiet_kinds`.
      **options: Those of Keras's list.
    """

    def __init__(
        self, callbacks: Callbacks, *, quiet: Collection[str], **options: Any
    ) -> None:
        self._quiet = quiet
        self._choosy = [c for c in _as_list(callbacks) if _is_choosy(c)]
        super().__init__(callbacks, **options)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Fetches logs and calls the callbacks, where one listens."""
        if "train" not in self._quiet:
            super().on_train_batch_end(batch, logs)
        for callback in self._choosy:
            if callback.wants_batch(batch):
                callback.on_train_batch_end(batch, logs=pythonify_logs(logs))

    def on_test_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Calls the callbacks, where one listens."""
        if "test" not in self._quiet:
            super().on_test_batch_end(batch, logs)

    def on_predict_batch_end(
        self, batch: int, logs: Logs | None = None
    ) -> None:
        """Calls the callbacks, where one listens."""
        if "predict" not in self._quiet:
            super().on_predict_batch_end(batch, logs)

    def _configure_async_dispatch(self, callbacks: Callbacks) -> None:
        # Those that choose keep no other from being called in Keras's thread.
        others = [c for c in _as_list(callbacks) if not _is_choosy(c)]
        super()._configure_async_dispatch(others)

    def _on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        logs = pythonify_logs(logs)
        for callback in self.callbacks:
            if not _is_choosy(callback):
                callback.on_train_batch_end(batch, logs=logs)


def quiet_list(
    loop: str,
    arguments: dict[str, Any],
    model: keras.Model,
    feed: "DataAdapter",
) -> Callbacks:
    """The list that a loop would make of its callbacks, quiet if it can be.

    Args:
      loop: `"fit"`, `"evaluate"` or `"predict"`.
      arguments: Those given to it, by name. `verbose` other than 0 asks for
        a progress bar, which listens.
      model: The model.
      feed: The data.

    Returns:
      A list for the loop to use as it is, or the callbacks as given.
    """
    callbacks = arguments.get("callbacks")
    given = _as_list(callbacks)
    verbose = arguments.get("verbose")
    is_capped = keras.config.max_epochs() or keras.config.max_steps_per_epoch()
    is_list = any(isinstance(c, keras.callbacks.CallbackList) for c in given)
    quiet = quiet_kinds(given, verbose)
    some_choose = loop == "fit" and any(map(_is_choosy, given))
    if is_capped or is_list or not (_LOOPS[loop] in quiet or some_choose):
        return callbacks
    steps = "steps_per_epoch" if loop == "fit" else "steps"
    return QuietCallbackList(
        callbacks,
        quiet=quiet,
        add_history=loop == "fit",
        add_progbar=verbose != 0,
        model=model,
        verbose=verbose,
        epochs=arguments["epochs"] if loop == "fit" else 1,
        steps=arguments[steps] or feed.num_batches,
    )


def quiet_kinds(callbacks: Sequence[Any], verbose: object) -> frozenset[str]:
    """The kinds of batches to whose end nobody listens.

    Args:
      callbacks: The callbacks; those that choose batches do not count.
      verbose: As given to the loop.

    Returns:
      Some of `"train"`, `"test"` and `"predict"`.
    """
    if verbose != 0:
        return frozenset()
    return frozenset(
        kind
        for kind in _HOOKS
        if not any(_listens(callback, kind) for callback in callbacks)
    )


def _as_list(callbacks: Callbacks) -> list[Any]:
    return keras.tree.flatten(callbacks) if callbacks else []


def _is_choosy(callback: object) -> bool:
    return hasattr(callback, "wants_batch")


def _listens(callback: keras.callbacks.Callback, kind: str) -> bool:
    """Whether a callback wants to know of every batch's end."""
    if kind == "train" and _is_choosy(callback):
        return False
    default = keras.callbacks.Callback
    # A hook may also be set on the instance, as LambdaCallback does.
    hooks = [getattr(callback, name) for name in _HOOKS[kind]]
    return [getattr(hook, "__func__", hook) for hook in hooks] != [
        getattr(default, name) for name in _HOOKS[kind]
    ]

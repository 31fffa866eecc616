"""Lists of callbacks that skip batch-end hooks that no callback implements.

At the end of every batch, Keras has a thread fetch the logs and call the
callbacks, even if no callback implements the hook. That takes a sixth of the
time of a small step (keras 3.15).

A callback that needs the logs of only a few training steps can define
`wants_batch(batch) -> bool`. It is called at the end of every execution. The
logs are fetched, and `on_train_batch_end` is called, only if it returns True.
If such a callback is in a list that Keras makes itself, `on_train_batch_end` is
called every time.

A `ReportCallback` adds its values to logs that are fetched for others.
"""

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
from keras.src.utils.python_utils import pythonify_logs

from keras_strategies._types import Callbacks, Logs
from keras_strategies.names.phases import CALLBACKS, DEVICE, Phase

if TYPE_CHECKING:
    from keras.src.trainers.data_adapters.data_adapter import DataAdapter

_logger = logging.getLogger(__name__)

_HOOKS = {
    "train": ("on_batch_end", "on_train_batch_end"),
    "test": ("on_test_batch_end",),
    "predict": ("on_predict_batch_end",),
}


class ReportCallback(keras.callbacks.Callback):
    """A callback that measures a fit, and adds what it measured to logs."""

    def add_logs(self, logs: dict[str, Any]) -> None:
        """Adds values to the logs of a step that other callbacks receive."""

    def close(self) -> None:
        """Ends the measurement; called when `fit` ends, by an error or not."""


def list_callbacks(callbacks: Callbacks) -> list[Any]:
    """Returns callbacks, and those in a `CallbackList`, as one list."""
    listed = []
    for callback in _flatten(callbacks):
        is_list = isinstance(callback, keras.callbacks.CallbackList)
        listed += callback.callbacks if is_list else [callback]
    return listed


def close_reports(callbacks: Callbacks) -> None:
    """Closes the reports among the callbacks of a fit."""
    for callback in list_callbacks(callbacks):
        if isinstance(callback, ReportCallback):
            try:
                callback.close()
            except Exception:
                # It must not replace the error that ends the fit.
                _logger.warning(
                    "A report of the fit was not closed.", exc_info=True
                )


class QuietCallbackList(keras.callbacks.CallbackList):
    """A list of callbacks that calls batch-end hooks only if they are needed.

    Args:
      call: The call of `fit`, `evaluate` or `predict`: `call[name]` is the
        argument `name`, or None if it was not given. If its `verbose` is not 0,
        there is a progress bar, which is updated at the end of every batch.
      model: The model.
      feed: The feed of the data.
    """

    def __init__(
        self, call: Any, model: keras.Model, feed: "DataAdapter"
    ) -> None:
        flat, verbose = _flatten(call["callbacks"]), call["verbose"]
        # The kinds of batches for which no callback implements the batch-end
        # hook.
        self._quiet = [
            kind
            for kind in _HOOKS
            if verbose == 0 and not any(_is_listening(c, kind) for c in flat)
        ]
        for kind in self._quiet:
            if kind != "train":
                setattr(self, _HOOKS[kind][-1], _ignore)
        self._selective = [c for c in flat if _is_selective(c)]
        self._reports = [c for c in flat if isinstance(c, ReportCallback)]
        steps = call["steps_per_epoch"] or call["steps"]
        super().__init__(
            call["callbacks"],
            add_history=call.name == "fit",
            add_progbar=verbose != 0,
            model=model,
            verbose=verbose,
            epochs=call.keywords.get("epochs", 1),
            steps=steps or feed.num_batches,
        )

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Calls the callbacks."""
        with Phase(CALLBACKS):
            super().on_epoch_begin(epoch, logs)

    def on_train_batch_begin(
        self, batch: int, logs: Logs | None = None
    ) -> None:
        """Calls the callbacks."""
        with Phase(CALLBACKS):
            super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Fetches the logs and calls the callbacks that need them, if any."""
        if "train" not in self._quiet:
            with Phase(CALLBACKS):
                super().on_train_batch_end(batch, logs)
        for callback in self._selective:
            if callback.wants_batch(batch):
                with Phase(CALLBACKS):
                    values = self._fetch_logs(logs)
                    callback.on_train_batch_end(batch, logs=values)

    def _configure_async_dispatch(self, callbacks: Callbacks) -> None:
        # Without this, a callback with `wants_batch` could make Keras call
        # all callbacks in the main thread.
        others = [c for c in _flatten(callbacks) if not _is_selective(c)]
        super()._configure_async_dispatch(others)

    def _on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        logs = self._fetch_logs(logs)
        for callback in self.callbacks:
            if not _is_selective(callback):
                callback.on_train_batch_end(batch, logs=logs)

    def _fetch_logs(self, logs: Logs | None) -> dict[str, Any]:
        with Phase(DEVICE):
            values = pythonify_logs(logs)
        for callback in self._reports:
            callback.add_logs(values)
        return values

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Calls the callbacks."""
        with Phase(DEVICE):
            values = pythonify_logs(logs)
        with Phase(CALLBACKS):
            super().on_epoch_end(epoch, values)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Calls the callbacks."""
        with Phase(CALLBACKS):
            super().on_train_end(logs)


def _ignore(batch: int, logs: Logs | None = None) -> None:
    """Replaces a hook that no callback implements."""


def set_quiet_list(call: Any, model: keras.Model, feed: "DataAdapter") -> None:
    """Puts the callbacks of a call into a `QuietCallbackList`.

    Nothing changes if they are in a list of Keras's, or if Keras caps the
    epochs or steps, and then makes the list.

    Args:
      call: See `QuietCallbackList`.
      model: The model.
      feed: The feed of the data.
    """
    is_capped = keras.config.max_epochs() or keras.config.max_steps_per_epoch()
    flat = _flatten(call["callbacks"])
    is_list = any(isinstance(c, keras.callbacks.CallbackList) for c in flat)
    if not (is_capped or is_list):
        call.set(callbacks=QuietCallbackList(call, model, feed))


def _flatten(callbacks: Callbacks) -> list[Any]:
    return keras.tree.flatten(callbacks) if callbacks else []


def _is_selective(callback: object) -> bool:
    return hasattr(callback, "wants_batch")


def _is_listening(callback: keras.callbacks.Callback, kind: str) -> bool:
    """Returns whether a callback implements the batch-end hook."""
    if kind == "train" and _is_selective(callback):
        return False
    return implements(callback, _HOOKS[kind])


def implements(
    callback: keras.callbacks.Callback, names: Sequence[str]
) -> bool:
    """Returns whether a callback implements any of some hooks."""
    default = keras.callbacks.Callback
    # A hook may also be an attribute of the instance, as in LambdaCallback.
    hooks = [getattr(callback, name) for name in names]
    return [getattr(hook, "__func__", hook) for hook in hooks] != [
        getattr(default, name) for name in names
    ]

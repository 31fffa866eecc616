"""Fits that a checkpoint callback saves and resumes.

`fit` calls the `CheckpointCallback` among its callbacks before the first epoch,
and after each step and epoch, when all other callbacks have been called. The
epochs and steps are run by Keras. If an earlier fit has already computed some
steps of the first epoch, the feed yields executions of zero steps in place of
these steps. Callbacks are not called for executions of zero steps.
"""

from typing import Any

import keras

from keras_strategies._types import Callbacks, Logs
from keras_strategies.fit.callbacks import callback_states
from keras_strategies.fit.callbacks.callback_list import (
    QuietCallbackList,
    list_callbacks,
)
from keras_strategies.fit.callbacks.fit_state import (
    FitState,
    fetch_logs,
)
from keras_strategies.names.phases import SAVE, Phase
from keras_strategies.step.step_functions import StepFunctionCache

_LOOP = "_ks_loop"


class CheckpointCallback(keras.callbacks.Callback):
    """A callback that saves the state a fit needs to resume."""

    def begin(self, loop: FitState) -> None:
        """Prepares for the training, once the model is built. Collective.

        The callback may restore the state of another fit into the model and
        into `loop`, which is the state of this fit.
        """

    def after_batch(self, loop: FitState) -> None:
        """Saves if a save is due, at the end of an execution. Collective."""

    def after_epoch(self, loop: FitState, logs: dict[str, Any]) -> None:
        """Saves if a save is due, after an epoch's validation. Collective."""

    def close(self, *, is_done: bool) -> None:
        """Cleans up when `fit` ends.

        Args:
          is_done: Whether the training finished; False if an error ended it.
        """

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Raises RuntimeError for a fit that this callback cannot save."""
        if not isinstance(getattr(self.model, _LOOP, None), FitState):
            name = getattr(self.model, "name", None)
            raise RuntimeError(
                f"`{type(self).__name__}` can only save the fit of a model "
                f"that a strategy distributes. Received: {name!r}, which was "
                "compiled outside a strategy's scope. Compile the model in "
                "`with ks.MirroredStrategy().scope():`, which also works with "
                "one device."
            )


class CheckpointingCallbackList(QuietCallbackList):
    """A list of callbacks that calls the checkpoint callback last.

    Args:
      loop: The state of the fit.
      checkpointer: The checkpoint callback, one of those of fit.
      call: The `Call` of fit.
    """

    def __init__(
        self, loop: FitState, checkpointer: CheckpointCallback, call: Any
    ) -> None:
        self._loop = loop
        self._checkpointer = checkpointer
        self._is_first = True
        self._values = [(v, v.value) for v in loop.variables]
        super().__init__(call, loop.model, loop.feed)
        loop.callbacks = [c for c in self.callbacks if c is not checkpointer]
        loop.settle = self._flush_futures

    def _restore(self) -> None:
        """Undoes changes that callbacks or Keras made to restored variables."""
        for variable, value in self._values:
            if variable.value is not value:
                variable.assign(value)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Begins training, and restores callbacks' states in a resumed fit."""
        loop = self._loop
        saved = loop.saved
        states = {} if saved is None else saved["callbacks"]
        with callback_states.resuming_logs(loop.callbacks, states):
            super().on_train_begin(logs)
        if saved is not None:
            loop.begin_training(saved)
            self._restore()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Begins an epoch.

        If the saved fit was in this epoch, the variables that callbacks change
        at its beginning are restored.
        """
        super().on_epoch_begin(epoch, logs)
        if self._loop.begin_epoch(epoch):
            self._restore()
        self._values = []

    def on_train_batch_begin(
        self, batch: int, logs: Logs | None = None
    ) -> None:
        """Begins a step, unless the saved fit has already computed it."""
        loop = self._loop
        if self._is_first and loop.step:
            per = loop.model.steps_per_execution
            if batch < loop.step // per * per:
                return
        self._is_first = False
        # The data ended before the epoch had all its steps.
        if loop.feed.is_pass_over:
            return
        super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Ends a step; calls the checkpoint callback last."""
        if not self._loop.count(logs):
            return
        super().on_train_batch_end(batch, logs)
        self._checkpointer.after_batch(self._loop)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Ends an epoch; calls the checkpoint callback last."""
        super().on_epoch_end(epoch, logs)
        self._loop.end_epoch(logs)
        self._checkpointer.after_epoch(self._loop, fetch_logs(logs) or {})

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Ends training; works even if no steps were left to run."""
        super().on_train_end(logs or self._loop.logs)


def run_resumable_fit(
    checkpointer: CheckpointCallback,
    call: Any,
    feed: Any,
    functions: StepFunctionCache,
) -> keras.callbacks.History:
    """Runs a fit with a checkpoint callback, and resumes a saved fit.

    Args:
      checkpointer: The checkpoint callback.
      call: The `Call` of fit.
      feed: The training data.
      functions: The cache of the model's step functions.

    Returns:
      The history that fit returns.
    """
    loop = FitState(functions=functions, feed=feed, call=call)
    model = functions.model
    loop.directory = getattr(checkpointer, "directory", None)
    object.__setattr__(model, _LOOP, loop)
    is_done = False
    try:
        checkpointer.begin(loop)
        callbacks = CheckpointingCallbackList(loop, checkpointer, call)
        call.set(initial_epoch=loop.first_epoch, callbacks=callbacks)
        history = call.run()
        is_done = True
        return history
    finally:
        model.__dict__.pop(_LOOP, None)
        with Phase(SAVE):
            checkpointer.close(is_done=is_done)


def find_fit_state(model: keras.Model) -> FitState | None:
    """Returns the state of a model's checkpointed fit while it runs."""
    return vars(model).get(_LOOP)


def find_checkpointer(callbacks: Callbacks) -> CheckpointCallback | None:
    """Returns the checkpoint callback among the callbacks of fit, or None.

    Raises:
      ValueError: if there are two checkpoint callbacks, or a checkpoint
        callback and a `BackupAndRestore`; or if the checkpoint callback is in
        a `CallbackList`.
    """
    flat = list_callbacks(callbacks)
    checkpointers = [c for c in flat if isinstance(c, CheckpointCallback)]
    if not checkpointers:
        return None
    rivals = [
        type(c).__name__
        for c in flat
        if isinstance(c, CheckpointCallback | keras.callbacks.BackupAndRestore)
    ]
    if len(rivals) > 1:
        raise ValueError(
            "Only one callback may decide where a fit resumes. Received: "
            f"{', '.join(rivals)}. Pass only one of them."
        )
    if checkpointers[0] not in keras.tree.flatten(callbacks):
        raise ValueError(
            f"`{type(checkpointers[0]).__name__}` must be called after all "
            "other callbacks. The order of a `CallbackList` is fixed. Pass a "
            "plain list of callbacks to `fit`."
        )
    return checkpointers[0]

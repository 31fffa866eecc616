"""A fit that a checkpoint callback saves, and that resumes.

fit asks the `CheckpointCallback` among its callbacks before the loop begins,
and calls it after each step and epoch, when all other callbacks are done. The
loop is Keras's own: for the steps of its first epoch that were computed in
another process, the feed gives it executions of none, which no callback sees.
"""

from typing import Any

import keras

from keras_strategies._types import Callbacks, Logs
from keras_strategies.keras_bridge.callbacks import callback_states
from keras_strategies.keras_bridge.callbacks.callback_list import (
    QuietCallbackList,
    quiet_kinds,
)
from keras_strategies.keras_bridge.callbacks.fit_state import FitState, numbers
from keras_strategies.keras_bridge.steps.step_functions import StepFunctionCache

_LOOP = "_ks_loop"


class CheckpointCallback(keras.callbacks.Callback):
    """A callback that saves what a fit needs to resume."""

    def begin(self, loop: FitState) -> None:
        """Called before the loop; the model is built. Collective.

        May give the model and the loop the state of another one.
        """
        raise NotImplementedError

    def after_batch(self, loop: FitState) -> None:
        """Called after a step, or the steps of one execution. Collective."""
        raise NotImplementedError

    def after_epoch(self, loop: FitState, logs: dict[str, Any]) -> None:
        """Called after an epoch and its validation. Collective."""
        raise NotImplementedError

    def close(self, *, is_done: bool) -> None:
        """Called when the loop has ended, by an error if not `is_done`."""
        raise NotImplementedError

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Refuses a fit that does not ask a checkpoint callback."""
        if not isinstance(getattr(self.model, _LOOP, None), FitState):
            name = getattr(self.model, "name", None)
            raise RuntimeError(
                f"`{type(self).__name__}` keeps the fit of a model that a "
                f"strategy distributes. Received: {name!r}, which "
                "was compiled outside a strategy's scope. Compile it in `with "
                "ks.MirroredStrategy().scope():`; one device will do."
            )


class KeptList(QuietCallbackList):
    """A fit's callbacks, and the checkpoint callback after all of them.

    Args:
      loop: The loop.
      checkpointer: One of the callbacks.
      callbacks: As given to fit.
      verbose: As given to fit.
      **params: What callbacks get as `params`.
    """

    def __init__(
        self,
        loop: FitState,
        checkpointer: CheckpointCallback,
        callbacks: Callbacks,
        *,
        verbose: object,
        **params: Any,
    ) -> None:
        self._loop = loop
        self._checkpointer = checkpointer
        self._is_first = True
        self._values = [(v, v.value) for v in loop.variables]
        others = [
            c for c in keras.tree.flatten(callbacks) if c is not checkpointer
        ]
        super().__init__(
            callbacks,
            quiet=quiet_kinds(others, verbose),
            add_history=True,
            add_progbar=verbose != 0,
            model=loop.model,
            verbose=verbose,
            **params,
        )
        loop.callbacks = [c for c in self.callbacks if c is not checkpointer]
        callback_states.warn_of_halves(loop.callbacks)
        loop.settle = self._flush_futures

    def _restore(self) -> None:
        """Sets variables again that callbacks, or Keras, have set."""
        for variable, value in self._values:
            if variable.value is not value:
                variable.assign(value)

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Called at the start; a resumed fit restores its callbacks' state."""
        loop = self._loop
        given = loop.given
        states = {} if given is None else given["callbacks"]
        opened = callback_states.resume_writing(loop.callbacks, states)
        super().on_train_begin(logs)
        for callback, append in opened:
            callback.append = append
        if given is None:
            self._values = []
            return
        loop.begin_training()
        self._restore()
        if loop.step == 0:
            self._values = []

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Begins an epoch; of one that is begun already nothing changes."""
        super().on_epoch_begin(epoch, logs)
        if self._loop.begin_epoch(epoch):
            self._restore()
        self._values = []

    def on_train_batch_begin(
        self, batch: int, logs: Logs | None = None
    ) -> None:
        """Begins a step, if it was not computed before."""
        loop = self._loop
        if self._is_first and loop.step:
            per = loop.model.steps_per_execution
            if batch < loop.step // per * per:
                return
        self._is_first = False
        # There are fewer rows than the epoch was to have steps of.
        if loop.feed.is_pass_over:
            return
        super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Ends a step; the checkpoint callback is last."""
        if not self._loop.count(logs):
            return
        super().on_train_batch_end(batch, logs)
        self._checkpointer.after_batch(self._loop)

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:
        """Ends an epoch; the checkpoint callback is last."""
        super().on_epoch_end(epoch, logs)
        self._loop.end_epoch(logs)
        self._checkpointer.after_epoch(self._loop, numbers(logs) or {})

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Ends; also a loop that had nothing left to do."""
        super().on_train_end(logs or self._loop.logs)


def resumable_fit(
    checkpointer: CheckpointCallback,
    call: Any,
    feed: Any,
    variables: list[keras.Variable],
    functions: StepFunctionCache,
) -> keras.callbacks.History:
    """Runs a fit that a callback checkpoints.

    Args:
      checkpointer: The callback.
      call: The call of fit: its arguments by name, `set` and `run`.
      feed: The training data.
      variables: All of the model, its optimizers and metrics.
      functions: The model's step functions.

    Returns:
      What fit returns.
    """
    loop = FitState(
        variables=variables, functions=functions, feed=feed, call=call
    )
    model = functions.model
    object.__setattr__(model, _LOOP, loop)
    is_done = False
    try:
        checkpointer.begin(loop)
        callbacks = KeptList(
            loop,
            checkpointer,
            call["callbacks"],
            verbose=call["verbose"],
            epochs=call["epochs"],
            steps=loop.steps_per_epoch,
        )
        call.set(initial_epoch=loop.first_epoch, callbacks=callbacks)
        history = call.run()
        is_done = True
        return history
    finally:
        model.__dict__.pop(_LOOP, None)
        checkpointer.close(is_done=is_done)


def loop_of(model: keras.Model) -> FitState | None:
    """The checkpointed fit of a model, while it is under way."""
    return vars(model).get(_LOOP)


def checkpointer_among(callbacks: Callbacks) -> CheckpointCallback | None:
    """The checkpoint callback among those given to fit, if there is one.

    Raises:
      ValueError: there are two, or one beside `BackupAndRestore`.
    """
    given, lists = [], []
    for callback in keras.tree.flatten(callbacks) if callbacks else []:
        is_list = isinstance(callback, keras.callbacks.CallbackList)
        lists += [callback] if is_list else []
        given += callback.callbacks if is_list else [callback]
    checkpointers = [c for c in given if isinstance(c, CheckpointCallback)]
    if not checkpointers:
        return None
    rivals = [
        type(c).__name__
        for c in given
        if isinstance(c, CheckpointCallback | keras.callbacks.BackupAndRestore)
    ]
    if len(rivals) > 1:
        raise ValueError(
            "One callback decides where a fit resumes. Received: "
            f"{', '.join(rivals)}. Leave all out but one."
        )
    if any(checkpointers[0] in one.callbacks for one in lists):
        raise ValueError(
            f"`{type(checkpointers[0]).__name__}` comes after all other "
            "callbacks. Received: a `CallbackList`, which has an order of its "
            "own. Pass fit a list."
        )
    return checkpointers[0]

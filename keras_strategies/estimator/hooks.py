"""Hooks: Keras callbacks here, where tf.estimator had SessionRunHooks."""

from collections.abc import Iterable
from typing import Any

from keras_strategies.cluster.addresses import shown

_OF_SESSIONS = ("begin", "after_create_session", "before_run", "after_run")
_OF_LISTENERS = ("begin", "before_save", "after_save", "end")
_CALLBACKS = {
    "CheckpointSaverHook": "`RunConfig(save_checkpoints_steps=...)`, or "
    "`ks.callbacks.Checkpoint` with plain `fit`",
    "CheckpointInputPipelineHook": "nothing: an interrupted run resumes at "
    "the next batch",
    "FeedFnHook": "an `input_fn` that yields the values",
    "FinalOpsHook": "a `keras.callbacks.Callback` with `on_train_end`",
    "GlobalStepWaiterHook": "nothing: all processes start together",
    "LoggingTensorHook": "`RunConfig(log_step_count_steps=...)` for loss and "
    "speed, or a `keras.callbacks.LambdaCallback` with `on_train_batch_end`",
    "NanTensorHook": "`keras.callbacks.TerminateOnNaN`",
    "ProfilerHook": "a `keras.callbacks.Callback` that calls "
    "`jax.profiler.start_trace` and `stop_trace`",
    "StepCounterHook": "`RunConfig(log_step_count_steps=...)`",
    "StopAtStepHook": "`max_steps` or `steps`",
    "SummarySaverHook": "`RunConfig(save_summary_steps=...)`, and metrics of "
    "the compiled model",
    "_StopOnPredicateHook": "`ks.estimator.experimental."
    "make_early_stopping_hook`",
    "_CheckForStoppingHook": "`ks.estimator.experimental."
    "make_early_stopping_hook`",
    "_MultiWorkerEarlyStoppingHook": "`ks.estimator.experimental."
    "make_early_stopping_hook`",
    "InMemoryEvaluatorHook": "`ks.estimator.experimental."
    "InMemoryEvaluatorHook`",
}
"""What to use instead of tf's hooks."""


def check_hooks(hooks: Any, name: str = "hooks") -> tuple[Any, ...]:
    """The hooks as a tuple.

    Args:
      hooks: Keras callbacks, or nothing.
      name: What the argument is called, for the error.

    Raises:
      TypeError: one is no Keras callback; for one of tf's it names what to
        use instead.
    """
    found = _as_tuple(hooks, name)
    if not found:
        return ()
    import keras

    for hook in found:
        if not isinstance(hook, keras.callbacks.Callback):
            raise TypeError(_refusal(hook, name))
    return found


def check_listeners(listeners: Any) -> tuple[Any, ...]:
    """The saving listeners as a tuple.

    Args:
      listeners: Objects with `begin`, `before_save`, `after_save` and `end`,
        as tf's `CheckpointSaverListener` has; or nothing.

    Raises:
      TypeError: one is none.
    """
    found = _as_tuple(listeners, "saving_listeners")
    for listener in found:
        missing = [
            name
            for name in _OF_LISTENERS
            if not callable(getattr(listener, name, None))
        ]
        if missing or isinstance(listener, type):
            raise TypeError(
                "All saving_listeners must be like `CheckpointSaverListener`. "
                f"Received: {shown(listener)} of type "
                f"{type(listener).__name__}, without "
                f"{', '.join(missing) or 'an instance'}. Derive it from "
                "`ks.estimator.CheckpointSaverListener`."
            )
    return found


class CheckpointSaverListener:
    """A listener of checkpoints while an Estimator trains; as tf's.

    Called in the chief. `session` is None: there is none.

    Example:
      ```python
      class Notes(ks.estimator.CheckpointSaverListener):
          def after_save(self, session, global_step_value):
              print("saved", global_step_value)

      estimator.train(input_fn, saving_listeners=[Notes()])
      ```
    """

    def begin(self) -> None:
        """Called before the first step."""

    def before_save(self, session: None, global_step_value: int) -> None:
        """Called before a checkpoint is written.

        Args:
          session: None.
          global_step_value: Training steps done.
        """

    def after_save(self, session: None, global_step_value: int) -> bool | None:
        """Called when a checkpoint is complete.

        Args:
          session: None.
          global_step_value: Training steps done.

        Returns:
          True to end the training.
        """

    def end(self, session: None, global_step_value: int) -> None:
        """Called at the end, after the last checkpoint.

        Args:
          session: None.
          global_step_value: Training steps done.
        """


def _as_tuple(values: Any, name: str) -> tuple[Any, ...]:
    if values is None:
        return ()
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(
            f"`{name}` is a list. Received: {shown(values)} of type "
            f"{type(values).__name__}. Put it in brackets: [{name[:-1]}]."
        )
    return tuple(values)


def _refusal(hook: Any, name: str) -> str:
    kind = type(hook)
    # An own hook derives from one of tf's, which may say what it is for.
    names = [parent.__name__ for parent in kind.__mro__]
    known = next((n for n in names if n in _CALLBACKS), None)
    if known is not None:
        cure = f"Instead of a {known} use {_CALLBACKS[known]}."
    elif any(callable(getattr(hook, n, None)) for n in _OF_SESSIONS):
        cure = (
            "There is no session to hook into: derive it from "
            "`keras.callbacks.Callback`; `begin` becomes `on_train_begin`, "
            "`before_run` `on_train_batch_begin`, `after_run` "
            "`on_train_batch_end`, `end` `on_train_end`, and "
            "`request_stop()` `self.model.stop_training = True`."
        )
    else:
        cure = "Derive it from `keras.callbacks.Callback`."
    return (
        f"All `{name}` must be `keras.callbacks.Callback` instances. "
        f"Received: {shown(hook)} of type {kind.__name__}. {cure}"
    )

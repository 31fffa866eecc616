"""Argument checks that Estimator, its specs and its hooks share."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from keras_strategies.estimator.seam import (
    check_number,
    check_type,
    shorten,
)

_OF_SESSIONS = ("begin", "after_create_session", "before_run", "after_run")
_OF_LISTENERS = ("begin", "before_save", "after_save", "end")
_CALLBACKS = {
    "CheckpointSaverHook": "`RunConfig(save_checkpoints_steps=...)`, or "
    "`ks.callbacks.Checkpoint` with plain `fit`",
    "CheckpointInputPipelineHook": "no hook, because an interrupted run "
    "resumes at the next batch",
    "FeedFnHook": "an `input_fn` that yields the values",
    "FinalOpsHook": "a `keras.callbacks.Callback` with `on_train_end`",
    "GlobalStepWaiterHook": "no hook, because all processes start together",
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
"""What to use instead of each TensorFlow hook, by the hook's class name."""


def check_kind(name: str, value: object, kind: type) -> None:
    """Raises TypeError unless an argument is an instance of a class."""
    public = f"ks.estimator.{kind.__name__}"
    fix = f"Create one: `{public}(...)`."
    check_type(f"`{name}`", value, kind, f"a `{public}`", fix)


def check_input_fn(input_fn: object) -> None:
    """Raises TypeError unless an `input_fn` is callable."""
    if not callable(input_fn):
        raise TypeError(
            f"`input_fn` must be callable. Received: {shorten(input_fn)} of "
            f"type {type(input_fn).__name__}. Wrap the data: "
            "`input_fn=lambda: (features, labels)`."
        )


def check_positive(name: str, value: object) -> None:
    """Raises an error unless a value is None or a positive integer.

    Raises:
      TypeError: if `value` is neither an integer nor None.
      ValueError: if `value` is 0 or less.
    """
    fix = "Pass 1 or more, or None for no limit."
    check_number(f"`{name}`", value, fix, above=0)


def check_seconds(name: str, value: object) -> None:
    """Raises an error unless a value is a non-negative number of seconds."""
    fix = "Pass a number of seconds, 0 or more."
    check_number(
        f"`{name}`", value, fix, minimum=0, is_whole=False, is_optional=False
    )


def check_name(name: str | None) -> None:
    """Raises an error unless a directory can be named after an evaluation.

    Raises:
      TypeError: if `name` is neither a str nor None.
      ValueError: if `name` contains a path separator or a null character.
    """
    if name is None:
        return
    fix = "Pass a name, such as 'test', or None."
    check_type("`name`", name, str, "a str", fix)
    if "/" in name or "\\" in name or "\0" in name:
        raise ValueError(
            "`name` must be a valid part of a directory's name. Received: "
            f"{shorten(name)}. Remove the slashes."
        )


def check_hooks(hooks: object, name: str = "hooks") -> tuple[Any, ...]:
    """Checks hooks and returns them as a tuple.

    Args:
      hooks: Keras callbacks, or None.
      name: The argument's name, for the error message.

    Raises:
      TypeError: if a hook is not a Keras callback. If it is a TensorFlow hook,
        the message says what to use instead.
    """
    checked = _as_tuple(hooks, name)
    if not checked:
        return ()
    import keras

    for hook in checked:
        if not isinstance(hook, keras.callbacks.Callback):
            raise TypeError(_explain_refusal(hook, name))
    return checked


def check_listeners(listeners: object) -> tuple[Any, ...]:
    """Checks saving listeners and returns them as a tuple.

    Args:
      listeners: Objects with the methods `begin`, `before_save`, `after_save`
        and `end`, like a `CheckpointSaverListener`; or None.

    Raises:
      TypeError: if one of these methods is missing from a listener, or if a
        listener is a class instead of an object.
    """
    checked = _as_tuple(listeners, "saving_listeners")
    for listener in checked:
        missing = [
            name
            for name in _OF_LISTENERS
            if not callable(getattr(listener, name, None))
        ]
        if missing or isinstance(listener, type):
            problem = f"without {', '.join(missing)}" if missing else "a class"
            raise TypeError(
                "All saving_listeners must be objects with the methods "
                f"{', '.join(_OF_LISTENERS)}. Received: {shorten(listener)} of "
                f"type {type(listener).__name__}, {problem}. Pass an instance "
                "of a subclass of `ks.estimator.CheckpointSaverListener`."
            )
    return checked


def find_argument_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of a function's arguments, as TensorFlow does.

    The names do not include `*args`, `**kwargs`, or arguments that a
    `functools.partial` sets. Objects with `__call__` are supported.
    """
    set_by_partial: set[str] = set()
    if isinstance(function, functools.partial):
        # `inspect.signature` includes the keyword arguments of a partial,
        # because a caller may override them. An Estimator must not do so.
        set_by_partial = {*function.keywords}
    kinds = (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    return tuple(
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in kinds and name not in set_by_partial
    )


def _as_tuple(values: object, name: str) -> tuple[Any, ...]:
    if values is None:
        return ()
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(
            f"`{name}` must be a list. Received: {shorten(values)} of type "
            f"{type(values).__name__}. Pass a list, such as [{name[:-1]}]."
        )
    return tuple(values)


def _explain_refusal(hook: object, name: str) -> str:
    kind = type(hook)
    # A user-defined hook may be a subclass of a TensorFlow hook that has a
    # replacement.
    names = [parent.__name__ for parent in kind.__mro__]
    known = next((n for n in names if n in _CALLBACKS), None)
    if known is not None:
        fix = f"Instead of `{known}`, use {_CALLBACKS[known]}."
    elif any(callable(getattr(hook, n, None)) for n in _OF_SESSIONS):
        fix = (
            "Hooks into sessions are not supported. Derive the hook from "
            "`keras.callbacks.Callback`, and rename its methods: `begin` to "
            "`on_train_begin`, `before_run` to `on_train_batch_begin`, "
            "`after_run` to `on_train_batch_end`, and `end` to "
            "`on_train_end`. Replace `request_stop()` with "
            "`self.model.stop_training = True`."
        )
    else:
        fix = "Derive the hook from `keras.callbacks.Callback`."
    return (
        f"All `{name}` must be `keras.callbacks.Callback` instances. "
        f"Received: {shorten(hook)} of type {kind.__name__}. {fix}"
    )

"""Checks of arguments that Estimator, its specs and its hooks share."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from keras_strategies.cluster.addresses import shown
from keras_strategies.cluster.checks import check_number, check_type

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


def check_kind(name: str, value: object, kind: type) -> None:
    """Raises TypeError for an argument that is not of a public class."""
    public = f"ks.estimator.{kind.__name__}"
    cure = f"Make one: `{public}(...)`."
    check_type(f"`{name}`", value, kind, f"a `{public}`", cure)


def check_input_fn(input_fn: object) -> None:
    """Raises TypeError for an `input_fn` that cannot be called."""
    if not callable(input_fn):
        raise TypeError(
            f"`input_fn` must be callable. Received: {shown(input_fn)} of "
            f"type {type(input_fn).__name__}. Wrap the data: "
            "`input_fn=lambda: (features, labels)`."
        )


def check_positive(name: str, value: object) -> None:
    """Raises unless a number of steps is None, or an integer above 0.

    Raises:
      TypeError: it is something else.
      ValueError: it is 0 or less.
    """
    cure = "Give 1 or more, or None for no limit."
    check_number(f"`{name}`", value, cure, above=0)


def check_seconds(name: str, value: object) -> None:
    """Raises unless it is a number of seconds, 0 or more."""
    cure = "Give a number of seconds, 0 for none."
    check_number(
        f"`{name}`", value, cure, least=0, is_whole=False, is_optional=False
    )


def check_name(name: str | None) -> None:
    """Raises unless an evaluation's name can be part of a folder's.

    Raises:
      TypeError: it is no str.
      ValueError: it has a separator of folders, or is "." or "..".
    """
    if name is None:
        return
    cure = "Give a name as 'test', or None."
    check_type("`name`", name, str, "a str", cure)
    if "/" in name or "\\" in name or "\0" in name:
        raise ValueError(
            "`name` becomes part of a folder's name. Received: "
            f"{shown(name)}. Leave out slashes."
        )


def check_hooks(hooks: object, name: str = "hooks") -> tuple[Any, ...]:
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


def check_listeners(listeners: object) -> tuple[Any, ...]:
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


def names_of_arguments(function: Callable[..., Any]) -> tuple[str, ...]:
    """The names under which a function takes arguments, as tf finds them.

    Sees through `functools.partial`, whose given arguments are left out, and
    objects with `__call__`. `*args` and `**kwargs` are no names.
    """
    given: set[str] = set()
    if isinstance(function, functools.partial):
        # A keyword can be given again; whoever gave it means it to stay.
        given = {*function.keywords}
    kinds = (
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    )
    return tuple(
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in kinds and name not in given
    )


def _as_tuple(values: object, name: str) -> tuple[Any, ...]:
    if values is None:
        return ()
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise TypeError(
            f"`{name}` is a list. Received: {shown(values)} of type "
            f"{type(values).__name__}. Put it in brackets: [{name[:-1]}]."
        )
    return tuple(values)


def _refusal(hook: object, name: str) -> str:
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

"""The states of Keras's callbacks, saved and restored.

A callback with `get_state` and `set_state` says it itself. Keras's have
neither: what counts of theirs is known here (keras 3.15).
"""

import logging
import os
from collections.abc import Iterable
from typing import Any

import keras

from keras_strategies.cluster.exchange import message_forms

_logger = logging.getLogger(__name__)

State = dict[str, Any]

_SAVING = ("best", "_batches_seen_since_last_saving", "_last_batch_seen")
_OWN = ("get_state", "set_state")

_ATTRIBUTES: tuple[tuple[type[Any], tuple[str, ...]], ...] = (
    (
        keras.callbacks.EarlyStopping,
        ("wait", "stopped_epoch", "best", "best_epoch", "best_weights"),
    ),
    (keras.callbacks.ReduceLROnPlateau, ("wait", "best", "cooldown_counter")),
    (keras.callbacks.ModelCheckpoint, _SAVING),
    (keras.callbacks.OrbaxCheckpoint, (*_SAVING, "_total_batches_seen")),
    (
        keras.callbacks.TensorBoard,
        ("_global_train_batch", "_global_test_batch"),
    ),
    (keras.callbacks.CSVLogger, ("keys",)),
    (keras.callbacks.SwapEMAWeights, ("_ema_weights_in_model",)),
    (keras.callbacks.History, ("epoch", "history")),
)


def states_of(callbacks: Iterable[Any]) -> dict[str, State]:
    """The states of callbacks, by name; those that have none are left out.

    Nests of what JSON can hold and of numpy arrays.
    """
    states = {n: _state_of(c) for n, c in _named(callbacks).items()}
    return {n: state for n, state in states.items() if state is not None}


def set_states(callbacks: Iterable[Any], states: dict[str, State]) -> None:
    """Gives callbacks their states, those that are there.

    Args:
      callbacks: As those of `states_of`, in the same order.
      states: What it returned.
    """
    for name, callback in _named(callbacks).items():
        if name in states:
            _set_state(callback, states[name])


def has_swapped_averages(states: object) -> bool:
    """Returns whether weights and averages are swapped (`SwapEMAWeights`).

    Args:
      states: What `states_of` returned, maybe of a file.
    """
    if not isinstance(states, dict):
        return False
    return any(
        name.partition("/")[0] == keras.callbacks.SwapEMAWeights.__name__
        and isinstance(state, dict)
        and state.get("_ema_weights_in_model") is True
        for name, state in states.items()
    )


def resume_writing(
    callbacks: Iterable[Any], states: dict[str, State]
) -> list[tuple[Any, bool]]:
    """Has loggers add to their files, whose later lines are removed.

    Before they open them. A `CSVLogger` would begin a new file.

    Returns:
      The loggers, each with the value of its `append`, to be set again once
      the files are open.
    """
    changed = []
    for name, callback in _named(callbacks).items():
        is_logger = isinstance(callback, keras.callbacks.CSVLogger)
        if not is_logger or name not in states:
            continue
        _check(callback, states[name], {"size": message_forms.is_count})
        changed.append((callback, callback.append))
        callback.append = True
        size, path = states[name]["size"], callback.filename
        if os.path.exists(path) and os.path.getsize(path) > size:
            os.truncate(path, size)
    return changed


def warn_of_halves(callbacks: Iterable[Any]) -> None:
    """Warns of callbacks that have `get_state` without `set_state`."""
    for callback in callbacks:
        missing = [n for n in _OWN if not callable(getattr(callback, n, None))]
        if len(missing) == 1:
            _logger.warning(
                "The state of a callback is saved if it has `get_state` and "
                "`set_state`. `%s` has no `%s`: its state is not saved. Give "
                "it both.",
                type(callback).__name__,
                missing[0],
            )


def _named(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Callbacks by their classes' names, numbered where there are several."""
    named: dict[str, Any] = {}
    for callback in callbacks:
        name = type(callback).__name__
        number = sum(key.partition("/")[0] == name for key in named)
        named[f"{name}/{number}" if number else name] = callback
    return named


def _state_of(callback: Any) -> State | None:
    if _has_own(callback):
        return callback.get_state()
    if isinstance(callback, keras.callbacks.CSVLogger):
        if callback.csv_file is None:
            return None
        if not callback.csv_file.closed:
            callback.csv_file.flush()
        return {
            "size": os.path.getsize(callback.filename),
            # Its columns are those of the first epoch that it has seen.
            "keys": callback.keys,
        }
    for kind, names in _ATTRIBUTES:
        if isinstance(callback, kind):
            return {n: getattr(callback, n) for n in names}
    return None


def _set_state(callback: Any, state: State) -> None:
    if _has_own(callback):
        callback.set_state(state)
        return
    for kind, names in _ATTRIBUTES:
        if isinstance(callback, kind):
            _check(callback, state, dict)
            for name in names:
                if name in state:
                    setattr(callback, name, state[name])
    if isinstance(callback, keras.callbacks.History):
        # What Keras does at the end of every epoch.
        model: Any = callback.model
        model.history = callback


def _check(callback: object, state: object, form: message_forms.Form) -> None:
    fault = message_forms.fault_of(state, form)
    if fault is not None:
        raise ValueError(
            "A callback resumes with the state that one of its kind had. "
            f"Received: a state of `{type(callback).__name__}` of which "
            f"{fault}. Use an earlier checkpoint."
        )


def _has_own(callback: object) -> bool:
    return all(callable(getattr(callback, name, None)) for name in _OWN)

"""The states of Keras's callbacks, saved and restored.

A callback may define `get_state` and `set_state`. Keras's callbacks do not, so
this module lists the attributes that make up their states (keras 3.15).
"""

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import keras

from keras_strategies.cluster.exchange import message_forms
from keras_strategies.spmd.identity import temporary_attribute

State = dict[str, Any]

_SAVING = ("best", "_batches_seen_since_last_saving", "_last_batch_seen")
_STATE_METHODS = ("get_state", "set_state")

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


def collect_states(callbacks: Iterable[Any]) -> dict[str, State]:
    """Returns the states of callbacks, by the callbacks' names.

    The states are nests of JSON values and NumPy arrays. Callbacks that have
    no state are omitted.
    """
    states = {n: _read_state(c) for n, c in _name_callbacks(callbacks).items()}
    return {n: state for n, state in states.items() if state is not None}


def set_states(callbacks: Iterable[Any], states: dict[str, State]) -> None:
    """Restores the states of those callbacks for which a state was saved.

    Args:
      callbacks: The same callbacks as given to `collect_states`, in the same
        order.
      states: The states that `collect_states` returned.
    """
    for name, callback in _name_callbacks(callbacks).items():
        if name in states:
            _set_state(callback, states[name])


def has_swapped_averages(states: object) -> bool:
    """Returns whether `SwapEMAWeights` had swapped the saved weights.

    Args:
      states: The states that `collect_states` returned, or that were read from
        a file. Any value is accepted.
    """
    if not isinstance(states, dict):
        return False
    return any(
        name.partition("/")[0] == keras.callbacks.SwapEMAWeights.__name__
        and isinstance(state, dict)
        and state.get("_ema_weights_in_model") is True
        for name, state in states.items()
    )


@contextlib.contextmanager
def resuming_logs(
    callbacks: Iterable[Any], states: dict[str, State]
) -> Iterator[None]:
    """Makes loggers that the block opens continue their files.

    Lines that were written after the state was saved are removed.
    """
    with contextlib.ExitStack() as stack:
        for name, callback in _name_callbacks(callbacks).items():
            if isinstance(callback, keras.callbacks.CSVLogger) and (
                name in states
            ):
                _check(callback, states[name], {"size": message_forms.is_count})
                size, path = states[name]["size"], callback.filename
                if os.path.exists(path) and os.path.getsize(path) > size:
                    os.truncate(path, size)
                append = temporary_attribute(callback, "append", True)
                stack.enter_context(append)
        yield


def _name_callbacks(callbacks: Iterable[Any]) -> dict[str, Any]:
    """Maps names to callbacks.

    The first callback of a class has the class's name, and the next ones have
    names such as "History/1".
    """
    named: dict[str, Any] = {}
    for callback in callbacks:
        name = type(callback).__name__
        number = sum(key.partition("/")[0] == name for key in named)
        named[f"{name}/{number}" if number else name] = callback
    return named


def _read_state(callback: Any) -> State | None:
    if _has_state_methods(callback):
        return callback.get_state()
    if isinstance(callback, keras.callbacks.CSVLogger):
        if callback.csv_file is None:
            return None
        if not callback.csv_file.closed:
            callback.csv_file.flush()
        # The columns of the file are those of the first logged epoch.
        size = os.path.getsize(callback.filename)
        return {"size": size, "keys": callback.keys}
    for kind, names in _ATTRIBUTES:
        if isinstance(callback, kind):
            return {n: getattr(callback, n) for n in names}
    return None


def _set_state(callback: Any, state: State) -> None:
    if _has_state_methods(callback):
        callback.set_state(state)
        return
    for kind, names in _ATTRIBUTES:
        if isinstance(callback, kind):
            _check(callback, state, dict)
            for name in names:
                if name in state:
                    setattr(callback, name, state[name])
    if isinstance(callback, keras.callbacks.History):
        # Keras does the same at the end of every epoch.
        model: Any = callback.model
        model.history = callback


def _check(callback: object, state: object, form: message_forms.Form) -> None:
    if not message_forms.has_form(state, form):
        raise ValueError(
            "A callback can only resume from the state of a callback of the "
            "same class. Received: an invalid state for "
            f"`{type(callback).__name__}`. Use an earlier checkpoint."
        )


def _has_state_methods(callback: object) -> bool:
    return all(
        callable(getattr(callback, name, None)) for name in _STATE_METHODS
    )

"""The forms of JSON messages, and the one reader of them."""

import dataclasses
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, TypeGuard

from keras_strategies.cluster.untrusted import load_json

Form = Any
"""What a value of JSON must be like:

- `int`, `str`, `bool`, `list`, `dict`: of that type exactly; `float`: an int,
  too; `None`: null; `object`: anything; a union of these: one of them;
- `[form]`: an array of such; `(form, form)`: an array of just these;
- `{"name": form}`: an object with these entries. One whose name ends in "?"
  may be missing, and others may be there;
- `Either((form, form))`: one of these;
- a function: what it is true for.
"""

MAX_MESSAGE = 64 << 20
"""The longest text of another process that is read."""

_MOST = 2**53


@dataclasses.dataclass(frozen=True)
class Either:
    """One of several forms."""

    forms: tuple[Form, ...]


def is_count(value: object) -> TypeGuard[int]:
    """A form: a whole number from 0 that a float can hold."""
    return type(value) is int and 0 <= value < _MOST


def fault_of(value: object, form: Form, name: str = "it") -> str | None:
    """Where a value has not its form, for a message; None if it has it.

    Args:
      value: What `load_json` gave.
      form: See `Form`.
      name: What the value is called.
    """
    if isinstance(form, dict):
        return _fault_of_entries(value, form, name)
    if isinstance(form, list):
        if not isinstance(value, list):
            return f"{name} is no array"
        return _first(value, form * len(value), name)
    if isinstance(form, tuple):
        if not isinstance(value, list) or len(value) != len(form):
            return f"{name} is no array of {len(form)}"
        return _first(value, form, name)
    if isinstance(form, Either):
        faults = [fault_of(value, one, name) for one in form.forms]
        return None if None in faults else faults[-1]
    return None if _is_simple(value, form) else f"{name} is another value"


def load_form(
    text: str | bytes, form: Form, *, max_characters: int, has_nan: bool = False
) -> Any:
    """Returns what a text of JSON says, if that has a form.

    Args:
      text: See `load_json`.
      form: See `Form`.
      max_characters: See `load_json`.
      has_nan: See `load_json`.

    Returns:
      The value, as `load_json` gives it.

    Raises:
      ValueError: it is something else. The message says what, as
        `load_json`'s.
    """
    value = load_json(text, max_characters=max_characters, has_nan=has_nan)
    fault = fault_of(value, form)
    if fault is not None:
        raise ValueError(fault)
    return value


def read_messages(
    texts: Sequence[str],
    form: Form,
    *,
    processes: Sequence[int],
    about: str,
    max_characters: int = MAX_MESSAGE,
) -> list[Any]:
    """The messages of processes to each other, as JSON of one form.

    Args:
      texts: What each has said.
      form: What each must be like.
      processes: Who said it, in the same order.
      about: What they talk about, for messages: "reading the data of `fit`".
      max_characters: The longest text that is read.

    Raises:
      RuntimeError: one has said something else. The message does not repeat
        it.
    """
    received: list[Any] = []
    for process, text in zip(processes, texts, strict=True):
        try:
            # Metrics, and what users keep, may be NaN.
            value = load_form(
                text, form, max_characters=max_characters, has_nan=True
            )
        except ValueError as error:
            raise RuntimeError(
                f"Processes tell each other about {about} in one form. "
                f"Received: a message of process {process}, of which {error}. "
                "Start all processes with one version of keras_strategies, "
                "and let no other program reach the job's port."
            ) from None
        received.append(value)
    return received


def _fault_of_entries(
    value: object, form: dict[str, Form], name: str
) -> str | None:
    if not isinstance(value, dict):
        return f"{name} is no object"
    for key, inner in form.items():
        entry = key.removesuffix("?")
        if entry in value:
            fault = fault_of(value[entry], inner, f"{name}[{entry!r}]")
        else:
            is_optional = key != entry
            fault = None if is_optional else f"{name} has no {entry!r}"
        if fault is not None:
            return fault
    return None


def _first(
    values: Sequence[Any], forms: Sequence[Form], name: str
) -> str | None:
    for index, (value, form) in enumerate(zip(values, forms, strict=True)):
        fault = fault_of(value, form, f"{name}[{index}]")
        if fault is not None:
            return fault
    return None


def _is_simple(value: object, form: Form) -> bool:
    if isinstance(form, UnionType):
        return any(_is_simple(value, one) for one in form.__args__)
    if form is None or form is type(None):
        return value is None
    if form is object:
        return True
    if isinstance(form, type):
        kinds = (int, float) if form is float else (form,)
        return type(value) in kinds
    is_such: Callable[[Any], object] = form
    return bool(is_such(value))

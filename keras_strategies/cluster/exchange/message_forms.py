"""Checks that JSON messages have the structure that a `Form` describes."""

import dataclasses
from collections.abc import Sequence
from types import UnionType
from typing import Any, TypeGuard

from keras_strategies.cluster.untrusted import load_json

Form = Any
"""The form of a JSON value, that is, a description of its structure:

- `int`, `str`, `bool`, `list` or `dict`: a value of exactly that type;
- `float`: a float or an int; `None`: null; `object`: any value;
- a union such as `int | str`: a value of one of these types;
- `[form]`: an array of any length, in which every value has the form;
- `(form_0, form_1)`: an array of two values with these forms, in this order;
- `{"name": form}`: an object with these entries. An entry whose name ends in
  "?" is optional, and further entries are allowed;
- `Either((form_0, form_1))`: a value that has one of these forms;
- a function: any value for which the function returns true.
"""

MAX_MESSAGE = 64 << 20
"""The maximum length of another process's text, in characters."""

_MAX = 2**53


@dataclasses.dataclass(frozen=True)
class Either:
    """A form that matches a value if at least one of several forms does."""

    forms: tuple[Form, ...]


def is_count(value: object) -> TypeGuard[int]:
    """Returns whether `value` is an int from 0 to 2**53 - 1.

    A float can represent all of these numbers exactly. The function can be
    used as a `Form`.
    """
    return type(value) is int and 0 <= value < _MAX


def load_form(
    text: str | bytes, form: Form, *, max_characters: int, has_nan: bool = False
) -> Any:
    """Parses JSON and checks that its structure matches a form.

    Args:
      text: See `load_json`.
      form: See `Form`.
      max_characters: See `load_json`.
      has_nan: See `load_json`.

    Returns:
      The value, as `load_json` returns it.

    Raises:
      ValueError: if the text is not JSON of this form. The message describes
        the problem, as `load_json`'s does.
    """
    value = load_json(text, max_characters=max_characters, has_nan=has_nan)
    if not has_form(value, form):
        raise ValueError("it has a wrong structure")
    return value


def read_messages(
    texts: Sequence[str],
    form: Form,
    *,
    processes: Sequence[int],
    about: str,
    max_characters: int = MAX_MESSAGE,
) -> list[Any]:
    """Parses the messages that processes sent to each other.

    Args:
      texts: The message of each process, as JSON.
      form: The `Form` that every message must have.
      processes: The numbers of the senders, in the order of `texts`.
      about: The subject for the error message, such as "reading the data of
        `fit`".
      max_characters: The length above which a text is rejected.

    Returns:
      The parsed messages, in the order of `texts`.

    Raises:
      RuntimeError: if a message does not have the form. The error message does
        not quote the text.
    """
    received: list[Any] = []
    for process, text in zip(processes, texts, strict=True):
        try:
            # NaN is allowed, because metrics and users' values may be NaN.
            value = load_form(
                text, form, max_characters=max_characters, has_nan=True
            )
        except ValueError as error:
            raise RuntimeError(
                f"The messages between processes about {about} must have the "
                "expected structure. Received: a message from process "
                f"{process}, with this problem: {error}. Use the same version "
                "of keras_strategies in all processes, and make sure that no "
                "other program can reach the job's port."
            ) from None
        received.append(value)
    return received


def has_form(value: Any, form: Form) -> bool:
    """Returns whether a JSON value has a form.

    Args:
      value: A value that `load_json` returned.
      form: See `Form`.
    """
    if isinstance(form, Either):
        return any(has_form(value, one) for one in form.forms)
    if isinstance(form, UnionType):
        return any(has_form(value, one) for one in form.__args__)
    if isinstance(form, dict):
        return isinstance(value, dict) and all(
            _has_entry(value, key, inner) for key, inner in form.items()
        )
    if isinstance(form, list | tuple):
        if not isinstance(value, list):
            return False
        forms = form * len(value) if isinstance(form, list) else form
        is_such = len(value) == len(forms)
        return is_such and all(map(has_form, value, forms))
    if form is None or form is type(None):
        return value is None
    if isinstance(form, type):
        kinds = (int, float) if form is float else (form,)
        return form is object or type(value) in kinds
    return bool(form(value))


def _has_entry(value: dict[str, Any], key: str, form: Form) -> bool:
    entry = key.removesuffix("?")
    if entry not in value:
        return key != entry
    return has_form(value[entry], form)

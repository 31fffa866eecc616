"""Checks that JSON messages have the structure that a `Form` describes."""

import dataclasses
from collections.abc import Callable, Sequence
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


def find_problem(value: object, form: Form, name: str = "it") -> str | None:
    """Describes the first mismatch between a JSON value and a form.

    Returns None if the value has the form.

    Args:
      value: A value that `load_json` returned.
      form: See `Form`.
      name: The value's name, for the returned text.
    """
    if isinstance(form, dict):
        return _find_entry_problem(value, form, name)
    if isinstance(form, list):
        if not isinstance(value, list):
            return f"{name} is not an array"
        return _find_first_problem(value, form * len(value), name)
    if isinstance(form, tuple):
        if not isinstance(value, list) or len(value) != len(form):
            return f"{name} is not an array of {len(form)} values"
        return _find_first_problem(value, form, name)
    if isinstance(form, Either):
        problems = [find_problem(value, one, name) for one in form.forms]
        return None if None in problems else problems[-1]
    return None if _is_simple(value, form) else f"{name} has a wrong value"


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
    problem = find_problem(value, form)
    if problem is not None:
        raise ValueError(problem)
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


def _find_entry_problem(
    value: object, form: dict[str, Form], name: str
) -> str | None:
    if not isinstance(value, dict):
        return f"{name} is not an object"
    for key, inner in form.items():
        entry = key.removesuffix("?")
        if entry in value:
            problem = find_problem(value[entry], inner, f"{name}[{entry!r}]")
        else:
            is_optional = key != entry
            problem = None if is_optional else f"{name} has no {entry!r}"
        if problem is not None:
            return problem
    return None


def _find_first_problem(
    values: Sequence[Any], forms: Sequence[Form], name: str
) -> str | None:
    for index, (value, form) in enumerate(zip(values, forms, strict=True)):
        problem = find_problem(value, form, f"{name}[{index}]")
        if problem is not None:
            return problem
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

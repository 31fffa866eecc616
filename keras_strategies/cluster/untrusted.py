"""Input from files, the environment and sockets, which is not trusted."""

import collections
import errno
import io
import json
import math
import os
import stat
from typing import Any, NoReturn

from keras_strategies.cluster.addresses import shown

MAX_DEPTH = 64
"""Levels of arrays and objects in each other."""


def load_json(
    text: str | bytes, *, max_characters: int, has_nan: bool = False
) -> Any:
    """What a text of JSON says; nothing else is done with it.

    Args:
      text: The text, or bytes of UTF-8.
      max_characters: The longest that is read.
      has_nan: Whether numbers may be NaN and infinite, as Python writes them.

    Returns:
      Dicts with keys of str, lists, str, int, finite float, bool and None,
      at most `MAX_DEPTH` levels deep.

    Raises:
      ValueError: it is something else. The message says what, and repeats
        nothing of the text but a key that it says twice, cut short.
    """
    if len(text) > max_characters:
        raise ValueError(
            f"it has {len(text)} characters, and at most {max_characters} "
            "are read"
        )
    try:
        # Python would take bytes for UTF-16 where they look like it.
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=float if has_nan else _refuse_constant,
            parse_float=_finite,
        )
    except json.JSONDecodeError as error:
        # Without its cause, which has the whole text as an attribute.
        fault = f"{error.msg} at line {error.lineno}, column {error.colno}"
    except UnicodeDecodeError:
        fault = "it is not UTF-8"
    except RecursionError:
        fault = _TOO_DEEP
    except _FaultError as error:
        fault = str(error)
    except ValueError:
        fault = "it has a number that is too long"
    else:
        if not _is_deeper(value, MAX_DEPTH):
            return value
        fault = _TOO_DEEP
    raise ValueError(fault)


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Opens a file for reading, if it is a file or a link to one.

    A pipe is not waited for, and of a device nothing is read.

    Raises:
      OSError: it is something else, or cannot be opened.
    """
    return open(path, "rb", opener=_open_if_regular)


def _open_if_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it must be a file", path)


def printable(text: str, *, keeps: str = "") -> str:
    """Returns a text with its control characters escaped, as `ascii` does.

    Args:
      text: What is to be printed on a terminal.
      keeps: Characters that stay: "\\n" where a text has lines.
    """
    return "".join(
        c if c.isprintable() or c in keeps else ascii(c)[1:-1] for c in text
    )


_TOO_DEEP = "it is nested too deeply"


class _FaultError(ValueError):
    """What is wrong, for a message."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        name = counts.most_common(1)[0][0]
        raise _FaultError(f"it says the key {shown(name)} twice")
    return found


def _refuse_constant(name: str) -> NoReturn:
    raise _FaultError(f"{name} is no number of JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _FaultError("it has a number that is too large")
    return value


def _is_deeper(value: object, most: int) -> bool:
    level = [value]
    for _ in range(most):
        level = [
            item
            for inner in level
            if isinstance(inner, list | dict)
            for item in (inner.values() if isinstance(inner, dict) else inner)
        ]
        if not level:
            return False
    return any(isinstance(inner, list | dict) for inner in level)

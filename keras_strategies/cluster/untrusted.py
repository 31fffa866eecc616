"""Safe readers of untrusted input from files, the environment and sockets."""

import collections
import errno
import io
import json
import math
import os
import stat
from typing import Any

from keras_strategies.cluster.addresses import shorten

MAX_DEPTH = 64
"""The maximum nesting of arrays and objects."""


def load_json(
    text: str | bytes, *, max_characters: int, has_nan: bool = False
) -> Any:
    """Parses untrusted JSON, with limits on its length and nesting depth.

    Args:
      text: The text, as a str or as UTF-8 bytes.
      max_characters: The length above which the text is rejected.
      has_nan: Whether `NaN` and `Infinity` are accepted as numbers. Python's
        `json` writes them, although they are not valid JSON.

    Returns:
      The value, made of dicts with str keys, lists, str, int, float, bool and
      None, nested at most `MAX_DEPTH` levels deep. Floats are finite unless
      `has_nan` is True.

    Raises:
      ValueError: if the text is not JSON, or exceeds a limit. The message
        describes what is wrong. It quotes nothing from the text except a
        duplicate key, which is truncated.
    """
    if len(text) > max_characters:
        raise ValueError(
            f"it has {len(text)} characters, more than the maximum of "
            f"{max_characters}"
        )
    try:
        # Decoded here, because `json.loads` would also accept UTF-16.
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        value = json.loads(text, object_pairs_hook=_make_dict)
    except json.JSONDecodeError as error:
        # The ValueError below is raised outside this block, so that it does
        # not carry this error, whose attribute `doc` is the entire text.
        problem = f"{error.msg} at line {error.lineno}, column {error.colno}"
    except UnicodeDecodeError:
        problem = "it is not UTF-8"
    except RecursionError:
        problem = _TOO_DEEP
    except _ProblemError as error:
        problem = str(error)
    except ValueError:
        problem = "it has a number that is too long"
    else:
        problem = _find_problem(value, has_nan)
        if not problem:
            return value
    raise ValueError(problem)


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Opens a regular file, or a symbolic link to one, for reading.

    Raises an error for a pipe, without blocking, and for a device, without
    reading from it.

    Raises:
      OSError: if the path is not a regular file, or cannot be opened.
    """
    return open(path, "rb", opener=_open_if_regular)


def _open_if_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it must be a regular file", path)


def escape_controls(text: str, *, keeps: str = "") -> str:
    """Returns a text with its control characters escaped, as `ascii` does.

    Args:
      text: The text, which will be printed on a terminal.
      keeps: Characters to leave unescaped, such as newlines.
    """
    return "".join(
        c if c.isprintable() or c in keeps else ascii(c)[1:-1] for c in text
    )


_TOO_DEEP = "it is nested too deeply"


class _ProblemError(ValueError):
    """An error whose message describes what is wrong with the text."""


def _make_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        counts = collections.Counter(name for name, _ in pairs)
        name = counts.most_common(1)[0][0]
        raise _ProblemError(f"it contains the key {shorten(name)} twice")
    return entries


def _find_problem(value: object, has_nan: bool) -> str:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        for item in level:
            if isinstance(item, float) and not (has_nan or math.isfinite(item)):
                return "it has a number that is not finite"
        containers = [item for item in level if isinstance(item, list | dict)]
        if not containers:
            return ""
        level = [
            item
            for inner in containers
            for item in (inner.values() if isinstance(inner, dict) else inner)
        ]
    return _TOO_DEEP

"""User code apart from this package: on stacks, and in child processes."""

import functools
import itertools
import pathlib
import sys
import sysconfig
import types
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

_OURS = str(PurePath(__file__).parents[1])
# A file whose path contains one of these is not user code.
_LIBRARIES = ("site-packages", "dist-packages", sysconfig.get_path("stdlib"))


def list_frames(thread: int | None) -> list[types.FrameType]:
    """Lists the frames of a thread's stack, the innermost first.

    The thread may run between two instructions of Python code, and then CPython
    3.11 can return another object as a frame's `f_back`. So only C code reads
    the stack.

    Args:
      thread: The thread's identifier.
    """
    read: Any = getattr
    stacks = itertools.starmap(sys._current_frames, [()])
    innermost: Iterator[Any] = map(dict.get, stacks, [thread])
    names = itertools.repeat("f_back")
    frames = itertools.accumulate(itertools.chain(innermost, names), read)
    return list(itertools.takewhile(bool, frames))


def locate_frame(frames: Sequence[types.FrameType]) -> str:
    """Returns a position on a stack, such as "train.py:42 in on_batch_end".

    This is the innermost line of user code. If there is no user code on the
    stack, it is the innermost line of any code.

    Args:
      frames: The frames of the stack, the innermost first.
    """
    users = (f for f in frames if is_user_code(f.f_code.co_filename))
    for frame in itertools.chain(users, frames):
        code = frame.f_code
        return format_position(code.co_filename, frame.f_lineno, code.co_name)
    return ""


def format_position(file: str, line: int, function: str) -> str:
    """Returns a position as text, such as "train.py:42 in on_batch_end"."""
    return f"{PurePath(file).name}:{line} in {function}"


@functools.lru_cache(maxsize=4096)
def is_user_code(file: str) -> bool:
    """Returns whether a file is user code, not a library or this package."""
    if file.startswith((_OURS, "<frozen")):
        return False
    return not any(name in file for name in _LIBRARIES)


_DIRECTORY = str(pathlib.Path(__file__).parents[2])
# The directory that contains this package is added to the end of Python's
# import path, because the directory's other packages must not shadow those
# found earlier.
_PROGRAM = """
import sys
sys.path.append({directory!r})
from {module} import main
sys.exit(main(*sys.argv[1:]))
"""


def make_command_line(module: str, *words: str) -> list[str]:
    """Returns the command line of a process that calls a module's `main`.

    The option `-P` keeps the current directory off Python's import path. With
    `-c` alone, the current directory would come first in the path, and a file
    in it could shadow a module of the same name.

    Args:
      module: The module's full name.
      words: The arguments of `main`.
    """
    code = _PROGRAM.format(directory=_DIRECTORY, module=module)
    return [sys.executable, "-P", "-c", code, *words]

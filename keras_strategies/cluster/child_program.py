"""Command lines for child processes that run a module of this package."""

import pathlib
import sys

_FOLDER = str(pathlib.Path(__file__).parents[2])
# The folder that contains this package is added to the end of Python's import
# path, because the folder's other packages must not shadow those found earlier.
_PROGRAM = """
import sys
sys.path.append({folder!r})
from {module} import main
sys.exit(main(*sys.argv[1:]))
"""


def make_command_line(module: str, *words: str) -> list[str]:
    """Returns the command line of a process that calls a module's `main`.

    The option `-P` keeps the current folder off Python's import path. With
    `-c` alone, the current folder would come first in the path, and a file in
    it could shadow a module of the same name.

    Args:
      module: The module's full name.
      words: The arguments of `main`.
    """
    code = _PROGRAM.format(folder=_FOLDER, module=module)
    return [sys.executable, "-P", "-c", code, *words]

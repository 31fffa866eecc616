"""Command lines of Python processes that run a module of this package."""

import pathlib
import sys

_FOLDER = str(pathlib.Path(__file__).parents[2])
# Appended to the path: the folder may contain many other packages.
_PROGRAM = """
import sys
sys.path.append({folder!r})
from {module} import main
sys.exit(main(*sys.argv[1:]))
"""


def make_command_line(module: str, *words: str) -> list[str]:
    """Returns the command line of a process that calls a module's `main`.

    `-P` keeps the current folder off the path, where `-m` and `-c` would put
    it first: files there may have the names of modules.

    Args:
      module: The module's full name.
      words: The arguments of `main`.
    """
    code = _PROGRAM.format(folder=_FOLDER, module=module)
    return [sys.executable, "-P", "-c", code, *words]

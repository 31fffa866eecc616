"""The command line of a Python process that runs one of our modules."""

import pathlib
import sys

_FOLDER = str(pathlib.Path(__file__).parents[2])
# At the end of the path: the folder may be one of many packages.
_PROGRAM = """
import sys
sys.path.append({folder!r})
from {module} import main
sys.exit(main(*sys.argv[1:]))
"""


def command_line(module: str, *words: str) -> list[str]:
    """Returns the command line of a process that calls a module's `main`.

    Without the current folder on its path (`-P`), which `-m` and `-c` put
    first: files there may have the names of modules.

    Args:
      module: The module's full name.
      words: The arguments of `main`.
    """
    code = _PROGRAM.format(folder=_FOLDER, module=module)
    return [sys.executable, "-P", "-c", code, *words]

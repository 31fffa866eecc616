"""The dry run of a script, which ends before the first training step.

A plan runs a script without its devices, its job and its files. Modules that
would use them ask the object that `get` returns instead, a `Capture` of
`planning`.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

_current: Any = None


def get() -> Any:
    """Returns this process's dry run, or None in an ordinary run."""
    return _current


def find_mesh(
    find: Callable[[], Any], assignment: Any = None, partitioner: Any = None
) -> Any:
    """Returns the mesh that `find` returns, or the mesh of a dry run."""
    if _current is None:
        return find()
    return _current.make_mesh(assignment, partitioner)


@contextlib.contextmanager
def running(dry_run: Any) -> Iterator[None]:
    """Makes all threads of the process run dry while the block runs."""
    global _current
    before, _current = _current, dry_run
    try:
        yield
    finally:
        _current = before

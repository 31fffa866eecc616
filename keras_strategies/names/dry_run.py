"""Dry runs of scripts, which end before the first training step.

A plan runs a script without its devices, its job and its files. The modules
that would use them ask the object that `get` returns instead.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol


class DryRun(Protocol):
    """The answers of a dry run. The types are those of the asking modules."""

    devices: Sequence[Any]
    """The devices that take the place of the process's devices."""

    def make_mesh(self, assignment: Any, partitioner: Any) -> Any:
        """Returns the mesh for a strategy that has passed an assignment."""
        ...

    def lay_out(
        self, mesh: Any, layout_map: Any, partitioner: Any
    ) -> tuple[Any, Any, Any]:
        """Returns the mesh, layout map and partitioner that a strategy uses."""
        ...

    def make_runner(self, strategy: Any, mesh: Any) -> Any:
        """Returns the object that implements a strategy's `run`."""
        ...

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Returns a context that strategies enter within their scopes."""
        ...

    def distribute(
        self, strategy: Any, data: Any, *, is_function: bool = False
    ) -> Any:
        """Distributes a dataset, or the one that a function returns."""
        ...

    def make_values(self, strategy: Any, value_fn: Callable[..., Any]) -> Any:
        """Implements `experimental_distribute_values_from_function`."""
        ...

    def bind(self, binding: Any) -> Any:
        """Returns an object that has `_fit` etc. in place of a binding."""
        ...


_current: DryRun | None = None


def get() -> DryRun | None:
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
def running(dry_run: DryRun) -> Iterator[None]:
    """Makes all threads of the process run dry while the block runs."""
    global _current
    before, _current = _current, dry_run
    try:
        yield
    finally:
        _current = before

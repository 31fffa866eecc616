"""The step that this thread is tracing for one of several replicas."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class _Current(threading.local):
    step: Any = None


_current = _Current()


def current_step() -> Any:
    """The `StepContext` that this thread is tracing, or None."""
    return _current.step


@contextlib.contextmanager
def step_scope(step: Any) -> Iterator[None]:
    """Makes `step` this thread's step while the block runs."""
    before = _current.step
    _current.step = step
    try:
        yield
    finally:
        _current.step = before

"""Temporary values of attributes, such as this thread's current step."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def temporary_attribute(
    owner: object, name: str, value: object
) -> Iterator[None]:
    """Sets an attribute while a `with` block runs, then restores it."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


class _Current(threading.local):
    step: Any = None


_current = _Current()


def current_step() -> Any:
    """Returns the step that this thread is tracing.

    Returns:
      A `StepContext` (a class of a higher layer), or None outside of a trace.
    """
    return _current.step


def step_scope(step: object) -> contextlib.AbstractContextManager[None]:
    """Makes `step` this thread's current step while a `with` block runs."""
    return temporary_attribute(_current, "step", step)

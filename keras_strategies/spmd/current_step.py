"""The step that the current thread is tracing."""

import contextlib
import threading
from typing import Any

from keras_strategies.spmd.attributes import temporary_attribute


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

"""The step that this thread is tracing for one of several replicas."""

import contextlib
import threading
from typing import Any

from keras_strategies._core.attributes import attribute_set


class _Current(threading.local):
    step: Any = None


_current = _Current()


def current_step() -> Any:
    """The `StepContext` that this thread is tracing, or None.

    Returns:
      A `StepContext`, which is of a layer above, or None outside of traces.
    """
    return _current.step


def step_scope(step: object) -> contextlib.AbstractContextManager[None]:
    """Makes `step` this thread's step while the block runs."""
    return attribute_set(_current, "step", step)

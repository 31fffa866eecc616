"""Phases of training, such as reading a batch, whose times are recorded.

Code marks what it does by `with Phase(INPUT):`. Nothing is measured unless a
recorder listens (`ks.callbacks.RunReport`).
"""

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol

INPUT = "input"
"""A training loop waits for its next batch. The result is an `Execution` in
`fit`, else a distributed batch."""

READ = "read"
"""This process reads its rows, in any thread."""

PROGRAM = "program"
"""A program is started; the result is that of the program, or None."""

EVALUATE = "evaluate"
"""A model is evaluated, or predicts."""

DEVICE = "device"
"""A training loop waits until programs that it started have ended."""

SAVE = "save"
"""A training loop waits for a checkpoint. The result is its step; None if an
earlier one is awaited."""

CALLBACKS = "callbacks"
"""Callbacks run in the thread of the training loop."""

REPORT = "report"
"""A report of the loop works; this is no part of the loop's time."""


class Recorder(Protocol):
    """An object that is called when phases begin and end, in any thread."""

    def begin(self, name: str) -> None:
        """Records that a phase begins."""

    def end(self, name: str, result: Any) -> None:
        """Records that a phase ends, by an error or not."""


_recorders: tuple[Recorder, ...] = ()


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Calls a recorder for the phases of all threads while the block runs."""
    global _recorders
    _recorders = (*_recorders, recorder)
    try:
        yield
    finally:
        _recorders = tuple(r for r in _recorders if r is not recorder)


class Phase:
    """A context manager that marks a phase.

    Args:
      name: One of this module's names.

    Attributes:
      result: The phase's result, for recorders; the block sets it.
    """

    __slots__ = ("_name", "_recorders", "result")

    def __init__(self, name: str) -> None:
        self._name = name
        self.result: Any = None

    def __enter__(self) -> "Phase":
        # A recorder that starts in the block sees neither begin nor end.
        self._recorders = _recorders
        for recorder in self._recorders:
            recorder.begin(self._name)
        return self

    def __exit__(self, *error: object) -> None:
        for recorder in self._recorders:
            recorder.end(self._name, self.result)

"""The notice of preemption (SIGTERM), for what saves before the end."""

import signal
import threading
import types
from typing import Any

from keras_strategies.cluster.watchdog.progress import Progress


class PreemptionNotice:
    """Whether this process must end (SIGTERM), while the context is open.

    A process of a job learns it together with all others: `came` turns
    true in all before the same program, and so between the same steps. One
    that is alone has a handler of SIGTERM, if this is its main thread.

    Args:
      progress: The programs of this process of a job; None where there are
        no others.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._came = False
        self._previous: Any = None
        self._is_installed = False

    def __enter__(self) -> "PreemptionNotice":
        if self._progress is not None:
            self._progress.num_savers += 1
        elif threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
            self._is_installed = True
        return self

    def __exit__(self, *error: Any) -> None:
        if self._progress is not None:
            self._progress.num_savers -= 1
        elif self._is_installed:
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
            self._is_installed = False

    @property
    def came(self) -> bool:
        """Whether to save, and to raise `exits.Preempted`."""
        if self._progress is not None:
            return self._progress.was_preempted
        return self._came

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        self._came = True
        if callable(self._previous):
            self._previous(number, frame)

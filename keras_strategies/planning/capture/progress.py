"""Progress of a plan without a terminal, and interruptions by signals."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO


class Progress:
    """Writes lines to a file, unless it is a terminal, which shows a table.

    Args:
      file: The file, such as `sys.stderr`.
      clock: A function that returns the time in seconds.
    """

    def __init__(
        self, file: TextIO, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._file = None if file.isatty() else file
        self._clock = clock
        self._last, self._wait = clock(), 60.0

    def write(self, text: str) -> None:
        """Writes a line."""
        self._last = self._clock()
        if self._file is not None:
            # The reader of a pipe may have ended.
            with contextlib.suppress(OSError):
                print(f"keras-strategies plan: {text}", file=self._file)
                self._file.flush()

    def remind(self, text: str) -> None:
        """Writes a line if none was written for long; each time for longer."""
        if self._clock() - self._last >= self._wait:
            self._wait *= 2
            self.write(text)


@contextlib.contextmanager
def first_signal() -> Iterator[list[int]]:
    """Stores the first SIGINT or SIGTERM; a second one ends the process.

    Stores nothing outside of the main thread, which cannot handle signals. A
    SIGINT that is ignored, as in a background job of a shell script, stays
    ignored.

    Yields:
      A list to which the signal's number is added when it is received.
    """
    received: list[int] = []
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {
            number: signal.getsignal(number)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
    if before.get(signal.SIGINT) == signal.SIG_IGN:
        del before[signal.SIGINT]

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def store(number: int, frame: object) -> None:
        received.append(number)
        restore()

    for number in before:
        signal.signal(number, store)
    try:
        yield received
    finally:
        restore()

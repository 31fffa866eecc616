"""Progress of a plan without a terminal, and interruptions by signals."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

_FIRST_WAIT_SECONDS = 60.0


class Progress:
    """Writes a line when a candidate starts, ends, or takes long.

    Args:
      num_candidates: The number of candidates.
      file: The file to write to, such as `sys.stderr`. Nothing is written to a
        terminal, where the plan shows a table.
      clock: A function that returns the time in seconds.
    """

    def __init__(
        self,
        num_candidates: int,
        file: TextIO,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._num_candidates = num_candidates
        self._file = None if file.isatty() else file
        self._clock = clock
        self._starts: dict[str, float] = {}
        self._last, self._wait = clock(), _FIRST_WAIT_SECONDS

    def update(self, running: Sequence[str], num_done: int) -> None:
        """Writes what has changed since the last call.

        Args:
          running: The names of the candidates that are being planned.
          num_done: The number of candidates that are done.
        """
        now = self._clock()
        count = f"{num_done} of {self._num_candidates} done"
        for name in [n for n in self._starts if n not in running]:
            seconds = now - self._starts.pop(name)
            self._write(f"{name} took {seconds:.0f} s ({count})")
        for name in [n for n in running if n not in self._starts]:
            self._starts[name] = now
            self._write(f"planning {name} ({count})")
        if running and now - self._last >= self._wait:
            self._wait *= 2
            self._write(f"still planning {', '.join(running)} ({count})")

    def _write(self, text: str) -> None:
        self._last = self._clock()
        if self._file is not None:
            # The reader of a pipe may have ended.
            with contextlib.suppress(OSError):
                print(f"keras-strategies plan: {text}", file=self._file)
                self._file.flush()


class Interruption:
    """The first SIGINT or SIGTERM that the process has received.

    Attributes:
      signal: The signal's number, or None.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Stores the first signal while the block runs; a second one ends it.

        Does nothing outside of the main thread, which cannot handle signals. A
        SIGINT that is ignored, as in a background job of a shell script, stays
        ignored.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: Mapping[int, Any] = {
            number: signal.getsignal(number)
            for number in (signal.SIGINT, signal.SIGTERM)
            if number == signal.SIGTERM
            or signal.getsignal(number) != signal.SIG_IGN
        }

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def store(number: int, frame: object) -> None:
            self.signal = number
            restore()

        for number in before:
            signal.signal(number, store)
        try:
            yield
        finally:
            restore()

"""Threads of a script that is planned."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from keras_strategies._core.attributes import attribute_set

_SECONDS = 60.0
_STEP_SECONDS = 0.05


class ScriptThreads:
    """The threads of a script.

    Attributes:
      error: What the first of them raised that did; None: none did.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """In which their errors are kept."""
        told = threading.excepthook

        def keep(args: Any) -> None:
            # An `Exception` is the script's; else it was caught, and ended.
            if isinstance(args.exc_value, Exception):
                self.error = self.error or args.exc_value
                told(args)

        with attribute_set(threading, "excepthook", keep):
            yield

    def finish(self, is_done: Callable[[], bool]) -> None:
        """Waits for them as Python does at a script's end, for a minute.

        Args:
          is_done: Whether nobody needs to wait any more.
        """
        end = time.monotonic() + _SECONDS
        while _are_running() and not is_done() and time.monotonic() < end:
            time.sleep(_STEP_SECONDS)


def _are_running() -> bool:
    main = threading.main_thread()
    return any(t is not main and not t.daemon for t in threading.enumerate())

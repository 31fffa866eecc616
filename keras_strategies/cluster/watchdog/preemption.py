"""The notice of preemption (SIGTERM), for code that saves before the end."""

import atexit
import functools
import os
import signal
import threading
import time
import types
from collections.abc import Callable
from typing import Any

from keras_strategies.cluster.watchdog.progress import ProgramRunner

# Schedulers may repeat SIGTERM, and send SIGKILL 30 seconds after the first.
_ENDING_S = 30.0

_masks = threading.local()


class PreemptionNotice:
    """A context that records SIGTERM, after which this process must end.

    In a job, `came` becomes true in all processes before the same program, and
    so between the same steps. A process without others has a handler of
    SIGTERM, if the context is entered in its main thread. After a SIGTERM the
    handler stays for 30 seconds after the context, so that another SIGTERM
    does not interrupt the cleanup (`finally`, `atexit`).

    Args:
      runner: The runner of this process's programs in a job; None if there
        are no other processes.
    """

    def __init__(self, runner: ProgramRunner | None) -> None:
        self._runner = runner
        self._came = False
        self._previous: Any = None
        self._is_installed = False
        self._closed_at: float | None = None

    def __enter__(self) -> "PreemptionNotice":
        if self._runner is not None:
            self._runner.num_savers += 1
        elif threading.current_thread() is threading.main_thread():
            reset_in_children()
            self._previous = signal.signal(signal.SIGTERM, self._on_signal)
            self._is_installed = True
        return self

    def __exit__(self, *error: object) -> None:
        if self._runner is not None:
            self._runner.num_savers -= 1
        elif self._is_installed and self._came:
            self._closed_at = time.monotonic()
            atexit.register(self._ignore_at_exit)
        elif self._is_installed:
            signal.signal(signal.SIGTERM, self.previous)
            self._is_installed = False

    @property
    def came(self) -> bool:
        """Whether to save now, and then raise `exit_codes.Preempted`."""
        if self._runner is not None:
            return self._runner.was_preempted
        return self._came

    @property
    def previous(self) -> Callable[..., object] | int:
        """The handler that this one has replaced."""
        return self._previous or signal.SIG_DFL

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        if self._is_left_over() and not self._is_ending():
            # `Preempted` was caught, and the process has continued.
            signal.signal(number, self.previous)
            signal.raise_signal(number)
            return
        self._came = True
        if callable(self._previous):
            self._previous(number, frame)

    def _is_left_over(self) -> bool:
        is_current = signal.getsignal(signal.SIGTERM) == self._on_signal
        return self._closed_at is not None and is_current

    def _is_ending(self) -> bool:
        closed_at = self._closed_at or 0.0
        return time.monotonic() - closed_at < _ENDING_S

    def _ignore_at_exit(self) -> None:
        # Python removes handlers while modules are still being torn down.
        if self._is_left_over() and self._is_ending():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


@functools.cache
def reset_in_children() -> None:
    """Resets the handling of SIGTERM in children that this process forks.

    They inherit the handlers of notices, and JAX's in a job, which would not
    end the child. The reset restores the user's handler or the default.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=_hold_sigterm,
            after_in_parent=_release_sigterm,
            after_in_child=_reset_sigterm,
        )


def _hold_sigterm() -> None:
    # A SIGTERM before the child has reset its handler would be lost.
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM,))


def _release_sigterm() -> None:
    if signal.SIGTERM not in _masks.before:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))


def _reset_sigterm() -> None:
    handler = signal.getsignal(signal.SIGTERM)
    while isinstance(
        notice := getattr(handler, "__self__", None), PreemptionNotice
    ):
        handler = notice.previous
    # Replaces JAX's handler, too: it is in C++, so Python still reports the
    # previous one. None is a handler of other C code.
    if handler is not None:
        signal.signal(signal.SIGTERM, handler)
    _release_sigterm()

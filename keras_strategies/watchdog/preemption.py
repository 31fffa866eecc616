"""Detection of preemption (SIGTERM), for code that saves before it stops."""

import atexit
import functools
import os
import signal
import threading
import types
from collections.abc import Callable
from typing import Any

from keras_strategies.watchdog.progress import ProgramRunner

_masks = threading.local()


class PreemptionNotice:
    """A context manager that records SIGTERM instead of ending the process.

    The code inside the context must check `came` regularly. When `came` is
    true, it must save and then raise `exit_codes.Preempted`.

    In a job, `came` becomes true in all processes before the same program, and
    therefore between the same steps. If there are no other processes, the
    context installs a handler for SIGTERM, provided that it is entered in the
    main thread. If a SIGTERM has arrived, others are ignored after the end of
    the context, because schedulers may send it repeatedly: another one must not
    interrupt the cleanup (in `finally` blocks and `atexit` functions).

    Args:
      runner: The `ProgramRunner` of this process in a job; None if there are
        no other processes.
    """

    def __init__(self, runner: ProgramRunner | None) -> None:
        self._runner = runner
        self._came = False
        self._previous: Any = None
        self._is_installed = False

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
            # Not SIG_IGN, which children would inherit.
            signal.signal(signal.SIGTERM, self._ignore)
            atexit.register(self._ignore_at_exit)
        elif self._is_installed:
            signal.signal(signal.SIGTERM, self.previous)
            self._is_installed = False

    @property
    def came(self) -> bool:
        """Whether SIGTERM has arrived, in any process of the job.

        If so, the code must save now and then raise `exit_codes.Preempted`.
        """
        if self._runner is not None:
            return self._runner.was_preempted
        return self._came

    @property
    def previous(self) -> Callable[..., object] | int:
        """The handler for SIGTERM that was installed before this context."""
        return self._previous or signal.SIG_DFL

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        self._came = True
        if callable(self._previous):
            self._previous(number, frame)

    def _ignore(self, number: int, frame: types.FrameType | None) -> None:
        pass

    def _ignore_at_exit(self) -> None:
        # At exit, Python removes its signal handlers while it still tears down
        # modules. In this time SIGTERM would end the process.
        if signal.getsignal(signal.SIGTERM) == self._ignore:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


@functools.cache
def reset_in_children() -> None:
    """Makes SIGTERM end the children that this process forks later.

    A forked child inherits the handlers that `PreemptionNotice` and, in a job,
    JAX have installed. With these handlers, SIGTERM would not end the child.
    So each child restores the user's handler, or the default.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(
            before=_hold_sigterm,
            after_in_parent=_release_sigterm,
            after_in_child=_reset_sigterm,
        )


def _hold_sigterm() -> None:
    # SIGTERM is blocked during the fork, because a SIGTERM that arrives before
    # the child has reset its handler would be lost.
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
    # This also replaces JAX's handler. JAX installed it from C++, so
    # `getsignal` still returns the previous handler. If it returns None, other
    # C code installed the handler.
    if handler is not None:
        signal.signal(signal.SIGTERM, handler)
    _release_sigterm()

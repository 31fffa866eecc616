"""The exit hooks of a process, which send its end to the others.

The hooks of a process of a job: on an uncaught exception (in a thread that
trains, too), on `sys.exit`, at the end of the script, and before
`jax.distributed.shutdown`.
"""

import atexit
import contextlib
import functools
import logging
import os
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any, Protocol

import jax

from keras_strategies.cluster.exchange.exit_codes import (
    Cause,
    ExitCode,
    Stalled,
)
from keras_strategies.cluster.watchdog import progress

_MAX_TEXT = 2000
_FLUSH_S = 1.0
# XLA's errors come from JAX's lines, or from ours that start a program.
_RAISING = (os.path.dirname(jax.__file__), progress.__file__)


class _Watchdog(Protocol):
    """What the hooks use of this process's `watchdog.Watchdog`."""

    process: int
    progress: progress.Progress

    def explain(self) -> None: ...

    def fail(self, text: str, code: int, cause: Cause) -> None: ...

    def end_soon(self) -> None: ...

    def end_failed(self) -> None: ...

    def wait_for_others(self) -> None: ...

    def stop(self) -> None: ...


def install(watchdog: _Watchdog) -> None:
    """Installs the hooks, for the rest of this process."""
    hooks = _Hooks(watchdog)
    sys.excepthook = functools.partial(hooks.on_exception, sys.excepthook)
    threading.excepthook = functools.partial(
        hooks.on_thread_exception, threading.excepthook
    )
    sys.exit = functools.partial(hooks.on_exit, sys.exit)
    jax.distributed.shutdown = functools.partial(
        hooks.on_shutdown, jax.distributed.shutdown
    )
    atexit.register(hooks.at_exit)


def end(process: int, text: str, code: int) -> None:
    """Ends this process at once, past JAX's shutdown barrier.

    Args:
      process: Its number.
      text: Why, for the last line of its stderr.
      code: Its exit code.
    """
    # A thread that hangs may hold what flushing waits for.
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(_FLUSH_S)
    write(f"process {process} ends with exit code {int(code)}: {text}.")
    os._exit(code)


def write(line: str) -> None:
    """Writes a line to stderr, also where Python's is held by a thread."""
    with contextlib.suppress(OSError):
        os.write(2, f"\nkeras_strategies: {line}\n".encode())


class _Hooks:
    def __init__(self, watchdog: _Watchdog) -> None:
        self._watchdog = watchdog
        self._process_id = os.getpid()
        # What `sys.exit` was called with, and after how many programs: who
        # starts more has caught it.
        self._status: tuple[Any, int] = (None, 0)
        self._is_over = False

    def on_exception(
        self,
        previous: Callable[..., object],
        kind: type[BaseException],
        error: BaseException,
        trace: types.TracebackType | None,
    ) -> None:
        """In the place of `sys.excepthook`."""
        previous(kind, error, trace)
        self._fail(error, trace)

    def on_thread_exception(
        self, previous: Callable[..., object], args: threading.ExceptHookArgs, /
    ) -> None:
        """In the place of `threading.excepthook`.

        Python continues after it. A job does not, if the thread was training:
        nobody starts its next program.
        """
        previous(args)
        thread, error = args.thread, args.exc_value
        has_trained = (
            thread is not None
            and thread.ident in self._watchdog.progress.threads
        )
        if has_trained and isinstance(error, Exception):
            self._fail(error, args.exc_traceback)
            # The script, which may continue for long, has no part in it.
            self._watchdog.end_soon()

    def _fail(
        self, error: BaseException, trace: types.TracebackType | None
    ) -> None:
        """Tells of an exception that nobody caught."""
        if not self._is_here() or _is_interactive():
            return
        if _is_suspect(error):
            self._watchdog.explain()
        if isinstance(error, Stalled):
            # It names those who are to blame: others.
            name = str(error).rstrip(".")
            cause = Cause(text=name, code=ExitCode.STALLED)
            self._watchdog.fail(name, ExitCode.STALLED, cause)
            return
        name, code = _described(error, trace), ExitCode.FAILED
        if isinstance(error, KeyboardInterrupt):
            code = ExitCode.INTERRUPTED
        reason = f"process {self._watchdog.process} failed: {name}"
        self._watchdog.fail(name, code, Cause(text=reason))

    def on_exit(
        self, previous: Callable[..., object], status: object = None, /
    ) -> None:
        """In the place of `sys.exit`."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self._is_here():
            self._status = (status, self._watchdog.progress.num_started)
        previous(status)

    def on_shutdown(self, previous: Callable[..., object]) -> None:
        """In the place of `jax.distributed.shutdown`."""
        self._leave()
        previous()

    def at_exit(self) -> None:
        """At the end of the script, however it ended."""
        watchdog = self._watchdog
        if not self._is_here():
            return
        watchdog.end_failed()
        status, programs = self._status
        done = watchdog.progress
        if done.was_preempted:
            write(
                f"process {watchdog.process} was stopped by SIGTERM after "
                f"{done.num_started} programs, as all others; exit code "
                f"{int(ExitCode.PREEMPTED)}."
            )
        elif status not in (None, 0) and programs == done.num_started:
            reason = (
                f"process {watchdog.process} ended with sys.exit({status!r})"
            )
            code = status if isinstance(status, int) else 1
            watchdog.fail(
                f"sys.exit({status!r})", code & 0xFF, Cause(text=reason)
            )
            watchdog.end_failed()
        try:
            self._leave()
        except KeyboardInterrupt:
            end(watchdog.process, "KeyboardInterrupt", ExitCode.INTERRUPTED)
        if done.was_preempted and not done.was_preempted_in_main:
            # Python forgets a SystemExit of another thread.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ExitCode.PREEMPTED)

    def _leave(self) -> None:
        if self._is_here():
            self._is_over = True
            self._watchdog.wait_for_others()
            self._watchdog.stop()

    def _is_here(self) -> bool:
        """Whether this is the process of the watchdog, and it still runs."""
        return os.getpid() == self._process_id and not self._is_over


def _described(error: BaseException, trace: types.TracebackType | None) -> str:
    """As in "ValueError: user bug (train.py:42 in on_batch_end)"."""
    text = "".join(traceback.format_exception_only(error)).strip()
    notes = text[:_MAX_TEXT].rstrip(".")
    frames = traceback.extract_tb(trace)
    users = [frame for frame in frames if progress.is_users(frame.filename)]
    if users:
        last = users[-1]
        file = os.path.basename(last.filename)
        notes += f" ({file}:{last.lineno} in {last.name})"
    return notes


def _is_suspect(error: BaseException | None) -> bool:
    """Whether it may come of another process's end: JAX or XLA raised it.

    Errors of a collective have no type of their own.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return True
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if frames and frames[-1].f_code.co_filename.startswith(_RAISING):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _is_interactive() -> bool:
    """Whether the process continues after an uncaught exception."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        logging.shutdown()

"""Exit hooks, which report the end of this process to the other processes.

They run on an uncaught exception (also in a thread that ran compiled programs),
on `sys.exit`, at the end of the script, and before `jax.distributed.shutdown`.
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
from typing import Any

import jax

from keras_strategies.cluster.exchange.exit_codes import (
    Cause,
    ExitCode,
    Stalled,
)
from keras_strategies.cluster.user_code import format_position, is_user_code
from keras_strategies.watchdog import progress

_MAX_TEXT = 2000
_FLUSH_S = 1.0
# Errors of XLA are raised in the files of JAX, or in the module of this package
# that runs compiled programs.
_RAISING = (os.path.dirname(jax.__file__), progress.__file__)


def install(watchdog: Any) -> None:
    """Installs the hooks, which stay installed until this process ends.

    Args:
      watchdog: The process's `watchdog.Watchdog`.
    """
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
    """Ends this process immediately, without JAX's shutdown barrier.

    Args:
      process: The number of this process.
      text: The reason, which is printed as the last line on stderr.
      code: The exit code.
    """
    # Flushing runs in a separate thread, because it may block on a lock that a
    # hung thread holds.
    flushing = threading.Thread(target=_flush, daemon=True)
    flushing.start()
    flushing.join(_FLUSH_S)
    write(f"process {process} ends with exit code {int(code)}: {text}.")
    os._exit(code)


def write(line: str) -> None:
    """Writes a line to stderr without blocking on the lock of `sys.stderr`.

    The line is written even if another thread holds this lock.
    """
    with contextlib.suppress(OSError):
        os.write(2, f"\nkeras_strategies: {line}\n".encode())


class _Hooks:
    def __init__(self, watchdog: Any) -> None:
        self._watchdog = watchdog
        self._process_id = os.getpid()
        # The argument of `sys.exit`, and the number of programs that had been
        # started when it was called. If more programs were started later, the
        # script has caught the exception and continued.
        self._status: tuple[Any, int] = (None, 0)
        self._is_over = False

    def on_exception(
        self,
        previous: Callable[..., object],
        kind: type[BaseException],
        error: BaseException,
        trace: types.TracebackType | None,
    ) -> None:
        """Reports an uncaught exception; replaces `sys.excepthook`."""
        previous(kind, error, trace)
        self._fail(error, trace)

    def on_thread_exception(
        self, previous: Callable[..., object], args: threading.ExceptHookArgs, /
    ) -> None:
        """Reports a thread's exception; replaces `threading.excepthook`.

        Python continues after an exception in a thread. But if this thread was
        training, the job cannot continue, because no other thread starts the
        thread's next program.
        """
        previous(args)
        thread, error = args.thread, args.exc_value
        trained = self._watchdog.runner.threads
        if thread and thread.ident in trained and isinstance(error, Exception):
            self._fail(error, args.exc_traceback)
            # The process does not wait for the end of the script, which may
            # continue for a long time.
            self._watchdog.end_soon()

    def _fail(
        self, error: BaseException, trace: types.TracebackType | None
    ) -> None:
        """Tells the other processes of an exception that ends this process."""
        if not self._is_here() or _is_interactive():
            return
        if _is_suspect(error):
            self._watchdog.explain()
        if isinstance(error, Stalled):
            # The error's text names the other processes that are at fault.
            name = str(error).rstrip(".")
            cause = Cause(text=name, code=ExitCode.STALLED)
            self._watchdog.fail(name, ExitCode.STALLED, cause)
            return
        name, code = _describe_error(error, trace), ExitCode.FAILED
        if isinstance(error, KeyboardInterrupt):
            code = ExitCode.INTERRUPTED
        reason = f"process {self._watchdog.process} failed: {name}"
        self._watchdog.fail(name, code, Cause(text=reason))

    def on_exit(
        self, previous: Callable[..., object], status: object = None, /
    ) -> None:
        """Records the exit status; replaces `sys.exit`."""
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self._is_here():
            self._status = (status, self._watchdog.runner.num_started)
        previous(status)

    def on_shutdown(self, previous: Callable[..., object]) -> None:
        """Waits for other processes; replaces `jax.distributed.shutdown`."""
        self._leave()
        previous()

    def at_exit(self) -> None:
        """Reports how the script ended, and waits for the other processes.

        It runs at the end of the script, whether that succeeded or failed.
        """
        watchdog = self._watchdog
        if not self._is_here():
            return
        watchdog.end_failed()
        status, programs = self._status
        done = watchdog.runner
        if done.was_preempted:
            write(
                f"process {watchdog.process} was stopped by SIGTERM after "
                f"{done.num_started} programs, like all other processes; exit "
                f"code {int(ExitCode.PREEMPTED)}."
            )
        elif status not in (None, 0) and programs == done.num_started:
            name = f"sys.exit({status!r})"
            code = status if isinstance(status, int) else 1
            cause = Cause(text=f"process {watchdog.process} ended with {name}")
            watchdog.fail(name, code & 0xFF, cause)
            watchdog.end_failed()
        try:
            self._leave()
        except KeyboardInterrupt:
            end(watchdog.process, "KeyboardInterrupt", ExitCode.INTERRUPTED)
        if done.was_preempted and not done.was_preempted_in_main:
            # Python ignores a SystemExit that is raised in any thread other
            # than the main thread, so the process must be ended here.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(ExitCode.PREEMPTED)

    def _leave(self) -> None:
        if self._is_here():
            self._is_over = True
            self._watchdog.wait_for_others()
            self._watchdog.stop()

    def _is_here(self) -> bool:
        """Returns whether the watchdog runs in this process.

        It does not run in a forked child, nor after this process has left the
        job.
        """
        return os.getpid() == self._process_id and not self._is_over


def _describe_error(
    error: BaseException, trace: types.TracebackType | None
) -> str:
    """Describes an error and the line of user code where it was raised.

    For example: "ValueError: user bug (train.py:42 in on_batch_end)".
    """
    text = "".join(traceback.format_exception_only(error)).strip()
    summary = text[:_MAX_TEXT].rstrip(".")
    for frame in reversed(traceback.extract_tb(trace)):
        if is_user_code(frame.filename):
            place = frame.filename, frame.lineno or 0, frame.name
            return f"{summary} ({format_position(*place)})"
    return summary


def _is_suspect(error: BaseException | None) -> bool:
    """Returns whether an error may result from the end of another process.

    This is possible if JAX or XLA raised the error itself, or an earlier error
    that led to it. The error's type does not show whether a collective failed.
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
    """Returns whether Python is interactive.

    An interactive process continues after an uncaught exception.
    """
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        logging.shutdown()

"""Runs a script up to its first training step."""

import contextlib
import os
import pathlib
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import NoReturn

from keras_strategies.planning.capture.capture import Capture
from keras_strategies.planning.capture.errors import (
    PlanError,
    ScriptEnded,
    StepCaptured,
)
from keras_strategies.planning.capture.request import Request
from keras_strategies.spmd.attributes import temporary_attribute

_MAX_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.05


def run_script(capture: Capture, request: Request) -> Capture:
    """Runs a script or module, as `python` would, up to a training step.

    Args:
      capture: The capture of the step.
      request: The request, which contains the script's path and arguments.

    Returns:
      `capture`, which now contains the step.

    Raises:
      PlanError: if the script ended without a step.
      Exception: an error that the script, or one of its threads, raised before
        its first step.
    """
    process, threads = os.getpid(), _ScriptThreads()
    with capture.install(), _as_main(request), threads.watch():
        try:
            _run_main(request)
        except StepCaptured:
            pass
        except SystemExit as error:
            code = error.code
            if os.getpid() != process:
                # This is a child process that the script has forked.
                is_number = isinstance(code, int)
                end_process(code if is_number else int(code is not None))
            if capture.step is None and code not in (None, 0):
                raise ScriptEnded(
                    f"The script exited with {code!r} before it trained a "
                    "model."
                ) from error
        except Exception:
            if os.getpid() != process:
                traceback.print_exc()
                end_process(1)
            # Errors after the step was captured are ignored, such as errors in
            # a `finally`.
            if capture.step is None:
                raise
        if os.getpid() != process:
            end_process()
        threads.finish(lambda: capture.step is not None)
        capture.wait()
    if capture.step is None:
        raise threads.error or PlanError(
            "A planned script must call `fit` of a strategy's model, or "
            f"`strategy.run`. Received: {request.script!r}, which ended "
            "without either call. If the script trains only if a flag is "
            "passed, pass that flag."
        )
    return capture


def _run_main(request: Request) -> None:
    if request.is_module:
        runpy.run_module(request.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(request.script, run_name="__main__")


def end_process(status: int = 0) -> NoReturn:
    """Ends the process immediately; does not wait for other threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def _as_main(request: Request) -> Iterator[None]:
    """Sets `sys.argv` and `sys.path` for a script while the block runs."""
    argv, path = sys.argv[:], sys.path[:]
    sys.argv = [request.script, *request.arguments]
    folder = pathlib.Path(request.script).resolve().parent
    sys.path.insert(0, os.getcwd() if request.is_module else str(folder))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


class _ScriptThreads:
    """The threads that a script has started, with their first error.

    Attributes:
      error: The first error that one of the threads raised, or None.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Stores the first error that a thread raises while the block runs."""
        report = threading.excepthook

        def keep(args: threading.ExceptHookArgs) -> None:
            # An `Exception` is an error of the script. Anything else is
            # `StepCaptured`, which is not an error.
            if isinstance(args.exc_value, Exception):
                self.error = self.error or args.exc_value
                report(args)

        with temporary_attribute(threading, "excepthook", keep):
            yield

    def finish(self, is_done: Callable[[], bool]) -> None:
        """Waits up to a minute for the threads to end.

        Python also waits for these threads when a script exits.

        Args:
          is_done: A function that returns whether the wait can end early.
        """
        end = time.monotonic() + _MAX_WAIT_SECONDS
        while _are_running() and not is_done() and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)


def _are_running() -> bool:
    main = threading.main_thread()
    return any(t is not main and not t.daemon for t in threading.enumerate())

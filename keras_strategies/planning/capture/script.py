"""Runs a script up to its first training step."""

import contextlib
import os
import pathlib
import runpy
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

from keras_strategies.planning.capture.capture import Capture
from keras_strategies.planning.capture.errors import (
    PlanError,
    ScriptEnded,
    StepCaptured,
)
from keras_strategies.planning.capture.request import Request
from keras_strategies.planning.seam import (
    temporary_attribute,
)

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
    error, thread_errors = None, []
    with capture.install(), _as_main(request), _watch_threads(thread_errors):
        try:
            _run_main(request)
        except StepCaptured:
            pass
        except (Exception, SystemExit) as raised:
            error = raised
        # Errors after the step was captured are ignored, such as errors in a
        # `finally`.
        if capture.step is None and error is not None:
            code = getattr(error, "code", None)
            if not isinstance(error, SystemExit):
                raise error
            if code not in (None, 0):
                raise ScriptEnded(
                    f"The script exited with {code!r} before it trained a "
                    "model."
                ) from error
        # Python also waits for these threads when a script exits.
        end = time.monotonic() + _MAX_WAIT_SECONDS
        while _are_running() and not capture.step and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        if capture.step is not None:
            capture.done.wait()
    if capture.step is None:
        raise next(iter(thread_errors), None) or PlanError(
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


def end_process() -> NoReturn:
    """Ends the process immediately; does not wait for other threads."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextlib.contextmanager
def _as_main(request: Request) -> Iterator[None]:
    """Sets `sys.argv` and `sys.path` for a script while the block runs."""
    argv, path = sys.argv[:], sys.path[:]
    sys.argv = [request.script, *request.arguments]
    directory = pathlib.Path(request.script).resolve().parent
    sys.path.insert(0, os.getcwd() if request.is_module else str(directory))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


@contextlib.contextmanager
def _watch_threads(errors: list[Exception]) -> Iterator[None]:
    """Collects the errors that threads raise while the block runs."""
    report = threading.excepthook

    def keep(args: threading.ExceptHookArgs) -> None:
        # An `Exception` is an error of the script. Anything else is
        # `StepCaptured`, which is not an error.
        if isinstance(args.exc_value, Exception):
            errors.append(args.exc_value)
            report(args)

    with temporary_attribute(threading, "excepthook", keep):
        yield


def _are_running() -> bool:
    main = threading.main_thread()
    return any(t is not main and not t.daemon for t in threading.enumerate())

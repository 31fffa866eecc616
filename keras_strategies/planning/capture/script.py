"""Runs a script until its first training step is caught."""

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

from keras_strategies._core.attributes import temporary_attribute
from keras_strategies.planning.capture.capture import (
    Capture,
    PlanError,
    ScriptEnded,
    StepCaptured,
)
from keras_strategies.planning.capture.request import Request

_MAX_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.05


def run_script(capture: Capture, request: Request) -> Capture:
    """Runs a script, or a module, as `python` would, up to its first step.

    Args:
      capture: Catches the step.
      request: The script.

    Returns:
      The capture, which has the step.

    Raises:
      PlanError: it ended without a step.
      Exception: what the script, or the first of its threads, raised before.
    """
    process, threads = os.getpid(), _ScriptThreads()
    with capture.installed(), _as_main(request), threads.watched():
        try:
            _run_main(request)
        except StepCaptured:
            pass
        except SystemExit as error:
            code = error.code
            if os.getpid() != process:
                # The script has forked itself.
                is_number = isinstance(code, int)
                end_process(code if is_number else int(code is not None))
            if capture.step is None and code not in (None, 0):
                raise ScriptEnded(
                    f"The script ended itself with {code!r} before it trained "
                    "a model."
                ) from error
        except Exception:
            if os.getpid() != process:
                traceback.print_exc()
                end_process(1)
            # After its first step a script may fail: in a `finally`, say.
            if capture.step is None:
                raise
        if os.getpid() != process:
            end_process()
        threads.finish(lambda: capture.step is not None)
        capture.wait()
    if capture.step is None:
        raise threads.error or PlanError(
            "A plan is for the first training step of a script. Received: "
            f"{request.script!r}, which ended without `fit` of a strategy's "
            "model and without `strategy.run`. Does it train under a flag?"
        )
    return capture


def _run_main(request: Request) -> None:
    if request.is_module:
        runpy.run_module(request.script, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(request.script, run_name="__main__")


def end_process(status: int = 0) -> NoReturn:
    """Ends the process at once: the script's threads would keep it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@contextlib.contextmanager
def _as_main(request: Request) -> Iterator[None]:
    """Gives the script its arguments, and the modules beside it."""
    argv, path = sys.argv[:], sys.path[:]
    sys.argv = [request.script, *request.arguments]
    folder = pathlib.Path(request.script).resolve().parent
    sys.path.insert(0, os.getcwd() if request.is_module else str(folder))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


class _ScriptThreads:
    """The threads of a script.

    Attributes:
      error: The first error that one of them raised; None: none did.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Keeps their errors in the block."""
        report = threading.excepthook

        def keep(args: threading.ExceptHookArgs) -> None:
            # An `Exception` is the script's; else its step was caught.
            if isinstance(args.exc_value, Exception):
                self.error = self.error or args.exc_value
                report(args)

        with temporary_attribute(threading, "excepthook", keep):
            yield

    def finish(self, is_done: Callable[[], bool]) -> None:
        """Waits for them as Python does at a script's end, for a minute.

        Args:
          is_done: Returns whether there is no need to wait any more.
        """
        end = time.monotonic() + _MAX_WAIT_SECONDS
        while _are_running() and not is_done() and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)


def _are_running() -> bool:
    main = threading.main_thread()
    return any(t is not main and not t.daemon for t in threading.enumerate())

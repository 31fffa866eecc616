"""The child process of `keras-strategies plan` that plans one candidate.

The current directory is on the process's `sys.path` only if it plans a module.
"""

import contextlib
import json
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

import jax

from keras_strategies.planning.capture.capture import Capture
from keras_strategies.planning.capture.errors import (
    PlanError,
    ScriptEnded,
)
from keras_strategies.planning.capture.request import Request
from keras_strategies.planning.capture.script import end_process, run_script
from keras_strategies.planning.compile.compiler import Compiler, strip_colors
from keras_strategies.planning.compile.layouts import Layout, parse_layout
from keras_strategies.planning.compile.planner import Candidate, iter_plans
from keras_strategies.planning.compile.step import Step
from keras_strategies.planning.seam import make_devices

_MAX_LINES = 12
_MAX_CAUSES = 20
_MAX_LETTERS = 2000
_STDOUT = 1
_PACKAGE = str(pathlib.Path(__file__).parents[2]) + os.sep
_POLL_SECONDS = 1.0


def main(descriptor: str, words: str, parent: str) -> NoReturn:
    """Plans the candidate and writes the result to a file descriptor.

    The result, or an error, is a line of JSON.

    Args:
      descriptor: The number of the file descriptor, as text.
      words: The request, as text from `Request.to_text`.
      parent: The id of the parent process, which runs the command, as text.
    """
    threading.Thread(
        target=_exit_with_parent, args=(int(parent),), daemon=True
    ).start()
    with os.fdopen(int(descriptor), "w") as file:
        worker = Worker(Request.from_text(words), file)
        worker.answer(worker.plan)
    end_process()


def _exit_with_parent(parent: int) -> None:
    """Ends this process when its parent has ended, even by a signal."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    if os.getpgrp() == os.getpid():
        # Also ends the processes that the script has started.
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _clear_output() -> None:
    """Deletes what this process has written, which is not the script's.

    libtpu writes warnings if the machine has no TPU.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    # Does nothing if the output is not a file.
    with contextlib.suppress(OSError):
        os.ftruncate(_STDOUT, 0)
        os.lseek(_STDOUT, 0, os.SEEK_SET)


class Worker:
    """Plans one candidate.

    Args:
      request: The candidate.
      file: The file that answers are written to.
    """

    def __init__(self, request: Request, file: TextIO) -> None:
        self._request, self._file = request, file
        self._process = os.getpid()

    def send(self, **answer: object) -> None:
        """Writes an answer, except in a child that the script has forked."""
        if os.getpid() == self._process:
            self._file.write(json.dumps(answer) + "\n")
            self._file.flush()

    def answer(self, plan: Callable[[], dict[str, Any] | None]) -> None:
        """Calls `plan` and sends its result, if any, or its error."""
        try:
            if (step := plan()) is not None:
                self.send(step=step)
        except BaseException as error:
            sys.stdout.flush()
            is_ended = isinstance(error, ScriptEnded)
            self.send(error=self._describe(error), is_ended=is_ended)

    def _describe(self, error: BaseException) -> str:
        text = strip_colors(_describe_error(error, self._request))
        if len(text) > _MAX_LETTERS:
            text = f"{text[:_MAX_LETTERS]} ..."
        return text

    def plan(self) -> None:
        """Runs the script, and plans and sends its first step.

        The step is planned inside the contexts (`with`) that surround it in the
        script.
        """
        devices = make_devices(
            self._request.topology, has_unlimited_memory=True
        )
        _clear_output()
        self.plan_script(devices)

    def plan_script(self, devices: Sequence[jax.Device]) -> None:
        """Implements `plan`, for the devices of the slice."""
        request, layout = self._request, parse_layout(self._request.layout)
        is_scripts = request.is_default and layout == Layout()

        def plan(step: Step, name: str) -> None:
            self.answer(lambda: self._plan_step(step, name))
            if threading.current_thread() is not threading.main_thread():
                # The main thread may wait forever for the result of this
                # thread's step, so the process ends here.
                end_process()

        capture = Capture(
            devices,
            None if is_scripts else layout,
            is_per_replica=request.scale == "replica",
            plan=plan,
        )
        run_script(capture, request)

    def _plan_step(self, step: Step, layout: str) -> dict[str, Any]:
        """Plans a step that was captured from the script."""
        candidate = Candidate(
            topology=self._request.topology,
            layout=layout,
            devices=step.mesh.devices,
            make=lambda: step,
            describe=self._describe,
        )
        with (
            warnings.catch_warnings(record=True) as caught,
            contextlib.closing(Compiler()) as compiler,
        ):
            effort = self._request.effort
            (planned,) = iter_plans([candidate], compiler, effort)
        notes = (*_list_warnings(caught), planned.advice)
        advice = " ".join(filter(None, notes))
        return planned.to_json() | {"advice": advice}


def _list_warnings(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    """Returns the texts of this package's warnings, each once."""
    texts = [str(w.message) for w in caught if w.filename.startswith(_PACKAGE)]
    return list(dict.fromkeys(texts))


def _describe_error(error: BaseException, request: Request) -> str:
    """Returns an error's text, with the line of the script that raised it."""
    line = _find_line(error, request)
    refusal = _find_refusal(error)
    if refusal is not None:
        place = f"Line {line} of {request.script}: " if line else ""
        return f"{place}{refusal}"
    place = f" (line {line} of {request.script})" if line else ""
    traceback.print_exception(error)
    lines = str(error).splitlines()[:_MAX_LINES]
    return f"{type(error).__name__}{place}: " + "\n".join(lines)


def _find_refusal(error: BaseException | None) -> PlanError | None:
    """Returns the first `PlanError` that led to an error, or None.

    Keras adds its own words to the errors that are raised in a layer's call.
    """
    found = None
    # A script may have made a cycle of errors.
    for _ in range(_MAX_CAUSES):
        found = error if isinstance(error, PlanError) else found
        error = error and (error.__cause__ or error.__context__)
    return found


def _find_line(error: BaseException, request: Request) -> int | None:
    """Returns the last line of the script in an error's traceback, or None."""
    module = os.sep + request.script.replace(".", os.sep) + ".py"
    frames = traceback.extract_tb(error.__traceback__)
    lines = [
        frame.lineno
        for frame in frames
        if frame.filename == request.script
        or (request.is_module and frame.filename.endswith(module))
    ]
    return lines[-1] if lines else None

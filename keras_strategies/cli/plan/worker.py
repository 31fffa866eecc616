"""A process of `keras-strategies plan`: one candidate, from script to figures.

It has the current folder on its path only where a module is planned.
"""

import contextlib
import importlib
import json
import os
import pathlib
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from keras_strategies.cli.plan.request import Request, shape_and_dtype
from keras_strategies.cli.plan.script_threads import ScriptThreads

Say = Callable[..., None]
"""Writes an answer: its name and what it says."""

_MOST_LINES = 12
_SECONDS_BETWEEN = 1.0


def main(descriptor: str, words: str, parent: str) -> NoReturn:
    """Plans the candidate, and writes answers to a file descriptor.

    Each is a line of JSON: what is known of it at low effort, then the answer.

    Args:
      descriptor: The number of the file descriptor.
      words: The request.
      parent: The command's process id.
    """
    request = Request.from_text(words)
    os.nice(request.niceness)
    watching = threading.Thread(
        target=_end_with, args=(int(parent),), daemon=True
    )
    watching.start()
    with os.fdopen(int(descriptor), "w") as file:
        process = os.getpid()

        def say(**answer: Any) -> None:
            if os.getpid() != process:
                # Of a child that the script has forked.
                return
            file.write(json.dumps(answer) + "\n")
            file.flush()

        _answer(lambda: _planned(request, say), request, say)
    _end()


def _answer(plan: Callable[[], Any], request: Request, say: Say) -> None:
    try:
        say(step=plan())
    except BaseException as error:
        from keras_strategies.cli.plan.capture import ScriptEnded

        sys.stdout.flush()
        is_end = isinstance(error, ScriptEnded)
        say(**{"ended" if is_end else "error": _told(error, request)})


def _end(status: int = 0) -> NoReturn:
    """Ends the process: threads of the script's would keep it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _end_with(parent: int) -> None:
    """Ends the process once the command has: its terminal was closed, say."""
    while os.getppid() == parent:
        time.sleep(_SECONDS_BETWEEN)
    if os.getpgrp() == os.getpid():
        # With what the script has started.
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _planned(request: Request, say: Say) -> dict[str, Any]:
    from keras_strategies._core.compiled import without_jax_cache
    from keras_strategies.strategy.planning import compiling, planner

    is_full = {"auto": None, "low": False, "full": True}[request.effort]
    effort = planner.Effort(
        is_full=is_full,
        is_alone=request.is_alone,
        is_verified=request.verify,
        is_whole=request.whole,
    )
    folder = compiling.cache_folder() if request.cache else None
    compiler = compiling.Compiler(folder=folder)

    def plan(candidate: planner.Candidate) -> dict[str, Any]:
        with without_jax_cache():
            (planned,) = planner.planned(
                [candidate],
                compiler,
                effort,
                lambda candidate, stage: None,
                lambda row: say(row=row.to_json()),
            )
        return planned.to_json()

    if request.function:
        return plan(_of_function(request))
    return _of_script(request, plan, say)


def _of_script(request: Request, plan: Callable[[Any], Any], say: Say) -> Any:
    """Plans the candidate of a script, where the script is caught."""
    from keras_strategies.strategy.planning.candidates import Layout, layout_of
    from keras_strategies.strategy.planning.planner import Candidate
    from keras_strategies.tpu.topology_devices import devices_by_name

    devices = devices_by_name(request.topology)
    layout = layout_of(request.layout)
    is_own = request.is_default and layout == Layout()

    def planned(step: Any, words: str) -> Any:
        return plan(
            Candidate(
                topology=request.topology,
                layout=words,
                devices=step.mesh.devices,
                num_replicas=step.mesh.num_replicas,
                make=lambda: step,
            )
        )

    own_layout = None if is_own else layout
    return _captured(request, devices, own_layout, planned, say)


def _from_any_thread(
    plan: Callable[..., Any], request: Request, say: Say
) -> Callable[..., Any]:
    """A plan that answers at once where a script trains in a thread.

    Its main thread may wait for what the step gives, for ever.
    """

    def planned(*args: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            return plan(*args)
        _answer(lambda: plan(*args), request, say)
        _end()

    return planned


def _check_thread(*args: Any) -> None:
    from keras_strategies.cli.plan.capture import PlanError

    if threading.current_thread() is not threading.main_thread():
        raise PlanError(
            "A model axis is planned for scripts that train in their main "
            "thread. Received: one that trains in another. Leave 'model' out."
        )


def _of_function(request: Request) -> Any:
    """The candidate of a function that makes a model."""
    import jax

    import keras_strategies as ks
    from keras_strategies.strategy.planning import fit_candidates

    module, name = request.function.split(":")
    batch = tuple(
        jax.ShapeDtypeStruct(*shape_and_dtype(text)) for text in request.batch
    )
    is_global = request.scale == "global"
    strategy = ks.MirroredStrategy(jax.devices("cpu")[:1])
    # After what is imported here: files there may have the names of modules.
    sys.path.insert(0, os.getcwd())
    maker = getattr(importlib.import_module(module), name)
    (candidate,) = fit_candidates.candidates_of(
        strategy.mesh,
        fit_candidates.maker_of(maker),
        fit_candidates.Batch(batch, 1, is_global=is_global),
        [request.topology],
        [request.layout],
        strategy._over,
    )
    return candidate


def _captured(
    request: Request,
    devices: Any,
    layout: Any,
    plan: Callable[..., Any],
    say: Say,
) -> Any:
    import dataclasses

    from keras_strategies.cli.plan.capture import Capture, PlanError
    from keras_strategies.keras_bridge.variables.transformer_layout import (
        transformer_layout,
    )

    kwargs: dict[str, Any] = {"is_per_replica": request.scale == "replica"}
    if layout is not None and layout.cores > 1:
        # What its cores divide is known from the model.
        plain = dataclasses.replace(layout, cores=1, shards=None)
        check = _from_any_thread(_check_thread, request, say)
        capture = Capture(devices, plain, plan=check, **kwargs)
        first = _run_script(capture, request)
        if first.model is None:
            raise PlanError(
                "A model axis is planned for models that `fit` trains. "
                "Received: a script with a loop of its own. Leave 'model' out."
            )
        layout_map = transformer_layout(first.model, layout.cores)
        kwargs["layout_map"] = layout_map
    plan = _from_any_thread(plan, request, say)
    capture = Capture(devices, layout, plan=plan, **kwargs)
    _run_script(capture, request)
    if capture.error is not None:
        raise capture.error
    return capture.planned


def _run_script(capture: Any, request: Request) -> Any:
    from keras_strategies.cli.plan.capture import (
        Caught,
        PlanError,
        ScriptEnded,
    )

    process, threads = os.getpid(), ScriptThreads()
    with capture.installed(), _as_main(request), threads.watched():
        try:
            if request.is_module:
                runpy.run_module(
                    request.script, run_name="__main__", alter_sys=True
                )
            else:
                runpy.run_path(request.script, run_name="__main__")
        except Caught:
            pass
        except SystemExit as error:
            if os.getpid() != process:
                # The script has forked itself.
                code = error.code
                _end(code if isinstance(code, int) else int(code is not None))
            if capture.step is None and error.code not in (None, 0):
                raise ScriptEnded(
                    f"The script ended itself with {error.code!r} before it "
                    "trained a model."
                ) from error
        except Exception:
            if os.getpid() != process:
                traceback.print_exc()
                _end(1)
            # After its first step a script may fail: in a `finally`, say.
            if capture.step is None:
                raise
        if os.getpid() != process:
            _end()
        threads.finish(lambda: capture.step is not None)
        capture.wait()
    if capture.step is None:
        if threads.error is not None:
            raise threads.error
        raise PlanError(
            "A plan is for the first training step of a script. Received: "
            f"{request.script!r}, which ended without `fit` of a strategy's "
            "model and without `strategy.run`. Does it train under a flag?"
        )
    return capture


@contextlib.contextmanager
def _as_main(request: Request) -> Iterator[None]:
    """In which the script finds its arguments, and modules beside it."""
    argv, path = sys.argv[:], sys.path[:]
    sys.argv = [request.script, *request.arguments]
    folder = pathlib.Path(request.script).resolve().parent
    sys.path.insert(0, os.getcwd() if request.is_module else str(folder))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def _told(error: BaseException, request: Request) -> str:
    """An error in words for the script's author, with its place in it."""
    from keras_strategies.cli.plan.capture import PlanError
    from keras_strategies.strategy.planning.fit_candidates import MakingFailed

    if isinstance(error, PlanError):
        return str(error)
    if isinstance(error, MakingFailed):
        error = error.__cause__ or error
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename == request.script]
    place = f" (line {own[-1].lineno} of {request.script})" if own else ""
    traceback.print_exception(error)
    lines = str(error).splitlines()[:_MOST_LINES]
    return f"{type(error).__name__}{place}: " + "\n".join(lines)

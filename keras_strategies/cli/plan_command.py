"""The command `keras-strategies plan`, with checks of its arguments."""

import argparse
import contextlib
import importlib
import json
import os
import pathlib
import shlex
import signal
import sys
from collections.abc import Iterator
from typing import Any

from keras_strategies.cli.options import (
    JSON,
    MANY,
    Commands,
    Option,
    add_command,
)

_WRONG_ARGUMENTS = 2
_INTERRUPTED = 128 + signal.SIGINT
_EXAMPLES = """\
examples:
  keras-strategies plan train.py --topology v5e:4x4 --topology h100:8
  keras-strategies plan train.py --topology v5e:16x16 --topology v5p:4x4x4 -- \
--epochs 3
"""
_PLAN = """\
Predicts whether a script's model fits on TPU slices or GPUs that are not here,
with which layout, and how fast it trains: their compiler compiles the model's
training step on this machine. The script runs unchanged up to its first `fit`
or `strategy.run`, but its strategies use the named devices. Variables have no
values, nothing is trained and no checkpoint is opened. This needs Linux, for
TPUs libtpu, and for GPUs JAX's CUDA plugin (in a clone of the project: `pip
install '.[tpu]'` and `pip install '.[gpu-compile]'`).
"""
_OPTIONS: tuple[Option, ...] = (
    (
        "--topology",
        "a TPU slice, such as v5e:16x16, or the number of GPUs of a host, such "
        "as h100:8, or of hosts and their GPUs, such as h100:8x8; may be "
        "repeated",
        MANY | {"metavar": "NAME", "required": True},
    ),
    (
        "--layout",
        "how to distribute variables: replicated, slots[:N], sharded[:N], "
        "model:N, or several of these joined by +; may be repeated; default: "
        "the layouts that suit the devices",
        MANY | {"metavar": "WORDS"},
    ),
    (
        "--scale",
        "what the script's batch size means on the devices: with global (the "
        "default), the size of the global batch; with replica, the number of "
        "rows of each replica",
        {"choices": ("global", "replica"), "default": "global"},
    ),
    (
        "--effort",
        "the TPU compiler's effort; full is that of a real run; auto (the "
        "default) uses low, and near the memory limit also full",
        {"choices": ("auto", "low", "full"), "default": "auto"},
    ),
    JSON,
    ("--html", "also write the plan as an HTML page", {"metavar": "FILE"}),
    (
        "script",
        "the script; its arguments come after --",
        {"nargs": "?", "metavar": "SCRIPT"},
    ),
    (
        "-m",
        "the module to run, instead of a script",
        {"dest": "module", "metavar": "MODULE"},
    ),
)


def add_parser(commands: Commands) -> None:
    """Adds the command `plan` to the tool's commands."""
    add_command(
        commands,
        "plan",
        "predict whether and how fast a script's model trains on TPUs and GPUs",
        _PLAN,
        _OPTIONS,
        usage="keras-strategies plan (SCRIPT | -m MODULE) --topology NAME "
        "[OPTIONS] [-- ARGUMENTS]",
        epilog=_EXAMPLES,
    )


def run(options: argparse.Namespace) -> int:
    """Plans each combination of a topology and a layout, and prints a table.

    Returns:
      The exit status: 0 on success, 1 if no candidate could be planned, 2 for
      invalid arguments, and 130 after a SIGINT, which ends the plan with the
      results so far.
    """
    try:
        requests = _make_requests(options)
    except (ValueError, TypeError, ImportError, RuntimeError) as error:
        print(f"keras-strategies plan: {error}", file=sys.stderr)
        return _WRONG_ARGUMENTS
    from rich.console import Console

    from keras_strategies.planning.capture.processes import plan_in_processes

    plan, is_complete = plan_in_processes(requests)
    if options.as_json:
        print(json.dumps(plan.to_json(), indent=1))
    else:
        Console().print(plan)
    if options.html is not None:
        pathlib.Path(options.html).write_text(plan.to_html(), "utf-8")
    if not is_complete:
        return _INTERRUPTED
    return 0 if any(step.error is None for step in plan.steps) else 1


def _make_requests(options: argparse.Namespace) -> list[Any]:
    """Creates a planning request for each topology and layout."""
    from keras_strategies.planning.capture.request import ENVIRONMENT, Request

    _check_script(options)
    _check_page(options)
    # From here on JAX is needed, to look up slices by name. These environment
    # variables keep JAX from using a device.
    os.environ.update(ENVIRONMENT)
    with _silence_stderr():
        importlib.import_module("jax")
    return [
        Request(
            topology=name,
            layout=layout,
            is_default=options.layout is None,
            script=options.script or options.module,
            is_module=options.module is not None,
            arguments=tuple(options.arguments),
            scale=options.scale,
            effort=options.effort,
        )
        for name, layout in _list_candidates(options)
    ]


def _list_candidates(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Returns the candidates as pairs of a topology's and a layout's name."""
    from keras_strategies.planning.compile import layouts as lib
    from keras_strategies.planning.compile.candidates import (
        list_default_layouts,
    )
    from keras_strategies.strategy.compile_only import make_devices

    names = lib.check_topologies(options.topology)
    with _silence_stderr():
        devices = {name: make_devices(name) for name in names}
    layouts = options.layout and list(map(lib.parse_layout, options.layout))
    return [
        (name, str(layout))
        for name in names
        for layout in layouts or list_default_layouts(devices[name])
    ]


@contextlib.contextmanager
def _silence_stderr() -> Iterator[None]:
    """Hides messages that compilers write to stderr without a device."""
    sys.stderr.flush()
    before = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _check_page(options: argparse.Namespace) -> None:
    page = pathlib.Path(options.html or "plan.html")
    target = page if page.exists() else page.parent
    if options.html is not None and (
        page.is_dir() or not os.access(target, os.W_OK)
    ):
        raise ValueError(
            "--html must be a file that can be written. Received: "
            f"{options.html!r}. Pass a file in an existing directory."
        )


def _check_script(options: argparse.Namespace) -> None:
    script = options.script
    if bool(script) == bool(options.module):
        given = ", ".join(filter(None, (script, options.module))) or "none"
        raise ValueError(
            "A plan must be for one script or one module (-m). Received: "
            f"{given}. Pass exactly one of them."
        )
    if script and not os.path.isfile(script):
        raise ValueError(
            f"The script must be an existing file. Received: {script!r}. Pass "
            "the path of the script."
        )
    if script and script.endswith(".ipynb"):
        python = f"{script.removesuffix('.ipynb')}.py"
        raise ValueError(
            f"The script must be a Python file. Received: {script!r}, a "
            f"notebook. Convert it with `jupyter nbconvert --to script "
            f"{shlex.quote(script)}`, and plan {python!r}."
        )

"""The arguments of `keras-strategies plan`, checked before anything starts."""

import argparse
import contextlib
import importlib.util
import json
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from keras_strategies.cli.options import (
    FLAG,
    JSON,
    MANY,
    Commands,
    Option,
    add_command,
)

_WRONG_ARGUMENTS = 2
_EXAMPLES = """\
examples:
  keras-strategies plan train.py --topology v5e:4x4
  keras-strategies plan train.py --topology v5e:16x16 --topology v5p:4x4x4 -- \
--epochs 3
  keras-strategies plan --topology v5p:8x8x16 --layout sharded:64 \
--model models:make_7b --batch 1024x4096:int32 --batch 1024x4096:int32
"""
_PLAN = """\
Says whether, how and how fast a script's model trains on TPU slices, without
one: the slice's compiler compiles its step here. The script runs unchanged up
to its first `fit` or `strategy.run`; its strategies are the slice's, its models
have no values, nothing is trained and no checkpoint is opened. Needs libtpu
(`pip install 'keras-strategies[tpu]'`), on Linux.
"""
_OPTIONS: tuple[Option, ...] = (
    (
        "--topology",
        "a slice, as v5e:16x16; several times for several",
        MANY | {"metavar": "NAME"},
    ),
    (
        "--layout",
        "replicated, slots[:N], sharded[:N], model:N, or with +; several "
        "times for several; default: those that suit the slice",
        MANY | {"metavar": "WORDS"},
    ),
    (
        "--scale",
        "whose rows the script's batches have: the default, global, takes "
        "them as they are; replica has each replica of the slice get as many",
        {"choices": ("global", "replica"), "default": "global"},
    ),
    (
        "--effort",
        "how programs are compiled; default: fast, and near the limit "
        "as they would be run, too",
        {"choices": ("auto", "low", "full"), "default": "auto"},
    ),
    (
        "--verify",
        "compile the most rows that fit, and one more, at full effort",
        FLAG,
    ),
    (
        "--whole",
        "compile deep models as they are, not by a few of their blocks",
        FLAG,
    ),
    (
        "--model",
        "a function that makes and compiles the model, instead of a script",
        {"metavar": "MODULE:FUNCTION"},
    ),
    (
        "--batch",
        "of --model: x, and y with a second one; as 8x2048:int32",
        MANY | {"metavar": "SHAPE:DTYPE"},
    ),
    ("--processes", "candidates at once", {"type": int, "metavar": "N"}),
    ("--no-cache", None, FLAG),
    JSON,
    ("--html", "also write the plan as a page", {"metavar": "FILE"}),
    ("-m", "run a module", {"dest": "module", "metavar": "MODULE"}),
    (
        "script",
        "the script; its own arguments come after --",
        {"nargs": "?", "metavar": "SCRIPT"},
    ),
)


def add_parser(commands: Commands) -> None:
    """Adds the command to the others."""
    add_command(
        commands,
        "plan",
        "say whether and how fast a script's model trains on TPU slices",
        _PLAN,
        _OPTIONS,
        usage="keras-strategies plan (SCRIPT | -m MODULE) --topology NAME "
        "[OPTIONS] [-- ARGUMENTS]\n"
        "       keras-strategies plan --model MODULE:FUNCTION --batch "
        "SHAPE:DTYPE ... --topology NAME [OPTIONS]",
        epilog=_EXAMPLES,
    )


def parsed(
    parser: argparse.ArgumentParser, words: list[str]
) -> argparse.Namespace:
    """The options of the command, and the script's arguments after `--`.

    Args:
      parser: That of all commands.
      words: Those of the command line, from "plan" on.
    """
    end = words.index("--") if "--" in words else len(words)
    options, unknown = parser.parse_known_args(words[:end])
    if unknown:
        parser.error(
            f"unrecognized arguments: {' '.join(unknown)}. The script's own "
            "come after --"
        )
    options.arguments = words[end + 1 :]
    return options


def run(options: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
      The exit status: 0; 1 if no candidate could be planned, 2 for wrong
      arguments.
    """
    try:
        requests = _requests(options)
    except (ValueError, TypeError, ImportError) as error:
        print(f"keras-strategies plan: {error}", file=sys.stderr)
        return _WRONG_ARGUMENTS
    from rich.console import Console

    from keras_strategies.planning.capture.processes import plan_in_processes

    plan = plan_in_processes(requests, options.processes)
    if options.html is not None:
        pathlib.Path(options.html).write_text(plan.to_html(), "utf-8")
    if options.json:
        print(json.dumps(plan.to_json(), indent=1))
    else:
        Console().print(plan)
    return 0 if any(step.error is None for step in plan.steps) else 1


def _requests(options: argparse.Namespace) -> list[Any]:
    """Returns the request of each candidate."""
    from keras_strategies.planning.capture.request import (
        ENVIRONMENT,
        Request,
        shape_and_dtype,
    )

    common = _common(options)
    for text in common["batch"]:
        shape_and_dtype(text)
    # Here JAX is needed for the slices' names; it uses no device.
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _require_libtpu()
    candidates = _candidates(options)
    return [
        Request(
            topology=name,
            layout=layout,
            is_default=options.layout is None,
            is_alone=len(candidates) == 1,
            **common,
        )
        for name, layout in candidates
    ]


def _candidates(options: argparse.Namespace) -> list[tuple[str, str]]:
    """Returns the slice and the layout of each candidate."""
    from keras_strategies.planning.compile import layouts as lib
    from keras_strategies.planning.compile.candidates import default_layouts
    from keras_strategies.tpu.topology_devices import devices_by_name

    names = lib.check_topologies(options.topology)
    with _quiet():
        devices = {name: devices_by_name(name) for name in names}
    layouts = options.layout and list(map(lib.layout_of, options.layout))
    return [
        (name, str(layout))
        for name in names
        for layout in layouts or default_layouts(devices[name])
    ]


def _require_libtpu() -> None:
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            "Programs for TPUs are compiled by libtpu, which is not installed. "
            "Run `pip install 'keras-strategies[tpu]'`; it needs no TPU."
        )


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what libtpu writes where there is no TPU."""
    sys.stderr.flush()
    before = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _common(options: argparse.Namespace) -> dict[str, Any]:
    """Returns what the requests of all candidates have."""
    _check(options)
    batch = list(options.batch or [])
    return {
        "script": options.script or options.module or "",
        "is_module": options.module is not None,
        "function": options.model or "",
        "batch": tuple(batch * 2 if len(batch) == 1 else batch),
        "arguments": tuple(options.arguments),
        "scale": options.scale,
        "effort": options.effort,
        "verify": options.verify,
        "whole": options.whole,
        "cache": not options.no_cache,
    }


def _check(options: argparse.Namespace) -> None:
    given = [
        name for name in ("script", "module", "model") if getattr(options, name)
    ]
    if len(given) != 1:
        raise ValueError(
            "A plan is for a script, a module (-m) or a function (--model). "
            f"Received: {', '.join(given) or 'none of them'}. Name one."
        )
    if bool(options.model) != bool(options.batch):
        raise ValueError(
            "--model and --batch go together: the function makes the model, "
            "the batch says what it trains on. Received: one of them."
        )
    if options.model:
        module, _, function = options.model.partition(":")
        if not module or not function.isidentifier():
            raise ValueError(
                "--model names a function of a module. Received: "
                f"{options.model!r}. Write module:function."
            )
    if not options.topology:
        raise ValueError(
            "A plan is for slices. Received: no --topology. Name one, as "
            "--topology v5e:4x4. GPUs are not planned for: their programs are "
            "compiled on a machine that has one."
        )
    script = options.script or options.module or ""
    if "script" in given and not os.path.isfile(script):
        raise ValueError(
            f"There is no such script. Received: {script!r}. Give its path."
        )

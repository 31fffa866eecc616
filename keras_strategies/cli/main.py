"""The command line: its commands and their arguments.

Nothing here imports jax or keras, so that `--help` is quick and the command
starts where they do not.
"""

import argparse
import os
import sys
from collections.abc import Sequence

import keras_strategies
from keras_strategies.cli import plan_command
from keras_strategies.cli.options import (
    FLAG,
    JSON,
    Option,
    add_command,
    add_options,
)

_LAUNCH = """\
Starts several local processes of one script: a cluster on this machine.

Each process finds TF_CONFIG set (workers only; worker 0 is the chief) and runs
on virtual CPU devices. The chief's lines are shown as they are, those of the
others with their number. When one process fails all are ended, and its exit
code is this command's.
"""
_EXAMPLES = """\
examples:
  keras-strategies launch --processes 2 --devices-per-process 2 train.py
  keras-strategies launch --processes 4 train.py --epochs 3
  keras-strategies launch --processes 2 -m package.train
  keras-strategies launch --processes 2 --evaluator estimator.py
  keras-strategies launch --processes 2 -m keras_strategies.cli doctor
"""
_DOCTOR = """\
Shows what keras_strategies finds on this machine and in its cluster, and what
to change. Run in all processes of a cluster (through srun, launch, ...), they
meet and time an all-reduce. The exit code is 1 if there is a fault.
"""
_CHECKPOINTS = """\
Shows the checkpoints of a directory: which are good, what they hold, and what
else is there. Every file is read once and compared with its checksum; a run
may write there meanwhile. The exit code is 1 if a checkpoint is damaged.
"""
_REST = {"nargs": argparse.REMAINDER}
_LAUNCH_OPTIONS: tuple[Option, ...] = (
    ("--processes", "default: 2", {"type": int, "default": 2, "metavar": "N"}),
    (
        "--devices-per-process",
        "virtual CPU devices of each process; default: 1",
        {"type": int, "metavar": "D"},
    ),
    (
        "--evaluator",
        "start one more process, TF_CONFIG's evaluator, which is not part "
        "of the cluster; its first process is the chief then",
        FLAG,
    ),
    (
        "--platform",
        "what JAX runs on (JAX_PLATFORMS); default: cpu",
        {"default": "cpu"},
    ),
    (
        "-m",
        "run a module, as `python -m` does; its arguments follow",
        _REST | {"dest": "module", "metavar": "MODULE"},
    ),
    (
        "script",
        "the script; its arguments follow",
        _REST | {"metavar": "SCRIPT"},
    ),
)
_DOCTOR_OPTIONS: tuple[Option, ...] = (
    (
        "--quick",
        "what is known without starting JAX: no devices, no all-reduce",
        FLAG,
    ),
    ("--json", "print the report as JSON (in a cluster, the chief does)", FLAG),
    (
        "--timeout",
        "how long to wait for the other processes; default: 30",
        {"type": float, "default": 30.0, "metavar": "SECONDS"},
    ),
)
_CHECKPOINTS_OPTIONS: tuple[Option, ...] = (
    (
        "directory",
        "where a run keeps them: what `ks.callbacks.Checkpoint` was given, or "
        "an Estimator's `model_dir`",
        {"metavar": "DIR"},
    ),
)
_HOW_TO_VERIFY: tuple[Option, ...] = (
    ("--verify", "compare checksums, too: the default", FLAG),
    ("--quick", "compare names and sizes alone", FLAG),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command `keras-strategies`.

    Args:
      arguments: The words after the command's name; those of the process if
        left out.

    Returns:
      The exit status. `doctor`: 0, or 1 if it found a fault. `launch`: that of
      the process that failed first, else 0. `checkpoints`: 0, or 1 if one is
      damaged. `plan`: 0, or 1 if nothing could be planned. 2 for wrong
      arguments; 1 as well if nobody reads the output to its end (`| head`), as
      rich does.

    Raises:
      SystemExit: for `--help`, `--version` and wrong options.
    """
    parser = _make_parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["plan"]:
        options = plan_command.parsed(parser, words)
    else:
        options = parser.parse_args(words)
    try:
        status = _run(parser, options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    if options.command == "doctor":
        from keras_strategies.cli.doctor.doctor import doctor

        return doctor(
            quick=options.quick,
            as_json=options.json,
            timeout_s=options.timeout,
        )
    if options.command == "launch":
        from keras_strategies.cli.launch.launch import launch

        return launch(
            options.script if options.module is None else options.module,
            is_module=options.module is not None,
            num_processes=options.processes,
            devices_per_process=options.devices_per_process,
            platform=options.platform,
            has_evaluator=options.evaluator,
        )
    if options.command == "plan":
        return plan_command.run(options)
    if options.command == "checkpoints":
        from keras_strategies.cli.checkpoints.checkpoints import checkpoints

        return checkpoints(
            options.directory, quick=options.quick, as_json=options.json
        )
    parser.print_help()
    return 0


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="keras-strategies",
        description="Distribution strategies for Keras 3 on JAX.",
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"keras-strategies {keras_strategies.__version__}",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    add_command(
        commands,
        "launch",
        "run a script in several local processes",
        _LAUNCH,
        _LAUNCH_OPTIONS,
        usage="keras-strategies launch [OPTIONS] (SCRIPT | -m MODULE) "
        "[ARGUMENTS]",
        epilog=_EXAMPLES,
    )
    add_command(
        commands,
        "doctor",
        "show versions, devices, the cluster and advice",
        _DOCTOR,
        _DOCTOR_OPTIONS,
    )
    checkpoints = add_command(
        commands,
        "checkpoints",
        "show the checkpoints of a directory and verify them",
        _CHECKPOINTS,
        _CHECKPOINTS_OPTIONS,
    )
    how = checkpoints.add_mutually_exclusive_group()
    add_options(how, _HOW_TO_VERIFY)
    add_options(checkpoints, [JSON])
    plan_command.add_parser(commands)
    return parser

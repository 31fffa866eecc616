"""The command line: defines the commands and their arguments.

This module imports neither jax nor keras, so that `--help` is fast and the
tool starts even if one of these packages cannot be imported.
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

Sets TF_CONFIG for each process (workers only; worker 0 is the chief), which
runs on virtual CPU devices. The chief's output is shown unchanged, that of the
others with their number. If one process fails, all of them are ended, and this
command exits with its exit code.
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
to change. If it runs in all processes of a cluster (through srun, launch, ...),
they connect and time an all-reduce. The exit code is 1 if there is a fault.
"""
_CHECKPOINTS = """\
Shows the checkpoints of a directory: which are good, what they contain, and
what else is there. Every file is read once and compared with its checksum. A
run may write there at the same time. The exit code is 1 if a checkpoint is
damaged.
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
        "of the cluster; the first process is then the chief",
        FLAG,
    ),
    (
        "--platform",
        "the platform of JAX (JAX_PLATFORMS); default: cpu",
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
        "skip everything that starts JAX: no devices, no all-reduce",
        FLAG,
    ),
    ("--json", "print the report as JSON (in a cluster, the chief does)", FLAG),
    (
        "--timeout",
        "the time to wait for the other processes; default: 30",
        {"type": float, "default": 30.0, "metavar": "SECONDS"},
    ),
)
_CHECKPOINTS_OPTIONS: tuple[Option, ...] = (
    (
        "directory",
        "the directory of a run's checkpoints, as for "
        "`ks.callbacks.Checkpoint`, or an Estimator's `model_dir`",
        {"metavar": "DIR"},
    ),
)
_HOW_TO_VERIFY: tuple[Option, ...] = (
    ("--verify", "also compare checksums (the default)", FLAG),
    ("--quick", "compare only names and sizes", FLAG),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command-line tool `keras-strategies`.

    Args:
      arguments: The arguments after the tool's name; None for the arguments of
        this process.

    Returns:
      The exit status, which is 0 on success. `doctor` returns 1 if it found a
      fault. `launch` returns the exit code of the process that failed first.
      `checkpoints` returns 1 if a checkpoint is damaged. `plan` returns 1 if no
      candidate could be planned. All commands return 2 for invalid arguments,
      and 1 if stdout is closed early (`| head`), as rich does.

    Raises:
      SystemExit: if the arguments are `--help` or `--version`, or invalid.
    """
    parser = _make_parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["plan"]:
        options = plan_command.parse_options(parser, words)
    else:
        options = parser.parse_args(words)
    try:
        status = _run(parser, options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python also flushes stdout at exit, and that must not fail.
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

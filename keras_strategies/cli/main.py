"""The command line: defines the commands and their arguments.

This module imports neither jax nor keras, so that `--help` is fast and the
tool starts even if one of these packages cannot be imported.
"""

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

import keras_strategies
from keras_strategies.cli import plan_command
from keras_strategies.cli.options import (
    FLAG,
    JSON,
    Commands,
    Option,
    add_command,
    add_options,
)
from keras_strategies.migrate import command as migration

_LAUNCH = """\
Runs a script in several local processes, which form a cluster on this machine.

Sets TF_CONFIG in each process: all tasks are workers, and worker 0 is the
chief. The processes use virtual CPU devices. The chief's output is shown
unchanged. Each output line of another process begins with its task. If one
process fails, the command ends the others, and exits with the exit code of the
process that failed.
"""
_EXAMPLES = """\
examples:
  keras-strategies launch --processes 2 --devices-per-process 2 train.py
  keras-strategies launch --processes 4 train.py --epochs 3
  keras-strategies launch --processes 2 -m package.train
  keras-strategies launch --processes 2 --evaluator estimator.py
  keras-strategies launch --processes 4 --max-restarts 5 train.py
  keras-strategies launch --processes 2 -m keras_strategies.cli doctor
"""
_DOCTOR = """\
Reports what keras_strategies finds on this machine and in its cluster, and what
you should change. If you run it in all processes of a cluster (through srun,
launch, ...), the processes connect and time an all-reduce. The exit code is 1
if a problem was found.
"""
_CHECKPOINTS = """\
Lists the checkpoints in a directory: which are damaged, what they contain, and
which other files are in the directory. Every file is read once and compared
with its checksum. A run may write to the directory at the same time. The exit
code is 1 if a checkpoint is damaged.
"""
_REPORT = """\
Prints the reports that `ks.callbacks.RunReport` wrote to the directories of
runs, side by side: the time of a step and where it goes, restarts, and steps
that were computed twice. A run may write to its directory at the same time.
"""
_REST = {"nargs": argparse.REMAINDER}
_LAUNCH_OPTIONS: tuple[Option, ...] = (
    (
        "--processes",
        "the number of processes; default: 2",
        {"type": int, "default": 2, "metavar": "N", "dest": "num_processes"},
    ),
    (
        "--devices-per-process",
        "the number of virtual CPU devices in each process; default: 1",
        {"type": int, "metavar": "D"},
    ),
    (
        "--evaluator",
        "also start a process with the task 'evaluator', which is not part "
        "of the cluster; the first process then has the task 'chief'",
        FLAG | {"dest": "has_evaluator"},
    ),
    (
        "--platform",
        "the value of JAX_PLATFORMS in all processes; with cuda, each process "
        "takes different GPUs; default: cpu",
        {"default": "cpu"},
    ),
    (
        "--max-restarts",
        "how often to start the job again after a process has failed, so that "
        "the script resumes from its checkpoint; default: 0",
        {"type": int, "default": 0, "metavar": "N"},
    ),
    (
        "-m",
        "the module to run, as with `python -m`, followed by its arguments",
        _REST | {"dest": "module", "metavar": "MODULE"},
    ),
    (
        "script",
        "the script to run, followed by its arguments",
        _REST | {"metavar": "SCRIPT"},
    ),
)
_DOCTOR_OPTIONS: tuple[Option, ...] = (
    (
        "--quick",
        "skip the checks that start JAX: devices and the all-reduce",
        FLAG,
    ),
    (
        "--timeout",
        "the time to wait for the other processes; default: 30",
        {
            "type": float,
            "default": 30.0,
            "metavar": "SECONDS",
            "dest": "timeout_s",
        },
    ),
)
_CHECKPOINTS_OPTIONS: tuple[Option, ...] = (
    (
        "directory",
        "the directory with a run's checkpoints: the `directory` of "
        "`ks.callbacks.Checkpoint`, or the `model_dir` of an Estimator",
        {"metavar": "DIR"},
    ),
    ("--quick", "compare only names and sizes, not checksums", FLAG),
    JSON,
)
_REPORT_OPTIONS: tuple[Option, ...] = (
    (
        "directories",
        "a run's directory, which contains run_report.json",
        {"metavar": "DIR", "nargs": "+"},
    ),
    JSON,
)
_MIGRATE_OPTIONS: tuple[Option, ...] = (
    (
        "paths",
        "a Python file, a notebook, or a directory with such files",
        {"metavar": "PATH", "nargs": "+"},
    ),
)
_MIGRATE_MODES: tuple[Option, ...] = (
    ("--write", "write the ported files", FLAG | {"dest": "writes"}),
    ("--diff", "print the changes", FLAG | {"dest": "shows_diff"}),
)
# The modules of commands that have no directory in `cli`.
_OTHER_MODULES = {"report": "cli.report_command", "migrate": "migrate.command"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command-line tool `keras-strategies`.

    Args:
      arguments: The arguments after the tool's name; None for the arguments of
        this process.

    Returns:
      The exit status, which is 0 on success. `doctor` returns 1 if it found a
      problem. `launch` returns the exit code of the process that failed first.
      `checkpoints` returns 1 if a checkpoint is damaged. `report` returns 2
      if a directory has no report. `plan` returns 1 if no candidate could be
      planned. `migrate` returns 1 if lines are left, and 2 if a file could not
      be read. All commands return 2 for invalid arguments, 1 if stdout is
      closed early (`| head`), as rich does, and 130 after a SIGINT.

    Raises:
      SystemExit: if the arguments are `--help` or `--version`, or invalid.
    """
    parser = _make_parser()
    words = list(sys.argv[1:] if arguments is None else arguments)
    is_plan = words[:1] == ["plan"]
    end = words.index("--") if is_plan and "--" in words else len(words)
    options, unknown = parser.parse_known_args(words[:end])
    if unknown:
        text = f"unrecognized arguments: {' '.join(unknown)}"
        text += ". The script's arguments must come after --" * is_plan
        getattr(options, "parser", parser).error(text)
    if is_plan:
        options.arguments = words[end + 1 :]
    try:
        status = _run(parser, options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python also flushes stdout at exit, and that must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Calls the command's function with the options of its command line."""
    words = vars(options)
    command = words.pop("command")
    if command is None:
        parser.print_help()
        return 0
    if command == "plan":
        return plan_command.run(options)
    if command == "launch":
        module, script = words.pop("module"), words.pop("script")
        words["command"] = script if module is None else module
        words["is_module"] = module is not None
    del words["parser"]
    path = _OTHER_MODULES.get(command, f"cli.{command}.{command}")
    # Only now: a command's module may need a package that is not installed.
    module = importlib.import_module(f"keras_strategies.{path}")
    return getattr(module, command)(**words)


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
    _add_commands(commands)
    plan_command.add_parser(commands)
    return parser


def _add_commands(commands: Commands) -> None:
    """Adds the commands other than `plan`."""
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
        "report on versions, devices and the cluster, with advice",
        _DOCTOR,
        _DOCTOR_OPTIONS,
    )
    add_command(
        commands,
        "checkpoints",
        "list the checkpoints in a directory and verify them",
        _CHECKPOINTS,
        _CHECKPOINTS_OPTIONS,
    )
    add_command(
        commands,
        "report",
        "print the reports of runs, side by side",
        _REPORT,
        _REPORT_OPTIONS,
    )
    migrate = add_command(
        commands,
        "migrate",
        "port scripts and notebooks for tf.distribute",
        migration.DESCRIPTION,
        _MIGRATE_OPTIONS,
        epilog=migration.EXAMPLES,
    )
    add_options(migrate.add_mutually_exclusive_group(), _MIGRATE_MODES)

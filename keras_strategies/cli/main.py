"""The command line: its commands and their arguments.

Nothing here imports jax or keras, so that `--help` is quick and the command
starts where they do not.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TypeAlias

import keras_strategies
from keras_strategies.cli import plan_command

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
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
    _add_launch(commands)
    _add_doctor(commands)
    _add_checkpoints(commands)
    plan_command.add_parser(commands)
    return parser


def _add_launch(commands: _Commands):
    parser = commands.add_parser(
        "launch",
        help="run a script in several local processes",
        usage="keras-strategies launch [OPTIONS] (SCRIPT | -m MODULE) "
        "[ARGUMENTS]",
        description=_LAUNCH,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--processes", type=int, default=2, metavar="N", help="default: 2"
    )
    parser.add_argument(
        "--devices-per-process",
        type=int,
        metavar="D",
        help="virtual CPU devices of each process; default: 1",
    )
    parser.add_argument(
        "--evaluator",
        action="store_true",
        help="start one more process, TF_CONFIG's evaluator, which is not part "
        "of the cluster; its first process is the chief then",
    )
    parser.add_argument(
        "--platform",
        default="cpu",
        help="what JAX runs on (JAX_PLATFORMS); default: cpu",
    )
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="MODULE",
        help="run a module, as `python -m` does; its arguments follow",
    )
    parser.add_argument(
        "script",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="the script; its arguments follow",
    )


def _add_doctor(commands: _Commands):
    parser = commands.add_parser(
        "doctor",
        help="show versions, devices, the cluster and advice",
        description=_DOCTOR,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="what is known without starting JAX: no devices, no all-reduce",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the report as JSON (in a cluster, the chief does)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="how long to wait for the other processes; default: 30",
    )


def _add_checkpoints(commands: _Commands):
    parser = commands.add_parser(
        "checkpoints",
        help="show the checkpoints of a directory and verify them",
        description=_CHECKPOINTS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="where a run keeps them: what `ks.callbacks.Checkpoint` was "
        "given, or an Estimator's `model_dir`",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--verify",
        action="store_true",
        help="compare checksums, too: the default",
    )
    how.add_argument(
        "--quick",
        action="store_true",
        help="compare names and sizes alone",
    )
    parser.add_argument("--json", action="store_true", help="print it as JSON")

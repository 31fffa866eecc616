"""The command line: which commands there are and what they take."""

import argparse
from collections.abc import Sequence

import keras_strategies
from keras_strategies.cli.doctor import doctor


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command `keras-strategies`.

    Args:
      arguments: The words after the command's name; those of the process if
        left out.

    Returns:
      The exit status: 0, or 1 if `doctor` could not reach the devices.

    Raises:
      SystemExit: for `--help`, `--version` and wrong arguments.
    """
    parser = _make_parser()
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        return doctor()
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
    commands.add_parser(
        "doctor",
        help="show versions, devices and advice",
        description="Shows what keras_strategies finds on this machine.",
    )
    return parser

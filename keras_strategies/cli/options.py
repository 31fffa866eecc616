"""Commands and their arguments, which tables describe."""

import argparse
from collections.abc import Sequence
from typing import Any, TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Option = tuple[str, str | None, dict[str, Any]]
"""An option's names, help and further arguments of `add_argument`."""

FLAG = {"action": "store_true"}
MANY = {"action": "append"}
JSON: Option = ("--json", "print it as JSON", FLAG)


def add_command(
    commands: Commands,
    name: str,
    summary: str,
    description: str,
    options: Sequence[Option],
    *,
    usage: str | None = None,
    epilog: str | None = None,
) -> argparse.ArgumentParser:
    """Adds a command.

    Args:
      commands: The others.
      name: Its name.
      summary: A line on it, for the list of commands.
      description: A paragraph on it.
      options: Its options and arguments.
      usage: How it is called; None: as argparse has it.
      epilog: What its help ends with.
    """
    parser = commands.add_parser(
        name,
        help=summary,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage=usage,
        epilog=epilog,
    )
    add_options(parser, options)
    return parser


def add_options(
    parser: "argparse._ActionsContainer", options: Sequence[Option]
) -> None:
    """Adds options to a command, or to a group of its options."""
    for names, words, more in options:
        parser.add_argument(*names.split(), help=words, **more)

"""Adds commands to a parser from tables that describe their options."""

import argparse
from collections.abc import Sequence
from typing import Any, TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Option = tuple[str, str | None, dict[str, Any]]
"""An option: its names, its help text, other arguments of `add_argument`."""

FLAG: dict[str, Any] = {"action": "store_true"}
MANY = {"action": "append"}
JSON: Option = (
    "--json",
    "print the result as JSON",
    FLAG | {"dest": "as_json"},
)


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
    """Adds a command to the tool and returns the command's parser.

    The parsed options contain the parser, too, as `parser`.

    Args:
      commands: The group of commands to add the command to.
      name: The name of the command.
      summary: The help line for the command in the list of commands.
      description: The description on the command's help page.
      options: The command's options and arguments.
      usage: The usage line; None for the one that argparse generates.
      epilog: The text at the end of the command's help page.
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
    parser.set_defaults(parser=parser)
    return parser


def add_options(
    parser: "argparse._ActionsContainer", options: Sequence[Option]
) -> None:
    """Adds options to a command, or to a group of its options."""
    for names, words, more in options:
        parser.add_argument(*names.split(), help=words, **more)

"""The names that `migrate` replaces, drops or marks, read from names.toml."""

import dataclasses
import pathlib
import re
import tomllib
from collections.abc import Iterator
from typing import Any

from keras_strategies.names import lazy_names

TF = "tensorflow."
BACKEND = "keras.backend."
_SUBMODULES = re.compile(r"^tensorflow\.(compat\.v1\.)?(math\.|linalg\.)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """A call and what replaces it.

    Attributes:
      function: The new function, "" for the same, or ".name" for a method.
      old: The parameters in their order.
      new: The new name of each; "-", "!", "*" and ":" as in names.toml.
      added: A name and the code of an argument that the call needs, or "".
      is_open: Whether other arguments stay, and none is known by position.
    """

    function: str
    old: tuple[str, ...]
    new: tuple[str, ...]
    added: tuple[str, str]
    is_open: bool


def find_operation(full: str) -> Rule | None:
    """Returns the rule of an operation in code of steps, or None."""
    name = full.removeprefix(TF)
    return OPERATIONS.get(name) or OPERATIONS.get(_SUBMODULES.sub("", full))


def find_replacement(
    full: str, *, is_step: bool = False
) -> tuple[str, str, bool] | None:
    """Finds the longest beginning of a name that a table has.

    Args:
      full: The name.
      is_step: Whether code of a step has it, in which more names are left.

    Returns:
      The beginning, its text, and whether it is left; None if no table has it.
    """
    words = full.split(".")
    for count in range(len(words), 0, -1):
        prefix = ".".join(words[:count])
        if prefix in RENAMED:
            return prefix, RENAMED[prefix], False
        is_module = full in ("tensorflow.distribute", "tensorflow.estimator")
        if prefix in MARKED and not is_module:
            return prefix, MARKED[prefix], True
        if is_step and prefix in MARKED_IN_STEPS:
            return prefix, MARKED_IN_STEPS[prefix], True
    return None


def short(full: str) -> str:
    """Returns a name as scripts have it: "tf.function"."""
    return re.sub(r"^tensorflow\b", "tf", full)


def _read_renames(document: dict[str, Any]) -> dict[str, str]:
    moved = {
        f"{module['from']}.{name}": f"{module['to']}.{name}"
        for module in document["moved"]
        for name in module["names"].split()
    }
    return document["renamed"] | moved


def _read_marks(document: dict[str, Any]) -> dict[str, str]:
    hints = {
        "distribute": lazy_names.DISTRIBUTE,
        "distribute.experimental": lazy_names.EXPERIMENTAL,
        "distribute.cluster_resolver": lazy_names.CLUSTER_RESOLVER,
        "estimator": lazy_names.ESTIMATOR,
    }
    return document["marked"] | {
        f"{TF}{module}.{name}": f"use {hint}"
        for module, names in hints.items()
        for name, hint in names.items()
    }


def _read_table(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yields each name of a table with the other columns of its row."""
    for row in text.strip().splitlines():
        names, *columns = map(str.strip, row.split(" | "))
        for name in names.split(","):
            yield name.strip(), columns


def _read_rules(text: str) -> dict[str, Rule]:
    return {
        name: Rule(
            function=function.replace("{}", name.split(".")[-1]),
            old=tuple(old.removeprefix("...").split()),
            new=tuple(new.split()),
            added=(added.partition("=")[0].strip("|"), added.partition("=")[2]),
            is_open=old.startswith("..."),
        )
        for name, (function, old, new, added) in _read_table(text)
    }


DOCUMENT: dict[str, Any] = tomllib.loads(
    pathlib.Path(__file__).with_name("names.toml").read_text("utf-8")
)
OPERATIONS = _read_rules(DOCUMENT["operations"]["table"])
CALLS = _read_rules(DOCUMENT["calls"]["table"])
"""The rules of calls outside of datasets, by function or ".method"."""
TEMPLATES: dict[str, list[list[str]]] = {}
"""For each function or ".method": where, its parameters, and the new code."""
for _name, _columns in _read_table(DOCUMENT["templates"]["table"]):
    TEMPLATES.setdefault(_name, []).append(_columns)
RENAMED = _read_renames(DOCUMENT)
"""The replacement for each name, and for each that begins so."""
DROPPED = DOCUMENT["dropped"]
"""The calls that are removed, with the reason."""
MARKED = _read_marks(DOCUMENT)
"""The names that are left, with what to do; also what begins so."""
MARKED_IN_STEPS = DOCUMENT["marked_in_steps"]
"""The names that are left in code of steps, with what to do."""
SPECIAL = DOCUMENT["special"]
"""The kinds of calls that have a function in special.py."""
TEXTS = DOCUMENT["texts"]
"""What is written about lines that are left, by what is left."""
OLD_WORDS = DOCUMENT["old_words"]
"""Names of arguments in TensorFlow 1."""
ENDINGS = DOCUMENT["endings"]
"""The endings of files that Keras takes, by what is in them."""
FORMS = DOCUMENT["forms"]
"""Patterns of the code of arguments that are ported, by their new names."""
ARGUMENTS = DOCUMENT["arguments"]
"""What to do about arguments that cannot be ported."""
WORDS = {k: frozenset(v.split()) for k, v in DOCUMENT["languages"].items()}
"""The sets of words that decide about languages; see names.toml."""

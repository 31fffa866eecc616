"""The names that `migrate` replaces, drops or marks, read from names.toml."""

import dataclasses
import pathlib
import re
import tomllib
from typing import Any

from keras_strategies.names import lazy_names

TF = "tensorflow."
BACKEND = "keras.backend."
_SUBMODULES = re.compile(r"^(compat\.v1\.)?(math\.|linalg\.|dtypes\.)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """The Keras function for a TensorFlow operation.

    Attributes:
      function: Its full name: "keras.ops.mean".
      tf_parameters: TensorFlow's parameters in their order.
      parameters: Keras's name of each; "-" and "!" as in names.toml.
      by_keyword: The names that are passed by keyword.
      added: A name and the source of an argument that the call needs, or "".
    """

    function: str
    tf_parameters: tuple[str, ...]
    parameters: tuple[str, ...]
    by_keyword: frozenset[str] = frozenset()
    added: tuple[str, str] = ("", "")


def find_operation(full: str) -> Operation | None:
    """Returns the Keras function for an operation's full name, or None."""
    return _OPERATIONS.get(_SUBMODULES.sub("", full.removeprefix(TF)))


def _read_renames(document: dict[str, Any]) -> dict[str, str]:
    return document["renamed"] | {
        f"{module['from']}.{name}": f"{module['to']}.{name}"
        for module in document["moved"]
        for name in module["names"].split()
    }


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


def _read_operations(document: dict[str, Any]) -> dict[str, Operation]:
    words = {k: v.split() for k, v in document.items() if k != "table"}
    rows = [f"{n} | keras.ops.{n} | x | x |" for n in words["elementwise"]]
    rows += [f"{n} | keras.ops.{n} | x y | x1 x2 |" for n in words["binary"]]
    for name in words["activations"]:
        rows.append(f"nn.{name} | keras.ops.{name} | features | x |")
    for name in words["backend"]:
        rows.append(f"{BACKEND}{name} | keras.ops.{name} | x | x |")
    found = {}
    for row in [*rows, *document["table"].strip().splitlines()]:
        names, function, theirs, ours, added = map(str.strip, row.split("|"))
        operation = Operation(
            function=function,
            tf_parameters=tuple(theirs.split()),
            parameters=tuple(word.rstrip("*") for word in ours.split()),
            by_keyword=frozenset(w[:-1] for w in ours.split() if w[-1] == "*"),
            added=added.partition("=")[::2],
        )
        found.update(dict.fromkeys(map(str.strip, names.split(",")), operation))
    return found


_DOCUMENT = tomllib.loads(
    pathlib.Path(__file__).with_name("names.toml").read_text("utf-8")
)
_OPERATIONS = _read_operations(_DOCUMENT["operations"])
RENAMED = _read_renames(_DOCUMENT)
"""The replacement for each name, and for each that begins so."""
DROPPED = _DOCUMENT["dropped"]
"""The calls that are removed, with the reason."""
MARKED = _read_marks(_DOCUMENT)
"""The names that are left, with what to do; also what begins so."""
MARKED_IN_STEPS = _DOCUMENT["marked_in_steps"]
"""The names that are left in code of steps, with what to do."""
WORDS = {k: frozenset(v.split()) for k, v in _DOCUMENT["languages"].items()}
"""The sets of words that decide about languages; see names.toml."""

"""Ports the source text of files; the room's entry."""

import ast
import dataclasses
import difflib
import sys
from typing import cast

from keras_strategies.migrate.calls import port_call
from keras_strategies.migrate.imports import (
    TENSORFLOW,
    find_roots,
    port_imports,
)
from keras_strategies.migrate.languages import File, follow
from keras_strategies.migrate.port import MARK, Port, keep_marks
from keras_strategies.migrate.removal import Statements, remove
from keras_strategies.migrate.scopes import Names
from keras_strategies.migrate.source import Rendered, Source
from keras_strategies.migrate.tables import SPECIAL
from keras_strategies.migrate.uses import port_use

# Expressions may be nested deeply, as in generated code.
_DEPTH = 20_000
_UNREADABLE = (SyntaxError, ValueError, RecursionError, MemoryError)
_DISTRIBUTION = "keras.distribution"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ported:
    """A ported file.

    Attributes:
      code: Its new text.
      left: The lines that are left, with the texts about them.
      num_changed: The number of lines that differ.
      error: Why it could not be read, or "".
    """

    code: str
    left: tuple[tuple[int, str], ...] = ()
    num_changed: int = 0
    error: str = ""


def port_sources(sources: dict[str, tuple[str, str]]) -> dict[str, Ported]:
    """Ports the files of a project together.

    Functions are followed from file to file, so that a loss that another file
    passes to `compile` is ported as code of a step.

    Args:
      sources: For each file its dotted module name, and its text.

    Returns:
      For each file what was ported, or why it could not be read.
    """
    results, files = {}, {}
    sys.setrecursionlimit(max(sys.getrecursionlimit(), _DEPTH))
    for key, (module, text) in sources.items():
        results[key] = Ported(code=text)
        if "tensorflow" in text or _DISTRIBUTION in text:
            try:
                files[key] = File(module=module, names=Names(Source(text)))
            except _UNREADABLE as error:
                results[key] = Ported(code=text, error=_describe(error))
    follow(list(files.values()))
    for key, file in files.items():
        if _concerns(file.names):
            results[key] = _port(file)
    return results


def _describe(error: Exception) -> str:
    line = f"line {getattr(error, 'lineno', 0)}: it must be Python 3"
    return f"{line}. Received: {error}. Convert Python 2 first (print, except)."


def _concerns(names: Names) -> bool:
    """Returns whether a file imports TensorFlow, or sets a distribution."""
    return any(find_roots(node) & TENSORFLOW for node in names.imports) or any(
        names.full_name(use).startswith(_DISTRIBUTION)
        for scope in names.scopes.values()
        for use in scope.uses
    )


def _port(file: File) -> Ported:
    port, text = Port(file), file.names.source.text
    scopes = file.names.scopes.values()
    for scope in scopes:
        for call in scope.calls:
            port_call(port, call)
        for _, value in scope.assigned:
            _port_backend(port, value)
    for scope in scopes:
        for use in scope.uses:
            port_use(port, use)
    _drop_devices(port, _render(port))
    rendered = _render(port)
    filled = port_imports(port, rendered)
    texts = keep_marks(port, rendered.keeps)
    code = _render(port, filled).text
    return Ported(
        code=code,
        left=_find_left(code, texts),
        num_changed=count_changed(text, code),
    )


def _render(port: Port, filled: Statements = frozenset()) -> Rendered:
    """Returns the text with the edits, without what is dropped."""
    removed = remove(port.names, port.dropped, filled)
    return Rendered(port.source.text, port.edits + removed)


def _port_backend(port: Port, value: ast.expr) -> None:
    """Sets the environment variable KERAS_BACKEND to JAX."""
    parent = port.names.parents[value]
    targets = getattr(parent, "targets", None) or [parent]
    if ast.unparse(targets[0]) == "os.environ['KERAS_BACKEND']":
        port.edit(value, port.source.span(value), ['"jax"'])


def _drop_devices(port: Port, rendered: Rendered) -> None:
    """Drops lists of devices that only dropped code has read."""
    uses = port.names.find_uses() - port.names.find_uses(rendered.keeps)
    for scope in port.names.scopes.values():
        for targets, value in scope.assigned:
            function = port.full_name(getattr(value, "func", None))
            is_unused = {(name, "") for name in targets} <= uses
            if SPECIAL.get(function) == "devices" and is_unused:
                port.dropped.add(cast(ast.stmt, port.names.parents[value]))


def _find_left(code: str, texts: set[str]) -> tuple[tuple[int, str], ...]:
    """Returns the lines below the comments that have these texts."""
    found, waiting = [], []
    for number, line in enumerate(code.splitlines(), 1):
        text = line.strip()
        if text.startswith(MARK) and text.removeprefix(MARK) in texts:
            waiting.append(text.removeprefix(MARK))
        elif not text.startswith("#"):
            found += [(number, each) for each in waiting]
            waiting = []
    return tuple(found)


def count_changed(before: str, after: str) -> int:
    """Returns the number of lines that differ, as a diff shows them."""
    old, new = before.splitlines(), after.splitlines()
    matcher = difflib.SequenceMatcher(None, old, new)
    spans = (span for tag, *span in matcher.get_opcodes() if tag != "equal")
    return sum(max(b - a, d - c) for a, b, c, d in spans)

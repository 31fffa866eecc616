"""Ports the source text of files; the room's entry."""

import dataclasses
import difflib
from collections.abc import Callable

import libcst as cst

from keras_strategies.migrate.call_rules import port_call
from keras_strategies.migrate.chains import dotted_name, module_of
from keras_strategies.migrate.edits import apply
from keras_strategies.migrate.imports import finish_imports, port_imports
from keras_strategies.migrate.keras_rules import (
    port_attribute,
    port_backend,
    port_method,
)
from keras_strategies.migrate.languages import File, follow
from keras_strategies.migrate.operation_rules import port_operation
from keras_strategies.migrate.rules import Left, Port, port_use
from keras_strategies.migrate.scopes import Names, read_names

_ROOTS = frozenset({"tensorflow", "tensorflow_estimator"})
_DISTRIBUTION = "keras.distribution"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ported:
    """A ported file.

    Attributes:
      code: Its new text.
      left: The lines that are left, by the lines of the new text.
      num_changed: The number of lines that differ.
    """

    code: str
    left: tuple[Left, ...]
    num_changed: int


class SyntaxProblem(ValueError):
    """A file that is not Python 3."""


def port_sources(
    sources: dict[str, tuple[str, str]],
    advance: Callable[[], None] = lambda: None,
) -> dict[str, Ported | SyntaxProblem]:
    """Ports the files of a project together.

    Functions are followed from file to file, so that a loss that another file
    passes to `compile` is ported as code of a step.

    Args:
      sources: For each file its dotted module name, and its text.
      advance: Is called when a file was ported.

    Returns:
      For each file what was ported, or why it could not be read.
    """
    results: dict[str, Ported | SyntaxProblem] = {}
    files = {}
    for key, (module, source) in sources.items():
        if not _may_concern(source):
            continue
        try:
            files[key] = _read(module, source)
        except SyntaxProblem as problem:
            results[key] = problem
    follow(list(files.values()))
    for key, (_, source) in sources.items():
        if key in files and _concerns(files[key].names):
            results[key] = _port(files[key], source)
        elif key not in results:
            results[key] = Ported(code=source, left=(), num_changed=0)
        advance()
    return results


def _may_concern(source: str) -> bool:
    return "tensorflow" in source or _DISTRIBUTION in source


def _read(module: str, source: str) -> File:
    try:
        return File(module=module, names=read_names(cst.parse_module(source)))
    except cst.ParserSyntaxError as error:
        raise SyntaxProblem(
            f"line {error.raw_line}: it must be Python 3. Received: a syntax "
            "error. Convert Python 2 first (print, except, dict methods)."
        ) from None


def _concerns(names: Names) -> bool:
    """Returns whether a file imports TensorFlow, or sets a distribution."""
    for node in names.imports:
        if isinstance(node, cst.ImportFrom):
            modules = [module_of(node)]
        else:
            modules = [dotted_name(alias.name) or "" for alias in node.names]
        if any(module.split(".")[0] in _ROOTS for module in modules):
            return True
    return any(
        (names.full_name(use) or "").startswith(_DISTRIBUTION)
        for scope in names.scopes
        for use in scope.uses
    )


def _port(file: File, source: str) -> Ported:
    names = file.names
    port = Port(file=file)
    port_imports(port)
    for scope in names.scopes:
        for call in scope.calls:
            _port_call(port, call)
        for _, value in scope.assigned:
            port_backend(port, value)
    for scope in names.scopes:
        for use in scope.uses:
            port_attribute(port, use)
            port_use(port, use)
    code = apply(names, port.edits).code
    if code != source:
        code = finish_imports(code, names)
    return Ported(
        code=code,
        left=_renumber(port.left, source, code),
        num_changed=count_changed(source, code),
    )


def _port_call(port: Port, call: cst.Call) -> None:
    full = port.full_name(call.func)
    is_ours = full.split(".")[0] in ("tensorflow", "keras")
    if is_ours and (
        port_operation(port, call, full) or port_call(port, call, full)
    ):
        return
    port_method(port, call, full)


def count_changed(before: str, after: str) -> int:
    """Returns the number of lines that differ, as a diff shows them."""
    old, new = before.splitlines(), after.splitlines()
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    return sum(
        max(end - start, other_end - other_start)
        for tag, start, end, other_start, other_end in matcher.get_opcodes()
        if tag != "equal"
    )


def _renumber(left: list[Left], before: str, after: str) -> tuple[Left, ...]:
    """Returns the lines that are left, by their numbers in the new text."""
    old, new = before.splitlines(), after.splitlines()
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    numbers: dict[int, int] = {}
    for _, start, end, other, other_end in matcher.get_opcodes():
        for index in range(start, end):
            # A replaced line's comments come before it.
            numbers[index + 1] = (
                min(other_end - (end - index) + 1, len(new))
                if other_end > other
                else other + 1
            )
    moved = [
        dataclasses.replace(each, line=numbers.get(each.line, each.line))
        for each in left
    ]
    return tuple(sorted(set(moved), key=lambda each: (each.line, each.text)))

"""Removes statements, and those around them that have nothing left."""

import ast
import re
from collections.abc import Set

from keras_strategies.migrate.scopes import Names
from keras_strategies.migrate.source import Edit
from keras_strategies.migrate.tables import SPECIAL

Statements = Set[ast.stmt]


def remove(names: Names, dropped: Statements, filled: Statements) -> list[Edit]:
    """Returns the edits that remove statements.

    Args:
      names: The names of the file.
      dropped: The statements.
      filled: The ones before which others were inserted.
    """
    dropped = set(dropped)
    waiting = list(dropped)
    while waiting:
        parent = names.parents.get(waiting.pop())
        if isinstance(parent, ast.stmt) and _is_idle(names, parent, dropped):
            dropped.add(parent)
            waiting.append(parent)
    return [
        _remove(names, node, dropped, filled)
        for node in dropped
        if names.parents[node] not in dropped
    ]


def _is_idle(names: Names, node: ast.stmt, dropped: Statements) -> bool:
    """Returns whether a statement does nothing without what is dropped."""
    parts = (ast.For, ast.If, ast.Try)
    if not isinstance(node, parts) or not set(node.body) <= dropped:
        return False
    # A condition that calls something may have an effect.
    head = getattr(node, "iter", None) or getattr(node, "test", None)
    function = names.full_name(getattr(head, "func", None))
    is_plain = head is None or isinstance(head, ast.Name | ast.Attribute)
    is_plain |= SPECIAL.get(function) == "devices"
    return is_plain and not node.orelse and not getattr(node, "finalbody", 0)


def _remove(
    names: Names, node: ast.stmt, dropped: Statements, filled: Statements
) -> Edit:
    source, parent = names.source, names.parents[node]
    start, end = source.span(node)
    blocks = [v for _, v in ast.iter_fields(parent) if isinstance(v, list)]
    block = next(block for block in blocks if node in block)
    is_empty = set(block) <= dropped and filled.isdisjoint(block)
    is_needed = is_empty and not isinstance(parent, ast.Module)
    after = source.text[end : source.physical_line(end)[1]]
    is_alone = start == source.line_start(start) and re.fullmatch(
        r"\s*(#.*)?\s*", after
    )
    if not is_alone or (is_needed and node is block[0]):
        return Edit(span=(start, end), parts=["pass"])
    lines = source.physical_line(start)[0], source.physical_line(end)[1]
    # Those between the statements of a removed one stay.
    comments = source.comments(lines) if hasattr(node, "body") else []
    indent, newline = source.indent(start), source.newline
    return Edit(span=lines, parts=[f"{indent}{c}{newline}" for c in comments])

"""Removes statements, and those around them that have nothing left."""

import ast

from keras_strategies.migrate.scopes import Names
from keras_strategies.migrate.source import Edit, Span

_BLOCKS = ("body", "orelse", "finalbody")


def remove(
    names: Names, dropped: set[ast.stmt], filled: set[ast.stmt]
) -> list[Edit]:
    """Returns the edits that remove statements.

    Args:
      names: The names of the file.
      dropped: The statements.
      filled: Those of them before which others were inserted.
    """
    dropped = set(dropped)
    waiting = list(dropped)
    while waiting:
        parent = names.parents.get(waiting.pop())
        body = getattr(parent, "body", None)
        if isinstance(body, list) and set(body) <= dropped and _is_idle(parent):
            dropped.add(parent)
            waiting.append(parent)
    return [
        _remove(names, node, dropped, filled)
        for node in dropped
        if names.parents[node] not in dropped
    ]


def _is_idle(node: ast.AST | None) -> bool:
    """Returns whether a statement does nothing without its body."""
    if isinstance(node, ast.Try):
        return not node.orelse and not node.finalbody
    if isinstance(node, ast.For | ast.If):
        # A condition that calls something may have an effect.
        head = node.iter if isinstance(node, ast.For) else node.test
        return not node.orelse and isinstance(head, ast.Name | ast.Attribute)
    return False


def _remove(
    names: Names,
    node: ast.stmt,
    dropped: set[ast.stmt],
    filled: set[ast.stmt],
) -> Edit:
    source, parent = names.source, names.parents[node]
    start, end = source.span(node)
    block = next(
        value
        for name in ("body", "orelse", "finalbody", "handlers")
        if isinstance(value := getattr(parent, name, None), list)
        and node in value
    )
    is_empty = set(block) <= dropped and not isinstance(parent, ast.Module)
    if is_empty and node is block[0] and not filled & set(block):
        return Edit(span=(start, end), parts=["pass"])
    index = block.index(node)
    around = [*block[index + 1 : index + 2], *block[index - 1 : index][:index]]
    for other in around:
        if other in dropped:
            continue
        other_start, other_end = source.span(other)
        if source.line_start(other_start) == source.line_start(start):
            is_next = other_start > start
            span = (start, other_start) if is_next else (other_end, end)
            return Edit(span=span, parts=[])
    lines = source.physical_start(start), source.physical_end(end)
    return Edit(span=lines, parts=_keep_comments(names, node, lines))


def _keep_comments(names: Names, node: ast.stmt, span: Span) -> list[str]:
    """Returns the comments between the statements of a removed one."""
    source = names.source
    last = node
    while body := getattr(last, "body", None):
        last = body[-1]
    inner = (span[0], source.span(last)[0])
    indent = source.indent(source.line_start(source.span(node)[0]))
    return [
        f"{indent}{comment}{source.newline}"
        for comment in source.comments(inner)
    ]

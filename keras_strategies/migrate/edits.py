"""Edits of a parsed file: replaced, dropped and marked code."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import libcst as cst

from keras_strategies.migrate.scopes import Names

MARK = "# ks-migrate: "

PLACEHOLDERS = {name: f"__{name}__" for name in ("ks", "keras", "jax")}
"""The names of modules in new code, until imports are added."""

_MODULE = re.compile(r"""(?<![\w."'])(ks|keras|jax)(?=\.|$)""")

Edit = Callable[[Any], Any]


@dataclasses.dataclass(kw_only=True)
class Edits:
    """The changes of a file, by node.

    Attributes:
      replaced: Functions from a node, with its parts changed, to a new node.
      dropped: Statements that are removed.
      marked: The comments above statements.
    """

    replaced: dict[cst.CSTNode, Edit] = dataclasses.field(default_factory=dict)
    dropped: set[cst.CSTNode] = dataclasses.field(default_factory=set)
    marked: dict[cst.CSTNode, list[str]] = dataclasses.field(
        default_factory=dict
    )

    def replace(self, node: cst.CSTNode, edit: Edit) -> None:
        """Replaces a node, after the edits of it that are there."""
        before = self.replaced.get(node, lambda part: part)
        self.replaced[node] = lambda part: edit(before(part))

    def mark(self, statement: cst.CSTNode, text: str) -> None:
        """Adds a comment above a statement, once."""
        texts = self.marked.setdefault(statement, [])
        if text not in texts:
            texts.append(text)


def apply(names: Names, edits: Edits) -> cst.Module:
    """Returns the module of the names with its edits."""
    edited = {*edits.replaced, *edits.dropped, *edits.marked}
    inner = {each for node in edited for each in names.ancestors(node)}
    return names.module.visit(_Applier(edits, names.module, edited | inner))


def name_node(text: str) -> cst.Name | cst.Attribute:
    """Returns the node of a dotted name."""
    first, *rest = text.split(".")
    node: cst.Name | cst.Attribute = cst.Name(first)
    for word in rest:
        node = cst.Attribute(node, cst.Name(word))
    return node


@functools.cache
def expression(text: str) -> cst.BaseExpression:
    """Returns the node of new code.

    Its modules have the names of `PLACEHOLDERS`, because the file may have
    other meanings for theirs.
    """
    return cst.parse_expression(_MODULE.sub(r"__\1__", text))


def keep_parentheses(old: Any, new: Any) -> Any:
    """Returns a replacement with the parentheses that the old node has."""
    if not getattr(old, "lpar", ()):
        return new
    return new.with_changes(
        lpar=[*old.lpar, *new.lpar], rpar=[*new.rpar, *old.rpar]
    )


def keyword(name: str, value: cst.BaseExpression) -> cst.Arg:
    """Returns an argument that is passed by keyword."""
    tight = cst.SimpleWhitespace("")
    return cst.Arg(
        value,
        keyword=cst.Name(name),
        equal=cst.AssignEqual(tight, tight),
    )


def code_of(node: cst.CSTNode) -> str:
    """Returns the source of a part of a file."""
    return cst.Module([]).code_for_node(node)


def word_of(arg: cst.Arg) -> str:
    """Returns the keyword of an argument, or ""."""
    return arg.keyword.value if arg.keyword is not None else ""


def text_of(node: cst.CSTNode) -> str | None:
    """Returns the value of a string, or None for another node."""
    value = node.evaluated_value if isinstance(node, cst.SimpleString) else None
    return value if isinstance(value, str) else None


def find_argument(call: cst.Call, name: str, index: int) -> cst.Arg | None:
    """Returns the argument of a name, which may be at a position."""
    for place, arg in enumerate(call.args):
        if word_of(arg) == name or (
            arg.keyword is None and place == index and not arg.star
        ):
            return arg
    return None


def positional(*values: cst.BaseExpression) -> list[cst.Arg]:
    """Returns arguments that are passed by position."""
    return list(
        with_args(cst.Call(cst.Name("f")), [*map(cst.Arg, values)]).args
    )


def change_keywords(call: cst.Call, words: dict[str, str | None]) -> cst.Call:
    """Renames arguments, and omits those whose new name is None."""
    args = []
    for arg in call.args:
        word = words.get(word_of(arg), word_of(arg))
        if word_of(arg) and word is not None:
            arg = arg.with_changes(keyword=cst.Name(word))
        if word is not None:
            args.append(arg)
    return with_args(call, args)


def with_args(call: cst.Call, args: list[cst.Arg]) -> cst.Call:
    """Returns a call with other arguments, which keep their line breaks."""
    if not args:
        return call.with_changes(
            args=[], whitespace_before_args=cst.SimpleWhitespace("")
        )
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    done = []
    for index, arg in enumerate(args):
        is_last = index == len(args) - 1
        if not is_last and not isinstance(arg.comma, cst.Comma):
            arg = arg.with_changes(comma=comma)
        if is_last:
            old = call.args[-1] if call.args else None
            if old is not None and arg is not old:
                arg = _close_like(arg, old)
        done.append(arg)
    return call.with_changes(args=done)


def _close_like(arg: cst.Arg, old: cst.Arg) -> cst.Arg:
    """Ends an argument as the old last one does, but keeps its comment."""
    space = getattr(arg.comma, "whitespace_after", None)
    first = getattr(space, "first_line", None)
    end = getattr(old.comma, "whitespace_after", None)
    if first is not None and first.comment is not None:
        if isinstance(end, cst.ParenthesizedWhitespace):
            return arg.with_changes(
                comma=old.comma.with_changes(
                    whitespace_after=end.with_changes(first_line=first)
                )
            )
        return arg
    return arg.with_changes(
        comma=old.comma, whitespace_after_arg=old.whitespace_after_arg
    )


class _Applier(cst.CSTTransformer):
    def __init__(
        self, edits: Edits, module: cst.Module, visited: set[cst.CSTNode]
    ) -> None:
        super().__init__()
        self._edits = edits
        self._visited = visited
        # Comments above the first statement are the module's.
        self._first = module.body[0] if module.body else None
        self._header = module.header
        # Lines and blocks that only had statements which were dropped.
        self._empty: set[int] = set()
        self._kept: list[Any] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        return node in self._visited

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        node = updated_node
        if original_node not in self._visited:
            return node
        if original_node in self._edits.dropped:
            return cst.RemoveFromParent()
        if isinstance(original_node, cst.SimpleStatementLine):
            edit = self._edits.replaced.get(original_node)
            if original_node.body and not node.body and edit is None:
                return self._add_empty(original_node)
        elif isinstance(original_node, cst.IndentedBlock | cst.Module):
            node = self._close_block(node)
        elif isinstance(original_node, cst.For | cst.If | cst.Try):
            node = self._close_compound(original_node, node)
        edit = self._edits.replaced.get(original_node)
        if edit is not None:
            node = edit(node)
        texts = self._edits.marked.get(original_node)
        if texts and hasattr(node, "leading_lines"):
            is_first = original_node is self._first
            node = _with_marks(node, texts, self._header if is_first else ())
        return node

    def _add_empty(self, node: Any) -> cst.SimpleStatementLine:
        # LibCST removes a line without statements by itself.
        line = cst.SimpleStatementLine(
            [cst.Pass()],
            leading_lines=[x for x in node.leading_lines if x.comment],
        )
        self._empty.add(id(line))
        self._kept.append(line)
        return line

    def _close_block(self, block: Any) -> Any:
        if not any(id(line) in self._empty for line in block.body):
            return block
        body, carried = [], []
        for line in block.body:
            if id(line) in self._empty:
                carried += line.leading_lines
                continue
            if carried:
                lines = [*carried, *line.leading_lines]
                line = line.with_changes(leading_lines=lines)
                carried = []
            body.append(line)
        is_empty = not body and isinstance(block, cst.IndentedBlock)
        if is_empty:
            body = [cst.SimpleStatementLine([cst.Pass()])]
        block = block.with_changes(body=body, footer=[*carried, *block.footer])
        if is_empty:
            self._empty.add(id(block))
            self._kept.append(block)
        return block

    def _close_compound(self, original: Any, node: Any) -> Any:
        if id(node.body) not in self._empty:
            return node
        if isinstance(node, cst.Try):
            is_removed = node.orelse is None and node.finalbody is None
        else:
            # A condition that calls something may have an effect.
            head = node.iter if isinstance(node, cst.For) else node.test
            is_plain = isinstance(head, cst.Name | cst.Attribute)
            is_removed = node.orelse is None and is_plain
        if not is_removed:
            return node
        line = self._add_empty(original)
        lines = [*line.leading_lines]
        lines += [x for x in node.body.footer if x.comment]
        line = line.with_changes(leading_lines=lines)
        self._empty.add(id(line))
        self._kept.append(line)
        return line


def _with_marks(
    node: Any, texts: list[str], header: Sequence[cst.EmptyLine]
) -> Any:
    lines = list(node.leading_lines)
    there = {line.comment.value for line in [*header, *lines] if line.comment}
    for text in texts:
        if MARK + text not in there:
            lines.append(cst.EmptyLine(comment=cst.Comment(MARK + text)))
    return node.with_changes(leading_lines=lines)

"""The port of one file: its edits, and the lines that are left."""

import ast
import itertools
import re
from collections.abc import Callable, Mapping, Sequence

from keras_strategies.migrate.languages import File, Language, is_decorator
from keras_strategies.migrate.scopes import Names, Scope
from keras_strategies.migrate.source import (
    Argument,
    Edit,
    Part,
    Span,
)

PACKAGE = "keras_strategies"
MARK = "# ks-migrate: "
_MODULE = re.compile(r"""(?<![\w."'])(ks|keras|jax)(?=\.|$)""")
_PLACE = re.compile(r"\{(\w+)\}")


class Port:
    """The edits of a file, as rules add them.

    Attributes:
      file: The file.
      names: Its names.
      source: Its text.
      edits: Its edits.
      dropped: Statements that are removed.
      marks: The nodes that are left, with texts about them.
      claimed: The nodes that a rule has decided about.
      aliases: The names of modules in new code.
    """

    def __init__(self, file: File) -> None:
        self.file = file
        self.names = file.names
        self.source = file.names.source
        self.edits: list[Edit] = []
        self.dropped: set[ast.stmt] = set()
        self.marks: dict[tuple[ast.AST, str], None] = {}
        self.claimed: set[ast.AST] = set()
        names = ("ks", "keras", "jax")
        self.aliases = {name: _choose_alias(name, self.names) for name in names}

    def full_name(self, node: ast.AST | None) -> str:
        """Returns the full name of a chain, or ""."""
        return self.names.full_name(node)

    def scope(self, node: ast.AST) -> Scope:
        """Returns the scope that a node is in; of a decorator, its function."""
        for each in [node, *self.names.ancestors(node)[:3]]:
            if is_decorator(self.names, each):
                return self.names.scopes[self.names.parents[each]]
        return self.names.scope_of[node]

    def language(self, node: ast.AST) -> Language:
        """Returns the language of the code that a node is in."""
        scope, nodes = self.scope(node), [node, *self.names.ancestors(node)]
        is_around = not self.file.around.isdisjoint(scope.enclosing())
        is_step = is_around or not self.file.symbolic.isdisjoint(nodes)
        other = Language.STEP if is_step else Language.HOST
        return self.file.get_language(scope) or other

    def is_step(self, node: ast.AST) -> bool:
        """Returns whether operations here become those of `keras.ops`."""
        return self.language(node) is Language.STEP

    def mark(self, node: ast.AST, text: str) -> None:
        """Leaves the line of a node, with a comment and a row."""
        self.claimed.add(node)
        self.marks[node, text] = None

    def replace(
        self, node: ast.AST, code: str, spans: Mapping[str, Span] | None = None
    ) -> None:
        """Replaces a node by new code, in which {x} is a part of the old."""
        pieces = _PLACE.split(code)
        parts: list[Part] = [self.alias(text) for text in pieces]
        parts[1::2] = [(spans or {})[name] for name in pieces[1::2]]
        self.edit(node, self.source.span(node), parts, code)

    def edit(
        self, node: ast.AST, span: Span, parts: Sequence[Part], code: str = ""
    ) -> None:
        """Replaces a part of a node's text.

        Args:
          node: The node.
          span: The part.
          parts: The new texts, and the parts of the old text that stay.
          code: New code, whose modules are imported.
        """
        self.claimed.add(node)
        if node in self.names.hidden:
            self.mark(node, "write this expression outside of its string")
            return
        modules = frozenset(_MODULE.findall(_PLACE.sub("", code)))
        self.edits.append(
            Edit(span=span, parts=parts, modules=modules, node=node)
        )

    def alias(self, code: str) -> str:
        """Returns code with the names that its modules have in this file."""
        return _MODULE.sub(lambda match: self.aliases[match[1]], code)

    def drop_arguments(self, call: ast.Call, dropped: list[Argument]) -> None:
        """Removes arguments, with their lines if they fill these."""
        text, args = self.source.text, self.source.arguments(call)
        runs = itertools.groupby(args, key=lambda arg: arg in dropped)
        for run in [list(run) for is_dropped, run in runs if is_dropped]:
            start, end = run[0].span[0], run[-1].span[1]
            comma = re.match(r"\s*,[ \t]*", text[end:])
            stop = end + (comma.end() if comma else 0)
            line = self.source.physical_line(start)[0]
            before = text[:start].rstrip()
            if before[-1] == "(" and text[stop:].lstrip()[0] == ")":
                span = (len(before), text.index(")", stop))
            elif run[-1] != args[-1]:
                span = (start, args[args.index(run[-1]) + 1].span[0])
            elif not text[line:start].strip() and text[stop] in "\r\n":
                span = (line, self.source.physical_line(stop)[1])
            elif run == args:
                span = (start, stop)
            else:
                span = (args[args.index(run[0]) - 1].span[1], end)
            self.edit(call, span, [])

    def add_argument(self, call: ast.Call, word: str, code: str) -> None:
        """Adds an argument behind the others."""
        args = self.source.arguments(call)
        end = args[-1].span[1] if args else self.source.span(call)[1] - 1
        before = f", {word}=" if args else f"{word}="
        self.edit(call, (end, end), [before + self.alias(code)], code)

    def insert_line(self, start: int, text: str) -> None:
        """Inserts a line before a logical line."""
        line = self.source.indent(start) + text + self.source.newline
        place = self.source.physical_line(start)[0]
        edit = Edit(span=(place, place), parts=[line])
        if edit not in self.edits:
            self.edits.append(edit)


def _choose_alias(module: str, names: Names) -> str:
    """Returns the name of a module in new code: another if that is taken."""
    full = PACKAGE if module == "ks" else module
    for name, origins in names.root.imports.items():
        if full in origins:
            return name
    scopes = names.scopes.values()
    is_taken = any(module in {*s.others, *s.functions} for s in scopes)
    return f"{module}_module" if is_taken else module


def keep_marks(port: Port, keeps: Callable[[int], bool]) -> set[str]:
    """Writes the comments of what is left; returns their texts."""
    texts = set()
    for node, text in port.marks:
        place = node
        while place in port.names.hidden:
            place = port.names.parents[place]
        offset, end = port.source.span(place)
        if not keeps(offset) and not keeps(end - 1):
            continue
        texts.add(text)
        start = port.source.line_start(offset)
        above = port.source.line_start(max(start - 1, 0))
        if MARK + text not in port.source.comments((above, start)):
            port.insert_line(start, MARK + text)
    return texts

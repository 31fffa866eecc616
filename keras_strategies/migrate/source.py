"""The text of one file, its syntax tree, and edits of the text."""

import ast
import bisect
import dataclasses
import functools
import io
import re
import sys
import tokenize
from collections.abc import Sequence
from typing import Any

Span = tuple[int, int]
Part = str | Span

_LINE_END = re.compile(r"\r\n|\r|\n")
_ENDS = (tokenize.NL, tokenize.NEWLINE)
_LAYOUT = (*_ENDS, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Argument:
    """An argument of a call.

    Attributes:
      word: Its keyword, or "".
      value: Its value.
      span: Where it is, with its keyword and parentheses.
      start: Where its value begins.
      has_star: Whether it is `*args` or `**kwargs`.
    """

    word: str
    value: ast.expr
    span: Span
    start: int
    has_star: bool


class Source:
    """A parsed file, which finds the places of nodes in its text.

    Attributes:
      text: The text.
      tree: Its syntax tree.
      newline: The characters that end a line.

    Raises:
      SyntaxError: if the text is not Python 3, as far as this Python knows it.
      ValueError: if its lines do not end in a line feed.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        if re.search(r"\r(?!\n)", text):
            raise ValueError("lines that end in a carriage return alone")
        self.newline = next(iter(_LINE_END.findall(text)), "\n")
        ends = (match.end() for match in _LINE_END.finditer(text))
        self._starts = [0, *ends, len(text), len(text) + 1]

    def span(self, node: ast.AST) -> Span:
        """Returns the offsets at which a node begins and ends."""
        place: Any = node
        start = self._offset(place.lineno, place.col_offset)
        return start, self._offset(place.end_lineno, place.end_col_offset)

    def code(self, node: ast.AST) -> str:
        """Returns the text of a node."""
        return self.text[slice(*self.span(node))]

    def is_located(self, node: ast.AST) -> bool:
        """Returns whether a node in an f-string has its true position."""
        if sys.version_info >= (3, 12):
            return True
        try:
            there = ast.parse(self.code(node), mode="eval").body
        except (SyntaxError, ValueError, IndexError):
            return False
        return ast.dump(there) == ast.dump(node)

    def arguments(self, call: ast.Call) -> list[Argument]:
        """Returns the arguments of a call in their order."""
        values = [*call.args, *call.keywords]
        values.sort(key=lambda node: (node.lineno, node.col_offset))
        end = self.span(call)[1]
        index = bisect.bisect_left(self._token_ends, end)
        # Older tokenizers do not look into f-strings.
        is_known = self._token_ends[index] == end
        spans = self._split(index) if is_known else map(self.span, values)
        return [
            Argument(
                word=getattr(node, "arg", None) or "",
                value=node.value if isinstance(node, ast.keyword) else node,
                span=span,
                start=self.text.index("=", span[0]) + 1
                if getattr(node, "arg", None)
                else span[0],
                has_star=self.text[span[0]] == "*",
            )
            for node, span in zip(values, spans, strict=False)
        ]

    def line_start(self, offset: int) -> int:
        """Returns where the logical line begins that an offset is in."""
        return self._logical[bisect.bisect_right(self._logical, offset) - 1]

    def indent(self, start: int) -> str:
        """Returns the indentation of a logical line."""
        return self.text[self.physical_line(start)[0] : start]

    def physical_line(self, offset: int) -> Span:
        """Returns the line of the text that an offset is in."""
        index = bisect.bisect_right(self._starts, offset)
        return self._starts[index - 1], self._starts[index]

    @functools.cached_property
    def _all_tokens(self) -> list[tuple[int, str, int, int]]:
        lines = io.StringIO(self.text, newline="").readline
        return [
            (
                kind,
                text,
                self._starts[start[0] - 1] + start[1],
                self._starts[end[0] - 1] + end[1],
            )
            for kind, text, start, end, _ in tokenize.generate_tokens(lines)
        ]

    @functools.cached_property
    def tokens(self) -> list[tuple[int, str, int, int]]:
        """The kinds, texts and offsets of tokens, without line ends."""
        return [t for t in self._all_tokens if t[0] not in _ENDS and t[1]]

    def comments(self, span: Span) -> list[str]:
        """Returns the comments in a part of the text."""
        return [
            text
            for kind, text, start, _ in self.tokens
            if kind == tokenize.COMMENT and span[0] <= start < span[1]
        ]

    @functools.cached_property
    def _token_ends(self) -> list[int]:
        return [end for *_, end in self.tokens]

    @functools.cached_property
    def _logical(self) -> list[int]:
        found, is_start = [0], True
        for kind, text, start, _ in self._all_tokens:
            if is_start and text and kind not in _LAYOUT:
                found.append(start)
            is_start = kind == tokenize.NEWLINE or (
                is_start and kind in _LAYOUT
            )
        return found

    def _offset(self, line: int, column: int) -> int:
        start = self._starts[line - 1]
        text = self.text[start : self._starts[line]]
        if not text.isascii():
            column = len(text.encode()[:column].decode())
        return start + column

    def _split(self, index: int) -> list[Span]:
        """Returns the parts between the commas before a closing token."""
        depth, pieces = 0, [self.tokens[index][2]]
        while True:
            _, text, start, stop = self.tokens[index]
            depth += (text in tuple(")]}")) - (text in tuple("([{"))
            if not depth:
                pieces.append(stop)
                break
            if depth == 1 and text == ",":
                pieces.append(start)
            index -= 1
        return [
            self._strip(start + (self.text[start] == ","), stop)
            for start, stop in zip(pieces[:0:-1], pieces[-2::-1], strict=True)
        ]

    def _strip(self, start: int, stop: int) -> Span:
        """Returns the part of a text without what is around its tokens."""
        first = bisect.bisect_right(self._token_ends, start)
        last = bisect.bisect_right(self._token_ends, stop)
        inner = [t for t in self.tokens[first:last] if t[0] != tokenize.COMMENT]
        return (inner[0][2], inner[-1][3]) if inner else (start, start)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edit:
    """A replaced part of a text; empty for an insertion.

    Attributes:
      span: The part.
      parts: The new texts, and the parts of the old text that stay.
      modules: The modules of new code.
      node: The code that it belongs to.
    """

    span: Span
    parts: Sequence[Part]
    modules: frozenset[str] = frozenset()
    node: ast.AST | None = None


class Rendered:
    """A text with its edits.

    Attributes:
      text: The new text.
      edits: The edits that it has: those in parts that others remove are none.
    """

    def __init__(self, text: str, edits: Sequence[Edit]) -> None:
        self._old = text
        # An insertion comes first, and then the edit that holds others.
        self._all = sorted(
            edits, key=lambda e: (e.span[0], e.span[0] < e.span[1], -e.span[1])
        )
        self._starts = [edit.span[0] for edit in self._all]
        self._kept: list[Span] = []
        self.edits: list[Edit] = []
        self.text = "".join(self._render((0, len(text) + 1), 0))
        self._kept.sort()

    def keeps(self, offset: int) -> bool:
        """Returns whether the new text has what was at an offset."""
        index = bisect.bisect_right(self._kept, (offset, len(self._old) + 1))
        return index > 0 and offset < self._kept[index - 1][1]

    def _render(self, span: Span, first: int) -> list[str]:
        at, stop = span
        texts = []
        index = max(first, bisect.bisect_left(self._starts, at))
        while index < len(self._all) and self._starts[index] < stop:
            edit = self._all[index]
            start, end = edit.span
            index += 1
            if start < at or end > stop:
                continue
            self.edits.append(edit)
            texts.append(self._keep(at, start))
            for part in edit.parts:
                is_text = isinstance(part, str)
                texts += [part] if is_text else self._render(part, index)
            at = end
        return [*texts, self._keep(at, stop)]

    def _keep(self, start: int, stop: int) -> str:
        if start < stop:
            self._kept.append((start, stop))
        return self._old[start:stop]

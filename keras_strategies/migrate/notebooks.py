"""Notebooks as one Python source, with their magics set aside."""

import dataclasses
import json
import re
from typing import Any

import libcst as cst

_CELL = "__ks_cell__({})"
_MAGIC = "__ks_magic__({})"
_MARKER = re.compile(r"^__ks_cell__\((\d+)\)$", re.M)
_PLACE = re.compile(r"__ks_magic__\((\d+)\)")
_MAGIC_LINE = re.compile(r"^\s*([\w, ]+=\s*)?[%!?]|^\s*[\w.]+\?+\s*$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notebook:
    """A notebook whose code cells are one source.

    Attributes:
      document: The parsed document.
      source: The code of all cells. A statement stands before each cell, and
        others in the place of magics.
      magics: The text of the magics.
      indent: The indentation of the document.
      has_newline: Whether the document ends in a line break.
    """

    document: dict[str, Any]
    source: str
    magics: tuple[str, ...]
    indent: int
    has_newline: bool

    def locate(self, code: str, line: int) -> str:
        """Returns the cell and the line in it of a line of ported code."""
        lines = code.splitlines()[:line]
        cell, start = 0, 0
        for number, text in enumerate(lines, 1):
            match = _MARKER.match(text)
            if match is not None:
                cell, start = int(match[1]), number
        return f"cell {cell + 1}, line {line - start}"

    def render(self, code: str) -> str:
        """Returns the document with ported code."""
        parts = _MARKER.split(code)[1:]
        document = json.loads(json.dumps(self.document))
        for number, text in zip(parts[::2], parts[1::2], strict=True):
            cell = document["cells"][int(number)]
            text = _PLACE.sub(lambda match: self.magics[int(match[1])], text)
            text = text.removeprefix("\n").removesuffix("\n")
            is_list = isinstance(cell["source"], list)
            cell["source"] = text.splitlines(keepends=True) if is_list else text
        ending = "\n" if self.has_newline else ""
        return (
            json.dumps(document, indent=self.indent or None, ensure_ascii=False)
            + ending
        )


def read_notebook(text: str) -> Notebook:
    """Reads a notebook.

    Raises:
      ValueError: if the text is not that of a notebook.
    """
    document = json.loads(text)
    if not isinstance(document, dict) or "cells" not in document:
        raise ValueError("a notebook must have cells. Received: none")
    magics: list[str] = []
    pieces = []
    for index, cell in enumerate(document["cells"]):
        if cell.get("cell_type") == "code":
            code = "".join(cell["source"])
            pieces += [_CELL.format(index), _hide_magics(code, magics)]
    indent = re.match(r"\{\s*\n( +)", text)
    return Notebook(
        document=document,
        source="\n".join([*pieces, ""]),
        magics=tuple(magics),
        indent=len(indent[1]) if indent else 0,
        has_newline=text.endswith("\n"),
    )


def _hide_magics(code: str, magics: list[str]) -> str:
    """Returns a cell's code with statements in the place of its magics."""
    if _is_python(code):
        return code
    is_whole = code.lstrip().startswith("%%")
    lines: list[str] = []
    is_continued = False
    count = len(magics)
    for line in code.split("\n"):
        if is_continued:
            magics[-1] += f"\n{line}"
        elif _MAGIC_LINE.match(line) and not is_whole:
            space = line[: len(line) - len(line.lstrip())]
            lines.append(space + _MAGIC.format(len(magics)))
            magics.append(line.lstrip())
        else:
            lines.append(line)
            continue
        is_continued = line.endswith("\\")
    hidden = "\n".join(lines)
    if not is_whole and _is_python(hidden):
        return hidden
    # A cell of another language, or one that is not finished.
    del magics[count:]
    magics.append(code)
    return _MAGIC.format(len(magics) - 1)


def _is_python(code: str) -> bool:
    try:
        cst.parse_module(code)
    except cst.ParserSyntaxError:
        return False
    return True

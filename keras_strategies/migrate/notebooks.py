"""Notebooks as one Python source, with their magics set aside."""

import ast
import copy
import json
import re
from typing import Any

_CELL = "__ks_cell__({})"
_MAGIC = "__ks_magic__({})"
_MARKER = re.compile(r"^__ks_cell__\((\d+)\)$", re.M)
_PLACE = re.compile(r"__ks_magic__\((\d+)\)")
# Lines that begin with %, ! or ?, or end in ?; and those that they continue in.
_MAGIC_LINE = re.compile(
    r"^([ \t]*)((?:[\w, ]+=[ \t]*)?[%!?](?:.*\\\n)*.*|[\w.]+\?+[ \t]*)$", re.M
)


class Notebook:
    """A notebook whose code cells are one source.

    Attributes:
      text: The notebook.
      document: The parsed document.
      source: The code of all cells. A statement stands before each cell, and
        others in the place of magics.
      magics: The text of the magics.

    Raises:
      ValueError: if the text is not that of a notebook.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.document: Any = json.loads(text)
        if not isinstance(self.document, dict) or "cells" not in self.document:
            raise ValueError("a notebook must have cells, but it has none")
        self.magics: list[str] = []
        pieces = []
        for index, cell in enumerate(self.document["cells"]):
            if cell.get("cell_type") == "code":
                code = "".join(cell["source"])
                code = _hide_magics(code, self.magics)
                pieces += [_CELL.format(index), code]
        self.source = "\n".join([*pieces, ""])

    def locate(self, code: str, line: int) -> str:
        """Returns the cell and the line in it of a line of ported code."""
        before = "".join(code.splitlines(keepends=True)[:line])
        marker = list(_MARKER.finditer(before))[-1]
        number = before[marker.end() :].rstrip("\n").count("\n")
        return f", cell {int(marker[1]) + 1}, line {number}"

    def render(self, code: str) -> str:
        """Returns the document with ported code."""
        parts = _MARKER.split(code)[1:]
        document = copy.deepcopy(self.document)
        for number, text in zip(parts[::2], parts[1::2], strict=True):
            cell = document["cells"][int(number)]
            text = _PLACE.sub(lambda match: self.magics[int(match[1])], text)
            text = text.removeprefix("\n").removesuffix("\n")
            is_list = isinstance(cell["source"], list)
            cell["source"] = text.splitlines(keepends=True) if is_list else text
        indent = re.match(r"\{\s*\n( +)", self.text)
        width = len(indent[1]) if indent else None
        new = json.dumps(document, indent=width, ensure_ascii=False)
        return new + "\n" * self.text.endswith("\n")


def _hide_magics(code: str, magics: list[str]) -> str:
    """Returns a cell's code with statements in the place of its magics."""
    if _is_python(code):
        return code
    count = len(magics)

    def hide(match: re.Match[str]) -> str:
        magics.append(match[2])
        return match[1] + _MAGIC.format(len(magics) - 1)

    hidden = _MAGIC_LINE.sub(hide, code)
    if not code.lstrip().startswith("%%") and _is_python(hidden):
        return hidden
    # A cell of another language, or one that is not finished.
    magics[count:] = [code]
    return _MAGIC.format(count)


def _is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except (SyntaxError, ValueError):
        return False
    return True

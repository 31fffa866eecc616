"""The files that a command ports: finds, reads, ports and writes them."""

import dataclasses
import io
import os
import pathlib
import tokenize
from collections.abc import Callable, Iterator, Sequence

from keras_strategies.migrate.notebooks import Notebook, read_notebook
from keras_strategies.migrate.port import Ported, SyntaxProblem, port_sources

_SUFFIXES = (".py", ".ipynb")
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A line that is left.

    Attributes:
      place: The file with the line, or with the cell and the line in it.
      text: What is left, and the way out.
    """

    place: str
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileReport:
    """A file, before and after it was ported.

    Attributes:
      path: The file.
      before: Its text.
      after: Its new text.
      num_changed: The number of lines that change.
      left: The lines that are left.
      error: Why it could not be read, or "".
      encoding: Its encoding.
    """

    path: str
    before: str = ""
    after: str = ""
    num_changed: int = 0
    left: tuple[Row, ...] = ()
    error: str = ""
    encoding: str = "utf-8"

    def write(self) -> None:
        """Writes the new text, by way of a file beside it."""
        path = pathlib.Path(self.path)
        new = path.with_name(f"{path.name}.ks-migrate")
        new.write_bytes(self.after.encode(self.encoding))
        new.chmod(path.stat().st_mode & 0o777)
        os.replace(new, path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    path: str
    text: str
    encoding: str
    notebook: Notebook | None = None

    @property
    def code(self) -> str:
        """The Python code."""
        return self.text if self.notebook is None else self.notebook.source


def find_files(paths: Sequence[str]) -> list[str]:
    """Returns the Python files and notebooks at the paths, sorted in each.

    Raises:
      FileNotFoundError: if a path does not exist.
    """
    found: dict[str, None] = {}
    for path in paths:
        if os.path.isdir(path):
            found.update(dict.fromkeys(sorted(_walk(path))))
        elif os.path.exists(path):
            found[path] = None
        else:
            raise FileNotFoundError(
                f"A path must exist. Received: {path!r}. Pass a Python file, a "
                "notebook or a folder."
            )
    return list(found)


def _walk(folder: str) -> Iterator[str]:
    for root, folders, names in os.walk(folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(".")
            and name not in _SKIPPED
            and not os.path.exists(os.path.join(root, name, "pyvenv.cfg"))
        ]
        for name in names:
            if name.endswith(_SUFFIXES):
                yield os.path.join(root, name)


def port_files(
    paths: Sequence[str],
    advance: Callable[[], None] = lambda: None,
) -> list[FileReport]:
    """Ports files together, without writing them.

    Args:
      paths: The files.
      advance: Is called when a file was ported.
    """
    sources: dict[str, _Source] = {}
    reports: dict[str, FileReport] = {}
    for path in paths:
        try:
            sources[path] = _read(path)
        except (OSError, ValueError, SyntaxError) as error:
            reports[path] = FileReport(path=path, error=_describe(error))
    modules = {path: _module_of(path) for path in sources}
    ported = port_sources(
        {
            path: (modules[path], source.code)
            for path, source in sources.items()
        },
        advance,
    )
    for path, result in ported.items():
        reports[path] = _report(sources[path], result)
    return [reports[path] for path in paths]


def _describe(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error)


def _read(path: str) -> _Source:
    data = pathlib.Path(path).read_bytes()
    if path.endswith(".ipynb"):
        text = data.decode("utf-8")
        notebook = read_notebook(text)
        return _Source(
            path=path, text=text, encoding="utf-8", notebook=notebook
        )
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return _Source(path=path, text=data.decode(encoding), encoding=encoding)


def _module_of(path: str) -> str:
    parts = pathlib.PurePath(path).with_suffix("").parts
    names = [part for part in parts if part.isidentifier()]
    return ".".join(names[:-1] if names[-1:] == ["__init__"] else names)


def _report(source: _Source, result: Ported | SyntaxProblem) -> FileReport:
    if isinstance(result, SyntaxProblem):
        return FileReport(path=source.path, error=str(result))
    after, rows = result.code, []
    for left in result.left:
        place = f"{source.path}:{left.line}"
        if source.notebook is not None:
            where = source.notebook.locate(result.code, left.line)
            place = f"{source.path}, {where}"
        rows.append(Row(place=place, text=left.text))
    if source.notebook is not None:
        is_same = result.code == source.code
        after = source.text if is_same else source.notebook.render(result.code)
    return FileReport(
        path=source.path,
        before=source.text,
        after=after,
        num_changed=result.num_changed,
        left=tuple(rows),
        encoding=source.encoding,
    )

"""The files that a command ports: finds, reads, ports and writes them."""

import dataclasses
import io
import os
import pathlib
import tokenize
from collections.abc import Iterator, Sequence

from keras_strategies.migrate.notebooks import Notebook
from keras_strategies.migrate.porting import Ported, port_sources

_SUFFIXES = (".py", ".ipynb")
_SKIPPED = frozenset({"__pycache__", "node_modules", "site-packages"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileReport:
    """A file, before and after it was ported.

    Attributes:
      path: The file.
      before: Its text.
      after: Its new text.
      num_changed: The number of lines that change.
      left: The places of lines that are left, with the texts about them.
      error: Why it could not be read, or "".
      encoding: Its encoding.
    """

    path: str
    before: str = ""
    after: str = ""
    num_changed: int = 0
    left: tuple[tuple[str, str], ...] = ()
    error: str = ""
    encoding: str = "utf-8"

    def write(self) -> None:
        """Writes the new text, by way of a file beside it."""
        path = pathlib.Path(self.path)
        new = path.with_name(f"{path.name}.ks-migrate")
        new.write_bytes(self.after.encode(self.encoding))
        new.chmod(path.stat().st_mode & 0o777)
        os.replace(new, path)


def find_files(paths: Sequence[str]) -> list[str]:
    """Returns the Python files and notebooks at the paths, sorted in each.

    Raises:
      FileNotFoundError: if a path does not exist.
    """
    found: dict[str, None] = {}
    for path in paths:
        if not os.path.exists(path):
            raise FileNotFoundError(
                f"A path must exist. Received: {path!r}. Pass a Python file, a "
                "notebook or a directory."
            )
        files = sorted(_walk(path)) if os.path.isdir(path) else [path]
        found.update(dict.fromkeys(files))
    return list(found)


def _walk(directory: str) -> Iterator[str]:
    for root, directories, names in os.walk(directory):
        directories[:] = [
            name
            for name in directories
            if not name.startswith(".")
            and name not in _SKIPPED
            and not os.path.exists(os.path.join(root, name, "pyvenv.cfg"))
        ]
        found = [name for name in names if name.endswith(_SUFFIXES)]
        yield from (os.path.join(root, name) for name in found)


def port_files(paths: Sequence[str]) -> list[FileReport]:
    """Ports files together, without writing them."""
    reports: dict[str, FileReport] = {}
    notebooks: dict[str, Notebook] = {}
    sources: dict[str, tuple[str, str]] = {}
    for path in paths:
        try:
            text, encoding = _read(path)
            if path.endswith(".ipynb"):
                notebooks[path] = Notebook(text)
        except (OSError, ValueError, SyntaxError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            reports[path] = FileReport(path=path, error=reason)
            continue
        reports[path] = FileReport(path=path, before=text, encoding=encoding)
        code = notebooks[path].source if path in notebooks else text
        sources[path] = (_get_module(path), code)
    for path, result in port_sources(sources).items():
        reports[path] = _complete(reports[path], notebooks.get(path), result)
    return [reports[path] for path in paths]


def _read(path: str) -> tuple[str, str]:
    """Returns a file's text and its encoding."""
    data = pathlib.Path(path).read_bytes()
    encoding = "utf-8"
    if path.endswith(".py"):
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    return data.decode(encoding), encoding


def _get_module(path: str) -> str:
    parts = pathlib.PurePath(path).with_suffix("").parts
    names = [part for part in parts if part.isidentifier()]
    return ".".join(names[:-1] if names[-1:] == ["__init__"] else names)


def _complete(
    report: FileReport, notebook: Notebook | None, result: Ported
) -> FileReport:
    """Returns a report with what was ported."""
    after = result.code
    places = [f":{line}" for line, _ in result.left]
    if notebook is not None:
        is_same = after == notebook.source
        after = report.before if is_same else notebook.render(after)
        places = [notebook.locate(result.code, line) for line, _ in result.left]
    left = tuple(
        (report.path + place, text)
        for place, (_, text) in zip(places, result.left, strict=True)
    )
    changed, error = result.num_changed, result.error
    return dataclasses.replace(
        report, after=after, left=left, num_changed=changed, error=error
    )

"""The command `keras-strategies migrate`: ports files and reports."""

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import Progress

DESCRIPTION = """\
Ports scripts for tf.distribute: their names, imports, tapes, and the TensorFlow
operations in code of steps. Comments and formatting stay. What cannot be ported
gets a comment that begins with `# ks-migrate:`, and a row in the report. The
exit code is 1 if such lines are left, and 2 if a file could not be read.
Without --write, nothing is written.
"""
EXAMPLES = """\
examples:
  keras-strategies migrate train.py --diff
  keras-strategies migrate src notebooks/train.ipynb --write
"""
_LEFT, _ERROR = 1, 2
# Fewer files take no longer than a progress bar takes to read.
_MANY = 20
# Expressions may be nested deeply, as in generated code.
_DEPTH = 20_000


def migrate(
    paths: Sequence[str],
    *,
    writes: bool = False,
    shows_diff: bool = False,
    report_file: str | None = None,
) -> int:
    """Ports Python files and notebooks, and prints what is left.

    Args:
      paths: Files and folders.
      writes: Whether to write the files.
      shows_diff: Whether to print the changes.
      report_file: A file for the report, or None.

    Returns:
      The exit status: 0 if nothing is left, 1 if lines are left, 2 if a file
      could not be read.
    """
    if importlib.util.find_spec("libcst") is None:
        return _fail(
            "LibCST must be installed, because it parses the scripts. "
            "Received: no module libcst. Run `pip install "
            '"keras-strategies[migrate]"`.'
        )
    from keras_strategies.migrate import project, report

    console = Console(highlight=False)
    try:
        files = project.find_files(paths)
    except FileNotFoundError as error:
        return _fail(str(error))
    with _track(console, len(files)) as advance, _deep_recursion():
        reports = project.port_files(files, advance)
    changed = [each for each in reports if each.before != each.after]
    for each in changed:
        if shows_diff:
            report.print_diff(console, each)
        if writes:
            each.write()
    report.print_report(console, reports, is_written=writes)
    if report_file is not None:
        report.write_report(report_file, reports)
    if any(each.error for each in reports):
        return _ERROR
    return _LEFT if any(each.left for each in reports) else 0


def _fail(message: str) -> int:
    print(f"keras-strategies migrate: {message}", file=sys.stderr)
    return _ERROR


@contextlib.contextmanager
def _track(console: Console, count: int) -> Iterator[Callable[[], None]]:
    """Shows progress on many files, on a terminal."""
    if count < _MANY or not console.is_terminal:
        yield lambda: None
        return
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("files", total=count)
        yield lambda: progress.advance(task)


@contextlib.contextmanager
def _deep_recursion() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _DEPTH))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)

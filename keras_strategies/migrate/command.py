"""The command that ports scripts for tf.distribute to keras_strategies.

It ports their names, imports, tapes, and the TensorFlow operations in code of
steps. Comments and formatting stay. What cannot be ported gets a comment that
begins with `# ks-migrate:`, and a row in the report. The exit code is 1 if such
lines are left, and 2 if a file could not be read. Without --write, nothing is
written.
"""

import sys
from collections.abc import Sequence

from rich.console import Console

DESCRIPTION = __doc__ or ""
EXAMPLES = """\
examples:
  keras-strategies migrate train.py --diff
  keras-strategies migrate src notebooks/train.ipynb --write
"""


def migrate(
    paths: Sequence[str],
    *,
    writes: bool = False,
    shows_diff: bool = False,
) -> int:
    """Ports Python files and notebooks, and prints what is left.

    Args:
      paths: Files and directories.
      writes: Whether to write the files.
      shows_diff: Whether to print the changes.

    Returns:
      The exit status: 0 if nothing is left, 1 if lines are left, 2 if a file
      could not be read.
    """
    # Only now: `--help` needs none of them.
    from keras_strategies.migrate import project, report

    console = Console(highlight=False)
    try:
        reports = project.port_files(project.find_files(paths))
    except FileNotFoundError as error:
        print(f"keras-strategies migrate: {error}", file=sys.stderr)
        return 2
    for each in reports:
        if each.before != each.after and shows_diff:
            report.print_diff(console, each)
        if each.before != each.after and writes:
            each.write()
    report.print_report(console, reports, is_written=writes)
    if any(each.error for each in reports):
        return 2
    return int(any(each.left for each in reports))

"""The command `keras-strategies report`, which prints reports of runs."""

import json
import sys
from collections.abc import Sequence

from rich.console import Console

from keras_strategies.cluster.untrusted import escape_controls
from keras_strategies.reporting.document import (
    ReportError,
    compute_goodput,
    load_report,
    print_reports,
)

_WRONG_ARGUMENTS = 2


def report(directories: Sequence[str], *, as_json: bool = False) -> int:
    """Prints the reports of runs, side by side.

    Args:
      directories: The runs' directories.
      as_json: Whether to print JSON instead of a table: an object with each
        directory's report.

    Returns:
      The exit status: 0 on success, 2 if a directory has no report.
    """
    reports = {}
    for directory in directories:
        try:
            reports[directory] = load_report(directory)
        except ReportError as error:
            text = escape_controls(str(error))
            print(f"keras-strategies report: {text}", file=sys.stderr)
            return _WRONG_ARGUMENTS
    if as_json:
        shown = {
            name: one | {"goodput": compute_goodput(one)}
            for name, one in reports.items()
        }
        print(json.dumps(shown, indent=1))
    else:
        print_reports(Console(highlight=False), reports)
    return 0

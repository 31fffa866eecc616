"""The command `keras-strategies doctor`: a report on this machine.

This process imports neither jax nor keras. Checks that need these packages run
in child processes, so that a report is printed even if they crash or hang.
"""

import os
import socket
from collections.abc import Mapping

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keras_strategies.cli.doctor.clusters import (
    Cluster,
    check_address,
    check_clusters,
)
from keras_strategies.cli.doctor.findings import (
    PROBLEMS,
    Finding,
    Level,
    Part,
    Report,
)
from keras_strategies.cli.doctor.gpus import check_gpus
from keras_strategies.cli.doctor.installed import (
    check_packages,
    check_variables,
)
from keras_strategies.cli.doctor.run_probe import check_jax
from keras_strategies.cli.doctor.tpus import check_tpus
from keras_strategies.cluster.untrusted import escape_controls

_MARKS = {
    Level.PROBLEM: ("x", "bold red"),
    Level.WARNING: ("!", "yellow"),
    Level.NOTE: ("-", "cyan"),
    Level.GOOD: ("+", "green"),
}
_WIDEST = 100


def doctor(*, quick: bool = False, timeout_s: float = 30.0) -> int:
    """Checks this machine and its cluster, and prints a report.

    In a cluster, the call is collective unless `quick` is true.

    Args:
      quick: Whether to skip the checks that start JAX.
      timeout_s: The time to wait for the other processes, in seconds.

    Returns:
      The exit status: 0, or 1 if a check found a problem.
    """
    report = examine(os.environ, quick=quick, timeout_s=timeout_s)
    print_report(report)
    return int(any(f.level is Level.PROBLEM for f in report.problems))


def examine(
    environ: Mapping[str, str], *, quick: bool, timeout_s: float
) -> Report:
    """Runs all checks and returns a report. Collective unless `quick` is true.

    Args:
      environ: The environment variables.
      quick: Whether to skip the checks that start JAX.
      timeout_s: The time to wait for the other processes, in seconds.
    """
    cluster_part, cluster = check_clusters(environ)
    info = None if cluster is None else cluster.info
    # Otherwise a job is started, which finds such problems.
    address_part = check_address(environ, info) if quick and info else None
    chip_parts = [check_gpus(environ, info), check_tpus()]
    jax_parts = [] if quick else _check_jax(environ, cluster, timeout_s)
    name = socket.gethostname()
    if info and info.num_processes > 1 and info.process_id is not None:
        name = f"process {info.process_id} of {info.num_processes}"
    parts = (
        check_packages(),
        check_variables(environ),
        cluster_part,
        address_part,
        *chip_parts,
        *jax_parts,
    )
    return Report(
        name=name,
        is_chief=not (info and info.process_id),
        parts=tuple(filter(None, parts)),
    )


def print_report(report: Report, console: Console | None = None) -> None:
    """Prints a report; prints only problems if this is not the chief.

    Args:
      report: The report.
      console: The console to print to; None for stdout.
    """
    if console is None:
        console = Console(highlight=False)
        if not console.is_terminal or console.width > _WIDEST:
            console.width = min(console.width, _WIDEST)
    if report.is_chief:
        for part in report.parts:
            # The problems in all parts are printed at the end.
            harmless = [f for f in part.findings if f.level not in PROBLEMS]
            if part.rows or harmless:
                console.print(_format_part(part, harmless))
    console.print(_format_result(report))


def _check_jax(
    environ: Mapping[str, str], cluster: Cluster | None, timeout_s: float
) -> list[Part]:
    """Runs the checks that start JAX."""
    part, has_devices = check_jax("Devices", None, environ, timeout_s)
    # A cluster that has neither `info` nor `error` is checked as a job, because
    # JAX itself reads the variables.
    if cluster is None or cluster.error or not has_devices:
        return [part]
    if cluster.info and not cluster.address:
        return [part]
    return [part, check_jax("Job", cluster, environ, timeout_s)[0]]


def _format_part(part: Part, harmless: list[Finding]) -> Group:
    title = Text(part.title, style="bold")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="dim", min_width=22)
    table.add_column(overflow="fold")
    for name, value in part.rows:
        # Rich would interpret plain strings as markup.
        table.add_row(Text(_escape(name)), Text(_escape(value)))
    parts = [table, *map(_format_finding, harmless)]
    return Group(title, *(Padding(p, (0, 0, 0, 2)) for p in parts), Text())


def _format_result(report: Report) -> Group:
    """Formats the problems, followed by a line with the result."""
    problems = report.problems
    style = "green" if not problems else _MARKS[problems[0].level][1]
    result = Text(f"{report.name}: {report.summary}", style=style)
    return Group(*map(_format_finding, problems), result)


def _escape(text: str) -> str:
    # Text may contain values from the environment, which must not send control
    # codes to a terminal.
    return escape_controls(text, keeps="\n")


def _format_finding(finding: Finding) -> Table:
    mark, style = _MARKS[finding.level]
    text = Text(_escape(finding.text))
    if finding.fix:
        text.append(f"\n{_escape(finding.fix)}", style="dim")
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1, style=style)
    table.add_column(overflow="fold")
    table.add_row(mark, text)
    return table

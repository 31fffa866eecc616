"""`keras-strategies doctor`: a report on this machine, with advice.

Nothing here imports jax or keras: what needs them runs in processes of its own,
so that this one starts and reports whatever is wrong with them.
"""

import dataclasses
import datetime
import json
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
from keras_strategies.cli.doctor.findings import Finding, Level, Part, Report
from keras_strategies.cli.doctor.installed import (
    check_packages,
    check_variables,
)
from keras_strategies.cli.doctor.run_probe import (
    check_devices,
    check_job,
    has_met,
)

_MARKS = {
    Level.FAULT: ("x", "bold red"),
    Level.WARNING: ("!", "yellow"),
    Level.NOTE: ("-", "cyan"),
    Level.GOOD: ("+", "green"),
}
_WIDEST = 100


def doctor(
    *, quick: bool = False, as_json: bool = False, timeout_s: float = 30.0
) -> int:
    """Looks at everything and prints a report. Collective in a cluster.

    Args:
      quick: Whether to look only at what is known without starting JAX.
      as_json: Whether to print JSON in place of the text.
      timeout_s: How long to wait for the other processes, in seconds.

    Returns:
      The exit status: 0, or 1 if there is a fault.
    """
    report = examine(os.environ, quick=quick, timeout_s=timeout_s)
    if as_json and report.is_chief:
        print(json.dumps(report.as_dict(), indent=1))
    elif not as_json:
        print_report(report)
    return 1 if report.has_faults else 0


def examine(
    environ: Mapping[str, str], *, quick: bool, timeout_s: float
) -> Report:
    """Everything that can be found out. Collective, unless it is quick.

    Args:
      environ: The environment variables.
      quick: Whether to leave out what starts JAX.
      timeout_s: How long to wait for the other processes, in seconds.
    """
    cluster_part, cluster = check_clusters(environ)
    info = None if cluster is None else cluster.info
    # In a meeting all ask process 0, which need not be tried out.
    findings = []
    if info is not None:
        findings += check_address(info, environ, connects=quick)
    started = [] if quick else _started(environ, cluster, timeout_s)
    if any(has_met(part) for part in started):
        # So the address serves, whatever it looks like: machines that share
        # one, as tasks or virtual nodes do, meet at one of its own.
        findings = [f for f in findings if f.level is not Level.FAULT]
    number = None if info is None else info.process_id
    process = ""
    if info is not None and info.num_processes > 1 and number is not None:
        process = f"process {number} of {info.num_processes}"
    return Report(
        host=socket.gethostname(),
        when=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        process=process,
        is_chief=not number,
        parts=(
            check_packages(),
            check_variables(environ, _num_cores()),
            dataclasses.replace(
                cluster_part, findings=(*cluster_part.findings, *findings)
            ),
            *started,
        ),
    )


def print_report(report: Report, console: Console | None = None) -> None:
    """Prints a report; of a process that is not the chief, what is wrong.

    Args:
      report: What was found.
      console: Where to print; None for stdout.
    """
    if console is None:
        console = Console(highlight=False)
        if not console.is_terminal or console.width > _WIDEST:
            console.width = min(console.width, _WIDEST)
    if report.is_chief:
        for part in report.parts:
            # The rest is said at the end.
            if part.rows or part.calm:
                console.print(_of_part(part))
    console.print(_of_result(report))


def _started(
    environ: Mapping[str, str], cluster: Cluster | None, timeout_s: float
) -> list[Part]:
    """What is found out by starting JAX."""
    # Without an `info` JAX reads the variables itself.
    if cluster and (cluster.error or (cluster.info and not cluster.address)):
        cluster = None
    part, has_devices = check_devices(environ, is_alone=cluster is None)
    if cluster is None or not has_devices:
        return [part]
    return [part, check_job(cluster, environ, timeout_s)]


def _num_cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # Not on macOS.
        return os.cpu_count() or 1


def _of_part(part: Part) -> Group:
    title = Text(part.title, style="bold")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True, style="dim", min_width=22)
    table.add_column(overflow="fold")
    for name, value in part.rows:
        # Neither is markup.
        table.add_row(Text(name), Text(value))
    parts = [table, *map(_of_finding, part.calm)]
    return Group(title, *(Padding(p, (0, 0, 0, 2)) for p in parts), Text())


def _of_result(report: Report) -> Group:
    """The line with the result, after what is wrong."""
    where, wrong = report.process or report.host, report.wrong
    style = "green" if not wrong else _MARKS[wrong[0].level][1]
    result = Text(f"{where}: {report.summary}", style=style)
    return Group(*map(_of_finding, wrong), result)


def _of_finding(finding: Finding) -> Table:
    mark, style = _MARKS[finding.level]
    text = Text(finding.text)
    if finding.fix:
        text.append(f"\n{finding.fix}", style="dim")
    table = Table.grid(padding=(0, 1))
    table.add_column(width=1, style=style)
    table.add_column(overflow="fold")
    table.add_row(mark, text)
    return table

"""`keras-strategies doctor`: a report on this machine, with advice.

Nothing here imports jax or keras: what needs them runs in processes of its own,
so that this one starts and reports whatever is wrong with them.
"""

import dataclasses
import datetime
import json
import os
import pathlib
import socket
import sys
from collections.abc import Mapping

from keras_strategies.cli.doctor.clusters import (
    Cluster,
    check_address,
    check_clusters,
)
from keras_strategies.cli.doctor.findings import Level, Part, Report
from keras_strategies.cli.doctor.installed import (
    check_packages,
    check_variables,
)
from keras_strategies.cli.doctor.report_html import as_html
from keras_strategies.cli.doctor.report_text import print_report
from keras_strategies.cli.doctor.run_probe import (
    check_devices,
    check_flags,
    check_job,
    has_met,
)

_WRONG_ARGUMENTS = 2


def doctor(
    *,
    quick: bool = False,
    html: str | None = None,
    as_json: bool = False,
    timeout_s: float = 30.0,
) -> int:
    """Looks at everything and prints a report. Collective in a cluster.

    Args:
      quick: Whether to look only at what is known without starting JAX.
      html: A file to write the report to, too, as a page.
      as_json: Whether to print JSON in place of the text.
      timeout_s: How long to wait for the other processes, in seconds.

    Returns:
      The exit status: 0; 1 if there is a fault; 2 if `html` cannot be written.
    """
    page = None if html is None else pathlib.Path(html).resolve()
    if page is not None and not os.access(page.parent, os.W_OK):
        print(
            f"keras-strategies doctor: {html!r} cannot be written. Give a "
            "file in a folder that exists.",
            file=sys.stderr,
        )
        return _WRONG_ARGUMENTS
    report = examine(os.environ, quick=quick, timeout_s=timeout_s)
    if as_json and report.is_chief:
        print(json.dumps(report.as_dict(), indent=1))
    elif not as_json:
        print_report(report)
    if page is not None and report.is_chief:
        page.write_text(as_html(report), encoding="utf-8")
    elif page is not None and report.wrong:
        print(
            f"keras-strategies doctor: {html!r} is written by process 0 alone.",
            file=sys.stderr,
        )
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


def _started(
    environ: Mapping[str, str], cluster: Cluster | None, timeout_s: float
) -> list[Part]:
    """What is found out by starting JAX."""
    flags = tuple(check_flags(environ))
    if flags:
        return [Part(title="Devices", findings=flags)]
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

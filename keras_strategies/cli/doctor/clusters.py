"""Finds the cluster that environment variables describe, and checks it."""

import dataclasses
import errno
import ipaddress
import socket
from collections.abc import Iterator, Mapping

from keras_strategies.cli.doctor.findings import (
    Finding,
    Part,
    Row,
    good,
    note,
    problem,
    warning,
)
from keras_strategies.cluster.exchange.rendezvous import split_address
from keras_strategies.cluster.resolvers.launchers import LAUNCHERS, Launcher
from keras_strategies.cluster.spec import TaskInfo
from keras_strategies.cluster.tasks import task_info
from keras_strategies.watchdog.launcher_pipe import LAUNCHER_FD

_CONNECT_S = 2.0
_BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
_DOCUMENT = "docs/clusters.md"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster that environment variables describe.

    Attributes:
      launcher: The launcher that set the variables.
      info: This process's task; None if the variables are invalid, or if only
        JAX can determine it.
      error: What is wrong with the variables; empty if they are valid.
    """

    launcher: Launcher
    info: TaskInfo | None = None
    error: str = ""

    @property
    def name(self) -> str:
        """The name of the launcher."""
        return self.launcher.name

    @property
    def address(self) -> str | None:
        """The coordinator's address; None if unknown, or for one process."""
        if self.info is None or self.info.num_processes == 1:
            return None
        return self.info.coordinator_address


def find_clusters(environ: Mapping[str, str]) -> list[Cluster]:
    """Returns the clusters that environment variables describe.

    The first one is used.
    """
    clusters = []
    for launcher in LAUNCHERS:
        if not launcher.has_started(environ):
            continue
        info, error = None, ""
        try:
            if launcher.resolver is not None:
                info = task_info(launcher.resolver(environ=environ))
        except (ValueError, TypeError, RuntimeError) as raised:
            error = str(raised)
        clusters.append(Cluster(launcher=launcher, info=info, error=error))
    return clusters


def check_clusters(environ: Mapping[str, str]) -> tuple[Part, Cluster | None]:
    """Checks a cluster's variables without connecting to other processes.

    Returns:
      A tuple of this part of the report and the cluster, which is None if no
      variables describe one.
    """
    clusters = find_clusters(environ)
    if not clusters:
        alone = ("variables", "none of a cluster, so this process runs alone")
        findings = tuple(_check_incomplete(environ))
        return Part(title="Cluster", rows=(alone,), findings=findings), None
    chosen = clusters[0]
    names = filter(environ.get, chosen.launcher.variables.split())
    setter = chosen.launcher.setter or chosen.name
    if environ.get(LAUNCHER_FD):
        setter = "keras-strategies launch"
    rows = (
        ("variables", ", ".join(names)),
        ("set by", setter),
        ("use", chosen.launcher.use),
        *_make_rows(chosen.info),
    )
    findings = (*map(_make_finding, clusters), *_check_several(clusters))
    return Part(title="Cluster", rows=rows, findings=findings), chosen


def check_address(
    info: TaskInfo, environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Checks whether processes can connect to the coordinator's address.

    Process 0 tries to listen at the address, and closes the socket again. Other
    processes resolve the host name and connect to process 0.

    Args:
      info: This process's task.
      environ: The environment variables. If JAX_COORDINATOR_BIND_ADDRESS is
        set, process 0 listens at that address instead.
    """
    address = info.coordinator_address
    if address is None or info.num_processes == 1 or info.process_id is None:
        return
    if info.process_id == 0:
        address = environ.get(_BIND_ADDRESS) or address
    host, port = split_address(address)
    try:
        places = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        yield problem(
            f"The name of the coordinator, {host!r}, cannot be resolved here: "
            f"{getattr(error, 'strerror', None) or error}.",
            "Use a name that all machines can resolve, or an IP address.",
        )
        return
    family, kind, _, _, place = places[0]
    is_host = not info.process_id
    with socket.socket(family, kind) as connection:
        connection.settimeout(_CONNECT_S)
        try:
            if is_host:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                connection.bind(place)
                connection.listen()
            else:
                connection.connect(place)
        except OSError as error:
            explain = _explain_listening if is_host else _explain_connecting
            yield explain(error, address)
            return
    yield good(
        f"Process 0 can listen at {address}."
        if is_host
        else f"The coordinator at {address} can be reached."
    )
    others = {a.rpartition(":")[0] for a in info.addresses if a}
    ip = str(place[0])
    if is_host and len(others) > 1 and _is_loopback(ip):
        yield problem(
            f"{address} is a loopback address ({ip}), so processes on other "
            "machines cannot reach it.",
            "Correct this machine's /etc/hosts, or use its IP address.",
        )


def _explain_listening(error: OSError, address: str) -> Finding:
    if error.errno == errno.EADDRINUSE:
        return problem(
            f"Another process listens at the coordinator's address, {address}.",
            "End that process if it is not needed, or use another port for "
            "process 0.",
        )
    return problem(
        f"Process 0 cannot listen at {address}: {error.strerror or error}.",
        "The coordinator's address must belong to the machine that runs "
        "process 0, and its port must be at least 1024. Correct the cluster.",
    )


def _explain_connecting(error: OSError, address: str) -> Finding:
    if isinstance(error, ConnectionRefusedError):
        return warning(
            "The machine of the coordinator answers, but no process listens at "
            f"{address}.",
            "Start process 0, which listens as soon as it creates its "
            "strategy.",
        )
    return problem(
        f"The coordinator at {address} cannot be reached within "
        f"{_CONNECT_S:.0f} s: {error.strerror or 'no answer'}.",
        "Check that the address is correct, and look for a firewall or network "
        "policy between the machines.",
    )


def _is_loopback(ip: str) -> bool:
    return ipaddress.ip_address(ip.split("%")[0]).is_loopback


def _make_rows(info: TaskInfo | None) -> Iterator[Row]:
    if info is None:
        return
    process = "none (an evaluator does not train)"
    if info.process_id is not None:
        process = f"{info.process_id} of {info.num_processes}"
    yield "task", f"{info.type} {info.index}" + ", chief" * info.is_chief
    yield "process", process
    if info.coordinator_address is not None:
        yield "coordinator", info.coordinator_address


def _make_finding(cluster: Cluster) -> Finding:
    if cluster.error:
        return problem(
            f"The variables of {cluster.name} are not valid: {cluster.error}",
            f"See {_DOCUMENT} for the variables that {cluster.name} sets.",
        )
    if cluster.info is None:
        return note(
            f"The variables of {cluster.name} are set. JAX reads them itself.",
            f"In a script, use {cluster.launcher.use}.",
        )
    return good(
        f"{cluster.name} describes a cluster of {cluster.info.num_processes} "
        f"process{'es' * (cluster.info.num_processes > 1)}."
    )


def _check_several(clusters: list[Cluster]) -> Iterator[Finding]:
    if len(clusters) > 1:
        names = " and ".join(cluster.name for cluster in clusters)
        yield warning(
            f"The variables of {names} are all set.",
            f"The variables of {clusters[0].name} are used. Unset the others, "
            f"or pass the intended resolver to the strategy ({_DOCUMENT}).",
        )


def _check_incomplete(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Yields a finding if a SLURM job gives this process no number."""
    if environ.get("SLURM_JOB_ID"):
        yield warning(
            "This process runs in a SLURM job but not in one of its steps, so "
            "it runs alone.",
            "Start the script with `srun`.",
        )

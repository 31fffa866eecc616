"""Finds the cluster that environment variables describe, and checks it."""

import dataclasses
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
from keras_strategies.cluster.exchange.rendezvous import (
    listen,
    split_address,
)
from keras_strategies.cluster.resolvers.launchers import LAUNCHERS, Launcher
from keras_strategies.cluster.spec import TaskInfo
from keras_strategies.cluster.tasks import task_info

_CONNECT_S = 2.0
_BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
_DOCUMENT = "docs/clusters.md"
_LISTENING = (
    "End the process that uses this port if it is not needed. The address must "
    "belong to the machine that runs process 0, and its port must be at least "
    "1024."
)
_NO_STEP = (
    warning(
        "This process runs in a SLURM job but not in one of its steps, so it "
        "runs alone.",
        "Start the script with `srun`.",
    ),
)
_CONNECTING = (
    "Start process 0, which listens as soon as it creates its strategy. Check "
    "that the address is correct, and look for a firewall or network policy "
    "between the machines."
)


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
        no_step = _NO_STEP if environ.get("SLURM_JOB_ID") else ()
        return Part(title="Cluster", rows=(alone,), findings=no_step), None
    chosen = clusters[0]
    names = filter(environ.get, chosen.launcher.variables.split())
    rows = (
        ("variables", ", ".join(names)),
        ("set by", chosen.launcher.setter or chosen.name),
        ("use", chosen.launcher.use),
        *_make_rows(chosen.info),
    )
    findings = (*map(_make_finding, clusters), *_check_several(clusters))
    return Part(title="Cluster", rows=rows, findings=findings), chosen


def check_address(environ: Mapping[str, str], info: TaskInfo) -> Part | None:
    """Checks whether processes can connect to the coordinator's address.

    Process 0 tries to listen at the address, and closes the socket again. Other
    processes connect to process 0.

    Args:
      environ: The environment variables. If JAX_COORDINATOR_BIND_ADDRESS is
        set, process 0 listens at that address instead.
      info: This process's task.

    Returns:
      A part of the report; None if the process connects to no other.
    """
    address = info.coordinator_address
    if address is None or info.num_processes == 1 or info.process_id is None:
        return None
    does, fix = "connect to the coordinator at", _CONNECTING
    is_host = info.process_id == 0
    if is_host:
        does, fix = "listen at", _LISTENING
        address = environ.get(_BIND_ADDRESS) or address
    place = split_address(address)
    ip = None
    try:
        socket.getaddrinfo(*place)  # `listen` would leak a socket.
        if is_host:
            with listen(*place, backlog=1) as server:
                ip = server.getsockname()[0]
        else:
            socket.create_connection(place, timeout=_CONNECT_S).close()
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        found = problem(f"This process cannot {does} {address}: {reason}.", fix)
        return Part(title="Address", findings=(found,))
    findings = [good(f"This process can {does} {address}.")]
    others = {a.rpartition(":")[0] for a in info.addresses if a}
    if ip and len(others) > 1 and ipaddress.ip_address(ip).is_loopback:
        findings.append(
            problem(
                f"{address} is a loopback address ({ip}), so processes on "
                "other machines cannot reach it.",
                "Correct this machine's /etc/hosts, or use its IP address.",
            )
        )
    return Part(title="Address", findings=tuple(findings))


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

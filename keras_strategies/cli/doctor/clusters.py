"""Finds the cluster that environment variables describe, and checks it."""

import dataclasses
import errno
import ipaddress
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from keras_strategies.cli.doctor.findings import (
    Finding,
    Level,
    Part,
    Row,
    fault,
    good,
    note,
    warning,
)
from keras_strategies.cluster.exchange.rendezvous import split_address
from keras_strategies.cluster.resolvers.kubernetes_resolver import (
    KubernetesClusterResolver,
    has_job_variables,
)
from keras_strategies.cluster.resolvers.resolver import ClusterResolver
from keras_strategies.cluster.resolvers.slurm_resolver import (
    SlurmClusterResolver,
)
from keras_strategies.cluster.resolvers.tf_config_resolver import (
    TFConfigClusterResolver,
)
from keras_strategies.cluster.resolvers.torchrun_resolver import (
    TorchrunClusterResolver,
)
from keras_strategies.cluster.spec import TaskInfo
from keras_strategies.cluster.tasks import task_info
from keras_strategies.watchdog.launcher_pipe import LAUNCHER_FD

_CONNECT_S = 2.0
_BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
_DOCUMENT = "docs/clusters.md"
_SETTERS = {
    "TF_CONFIG": "the program that started this process",
    "SLURM": "srun",
    "Open MPI": "mpirun",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster that environment variables describe.

    Attributes:
      name: The launcher that set the variables, such as "SLURM".
      variables: The names of the variables that are set.
      use: The strategy or resolver that a script should use in this cluster.
      info: This process's task; None if the variables are invalid, or if only
        JAX can determine it.
      error: What is wrong with the variables; empty if they are valid.
    """

    name: str
    variables: tuple[str, ...]
    use: str
    info: TaskInfo | None = None
    error: str = ""

    @property
    def address(self) -> str | None:
        """The coordinator's address; None if unknown, or for one process."""
        if self.info is None or self.info.num_processes == 1:
            return None
        return self.info.coordinator_address


# For each launcher: the variables that are shown, of which some mark it if all
# are set; the resolver; and how a script uses the cluster. If several launchers
# have set theirs, the first one is used, as in MultiWorkerMirroredStrategy().
_TF_CONFIG, _KUBERNETES = "TF_CONFIG", "Kubernetes"
_Kind = tuple[str, int, str, Callable[..., ClusterResolver] | None]
_KINDS: dict[str, _Kind] = {
    _TF_CONFIG: (
        "TF_CONFIG",
        1,
        "MultiWorkerMirroredStrategy(), or TFConfigClusterResolver()",
        TFConfigClusterResolver,
    ),
    "SLURM": (
        "SLURM_PROCID SLURM_STEP_NODELIST SLURM_STEP_NUM_TASKS "
        "SLURM_STEP_TASKS_PER_NODE",
        2,
        "SlurmClusterResolver()",
        SlurmClusterResolver,
    ),
    # `has_job_variables` detects this kind.
    _KUBERNETES: (
        "JOB_COMPLETION_INDEX JAX_PROCESS_COUNT JAX_COORDINATOR_ADDRESS "
        "JAX_COORDINATOR_PORT JOBSET_NAME PROCESS_ID NUM_PROCESSES "
        "COORDINATOR_ADDRESS",
        0,
        "KubernetesClusterResolver()",
        KubernetesClusterResolver,
    ),
    "torchrun": (
        "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT",
        2,
        "TorchrunClusterResolver()",
        TorchrunClusterResolver,
    ),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE",
        2,
        "jax.distributed.initialize() before the strategy",
        None,
    ),
    "Cloud TPU": (
        "TPU_WORKER_ID TPU_WORKER_HOSTNAMES TPU_TOPOLOGY",
        1,
        "TPUStrategy(), after jax.distributed.initialize()",
        None,
    ),
}


def find_clusters(environ: Mapping[str, str]) -> list[Cluster]:
    """Returns the clusters that environment variables describe.

    The first one is used.
    """
    clusters = []
    for name, (shown, num_marks, use, resolver) in _KINDS.items():
        variables = shown.split()
        is_set = all(environ.get(mark) for mark in variables[:num_marks])
        if name == _KUBERNETES:
            is_set = has_job_variables(environ)
        if not is_set:
            continue
        info, error = None, ""
        if resolver is not None:
            try:
                info = task_info(resolver(environ=environ))
            except (ValueError, TypeError, RuntimeError) as raised:
                error = str(raised)
        cluster = Cluster(
            name=name,
            variables=tuple(n for n in variables if environ.get(n)),
            use=use,
            info=info,
            error=error,
        )
        clusters.append(cluster)
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
    rows = (
        ("variables", ", ".join(chosen.variables)),
        ("set by", _find_setter(chosen, environ)),
        ("use", chosen.use),
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
        yield fault(
            f"The name of the coordinator, {host!r}, cannot be resolved here: "
            f"{getattr(error, 'strerror', None) or error}.",
            "Use a name that all machines can resolve, or an IP address.",
        )
        return
    family, kind, _, _, place = places[0]
    with socket.socket(family, kind) as connection:
        if info.process_id:
            yield _try_to_connect(connection, address, place)
            return
        found = _try_to_listen(connection, address, place)
    yield found
    others = {a.rpartition(":")[0] for a in info.addresses if a}
    ip = str(place[0])
    if found.level is Level.GOOD and len(others) > 1 and _is_loopback(ip):
        yield fault(
            f"{address} is a loopback address ({ip}), so processes on other "
            "machines cannot reach it.",
            "Correct this machine's /etc/hosts, or use its IP address.",
        )


def _try_to_listen(
    server: socket.socket, address: str, place: tuple[Any, ...]
) -> Finding:
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(place)
        server.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return fault(
                "Another process listens at the coordinator's address, "
                f"{address}.",
                "End that process if it is not needed, or use another port for "
                "process 0.",
            )
        return fault(
            f"Process 0 cannot listen at {address}: {error.strerror or error}.",
            "The coordinator's address must belong to the machine that runs "
            "process 0, and its port must be at least 1024. Correct the "
            "cluster.",
        )
    return good(f"Process 0 can listen at {address}.")


def _try_to_connect(
    connection: socket.socket, address: str, place: tuple[Any, ...]
) -> Finding:
    try:
        connection.settimeout(_CONNECT_S)
        connection.connect(place)
    except ConnectionRefusedError:
        return warning(
            f"The machine of the coordinator answers, but no process listens "
            f"at {address}.",
            "Start process 0, which listens as soon as it creates its "
            "strategy.",
        )
    except OSError as error:
        return fault(
            f"The coordinator at {address} cannot be reached within "
            f"{_CONNECT_S:.0f} s: {error.strerror or 'no answer'}.",
            "Check that the address is correct, and look for a firewall or "
            "network policy between the machines.",
        )
    return good(f"The coordinator at {address} can be reached.")


def _is_loopback(ip: str) -> bool:
    return ipaddress.ip_address(ip.split("%")[0]).is_loopback


def _find_setter(cluster: Cluster, environ: Mapping[str, str]) -> str:
    if cluster.name == _TF_CONFIG and environ.get(LAUNCHER_FD):
        return "keras-strategies launch"
    return _SETTERS.get(cluster.name, cluster.name)


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
        return fault(
            f"The variables of {cluster.name} are not valid: {cluster.error}",
            f"See {_DOCUMENT} for the variables that {cluster.name} sets.",
        )
    if cluster.info is None:
        return note(
            f"The variables of {cluster.name} are set. JAX reads them itself.",
            f"In a script, use {cluster.use}.",
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
    """Yields a finding if a SLURM job or pod gives this process no number."""
    if environ.get("SLURM_JOB_ID"):
        yield warning(
            "This process runs in a SLURM job but not in one of its steps, so "
            "it runs alone.",
            "Start the script with `srun`.",
        )
    elif environ.get("KUBERNETES_SERVICE_HOST"):
        yield note(
            "This pod does not belong to an indexed Job, so the process runs "
            "alone.",
            "To train in several pods, set `completionMode: Indexed` "
            f"({_DOCUMENT}).",
        )

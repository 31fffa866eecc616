"""The cluster that the variables of a process describe, and who set them."""

import dataclasses
import errno
import ipaddress
import socket
from collections.abc import Callable, Iterator, Mapping

from keras_strategies.cli.doctor.findings import (
    Finding,
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
from keras_strategies.cluster.watchdog.launcher_pipe import LAUNCHER_FD

_CONNECT_S = 2.0
_BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
_DOCUMENT = "docs/clusters.md"
_SETTERS = {
    "TF_CONFIG": "whoever started this process",
    "SLURM": "srun",
    "Open MPI": "mpirun",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster that some variables describe.

    Attributes:
      name: What set the variables: "SLURM".
      variables: The names of those that were found.
      use: What a script takes for it.
      info: This process's place; None if JAX alone can tell, or for a fault.
      error: Why the variables cannot be followed; empty if they can.
    """

    name: str
    variables: tuple[str, ...]
    use: str
    info: TaskInfo | None = None
    error: str = ""

    @property
    def address(self) -> str | None:
        """Where the processes meet; None for one alone, and if unknown."""
        if self.info is None or self.info.num_processes == 1:
            return None
        return self.info.coordinator_address


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kind:
    name: str
    marks: tuple[str, ...]  # All of them are set.
    shown: tuple[str, ...]
    use: str
    resolver: Callable[..., ClusterResolver] | None = None


# The one that comes first is taken, as MultiWorkerMirroredStrategy() would.
_KINDS = (
    _Kind(
        name="TF_CONFIG",
        marks=("TF_CONFIG",),
        shown=("TF_CONFIG",),
        use="MultiWorkerMirroredStrategy(), or TFConfigClusterResolver()",
        resolver=TFConfigClusterResolver,
    ),
    _Kind(
        name="SLURM",
        marks=("SLURM_PROCID", "SLURM_STEP_NODELIST"),
        shown=(
            "SLURM_PROCID",
            "SLURM_STEP_NUM_TASKS",
            "SLURM_STEP_NODELIST",
            "SLURM_STEP_TASKS_PER_NODE",
        ),
        use="SlurmClusterResolver()",
        resolver=SlurmClusterResolver,
    ),
    _Kind(
        name="Kubernetes",
        marks=(),  # Several names: `has_job_variables` knows.
        shown=(
            "JOB_COMPLETION_INDEX",
            "JAX_PROCESS_COUNT",
            "JAX_COORDINATOR_ADDRESS",
            "JAX_COORDINATOR_PORT",
            "JOBSET_NAME",
            "PROCESS_ID",
            "NUM_PROCESSES",
            "COORDINATOR_ADDRESS",
        ),
        use="KubernetesClusterResolver()",
        resolver=KubernetesClusterResolver,
    ),
    _Kind(
        name="torchrun",
        marks=("RANK", "WORLD_SIZE"),
        shown=("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        use="TorchrunClusterResolver()",
        resolver=TorchrunClusterResolver,
    ),
    _Kind(
        name="Open MPI",
        marks=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        shown=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        use="jax.distributed.initialize() before the strategy",
    ),
    _Kind(
        name="Cloud TPU",
        marks=("TPU_WORKER_ID",),
        shown=("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "TPU_TOPOLOGY"),
        use="TPUStrategy(), after jax.distributed.initialize()",
    ),
)


def find_clusters(environ: Mapping[str, str]) -> list[Cluster]:
    """The clusters that variables describe, the one to be taken first."""
    return [_read(kind, environ) for kind in _KINDS if _is_set(kind, environ)]


def check_clusters(environ: Mapping[str, str]) -> tuple[Part, Cluster | None]:
    """What the variables say of a cluster, without connecting to anybody.

    Returns:
      The part of the report, and the cluster that is taken; None for none.
    """
    found = find_clusters(environ)
    if not found:
        alone = ("variables", "none of a cluster: this process is alone")
        findings = tuple(_of_half_clusters(environ))
        return Part(title="Cluster", rows=(alone,), findings=findings), None
    taken = found[0]
    rows = (
        ("variables", ", ".join(taken.variables)),
        ("set by", _setter(taken, environ)),
        ("use", taken.use),
        *_rows_of(taken.info),
    )
    findings = (*map(_finding_of, found), *_of_several(found))
    return Part(title="Cluster", rows=rows, findings=findings), taken


def check_address(
    info: TaskInfo, environ: Mapping[str, str], *, connects: bool
) -> Iterator[Finding]:
    """Whether processes can meet at the chief's address.

    Process 0 tries to listen there, and lets go of it; the others look its
    name up and, if they are to, connect.

    Args:
      info: This process's place.
      environ: The environment variables: JAX_COORDINATOR_BIND_ADDRESS says
        where process 0 listens, if elsewhere.
      connects: Whether the others connect, too: process 0 has to be there.
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
            f"The name of the coordinator, {host!r}, is not known here: "
            f"{getattr(error, 'strerror', None) or error}.",
            "Give a name that all machines know, or an IP address.",
        )
        return
    if info.process_id == 0:
        yield from _try_to_listen(address, places[0], info)
    elif connects:
        yield _try_to_connect(address, places[0])


Place = tuple[int, int, int, str, tuple[object, ...]]


def _try_to_listen(
    address: str, place: Place, info: TaskInfo
) -> Iterator[Finding]:
    try:
        with socket.socket(place[0], place[1]) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(place[4])
            server.listen()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            yield fault(
                f"Another process listens at the coordinator's address, "
                f"{address}.",
                "If that is no job that is to run now, end it; or give "
                "process 0 another port.",
            )
        else:
            yield fault(
                f"Process 0 cannot listen at {address}: "
                f"{error.strerror or error}.",
                "The coordinator's address is one of the machine that runs "
                "process 0, with a port from 1024. Correct the cluster.",
            )
        return
    yield good(f"Process 0 can listen at {address}.")
    others = {a.rpartition(":")[0] for a in info.addresses if a}
    if len(others) > 1 and _is_loopback(place):
        yield fault(
            f"{address} is an address of this machine for itself "
            f"({place[4][0]}): processes on other machines cannot reach it.",
            "Correct this machine's /etc/hosts, or give its IP address.",
        )


def _try_to_connect(address: str, place: Place) -> Finding:
    try:
        with socket.socket(place[0], place[1]) as connection:
            connection.settimeout(_CONNECT_S)
            connection.connect(place[4])
    except ConnectionRefusedError:
        return warning(
            f"The machine of the coordinator answers, but nobody listens "
            f"at {address}.",
            "Start process 0; it listens once it has come to its strategy.",
        )
    except OSError as error:
        what = error.strerror or "no answer"
        return fault(
            f"The coordinator at {address} cannot be reached within "
            f"{_CONNECT_S:.0f} s: {what}.",
            "Look for a firewall or network policy between the machines, "
            "and whether the address is the right one.",
        )
    return good(f"The coordinator at {address} can be reached.")


def _is_loopback(place: Place) -> bool:
    return ipaddress.ip_address(str(place[4][0]).split("%")[0]).is_loopback


def _is_set(kind: _Kind, environ: Mapping[str, str]) -> bool:
    if not kind.marks:
        return has_job_variables(environ)
    return all(environ.get(name) for name in kind.marks)


def _read(kind: _Kind, environ: Mapping[str, str]) -> Cluster:
    info, error = None, ""
    if kind.resolver is not None:
        try:
            info = task_info(kind.resolver(environ=environ))
        except (ValueError, TypeError, RuntimeError) as raised:
            error = str(raised)
    return Cluster(
        name=kind.name,
        variables=tuple(name for name in kind.shown if environ.get(name)),
        use=kind.use,
        info=info,
        error=error,
    )


def _setter(cluster: Cluster, environ: Mapping[str, str]) -> str:
    if cluster.name == "TF_CONFIG" and environ.get(LAUNCHER_FD):
        return "keras-strategies launch"
    return _SETTERS.get(cluster.name, cluster.name)


def _rows_of(info: TaskInfo | None) -> Iterator[Row]:
    if info is None:
        return
    process = "none (an evaluator trains nothing)"
    if info.process_id is not None:
        process = f"{info.process_id} of {info.num_processes}"
    yield "task", f"{info.type} {info.index}" + ", chief" * info.is_chief
    yield "process", process
    if info.coordinator_address is not None:
        yield "coordinator", info.coordinator_address


def _finding_of(cluster: Cluster) -> Finding:
    if cluster.error:
        return fault(
            f"The variables of {cluster.name} cannot be followed: "
            f"{cluster.error}",
            f"{_DOCUMENT} says what {cluster.name} sets.",
        )
    if cluster.info is None:
        return note(
            f"The variables of {cluster.name} are set; JAX reads them itself.",
            f"In a script: {cluster.use}.",
        )
    return good(
        f"{cluster.name} describes a cluster of {cluster.info.num_processes} "
        f"process{'es' * (cluster.info.num_processes > 1)}."
    )


def _of_several(found: list[Cluster]) -> Iterator[Finding]:
    if len(found) > 1:
        names = " and ".join(cluster.name for cluster in found)
        yield warning(
            f"The variables of {names} are all set.",
            f"{found[0].name} is taken here. Unset the others', or give the "
            f"strategy the resolver that is meant ({_DOCUMENT}).",
        )


def _of_half_clusters(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Variables of a cluster that do not say which process this is."""
    if environ.get("SLURM_JOB_ID"):
        yield warning(
            "This is a SLURM job, but no step of it: the process is alone.",
            "Start the script with `srun`.",
        )
    elif environ.get("KUBERNETES_SERVICE_HOST"):
        yield note(
            "This is a pod that is not of an indexed Job: the process is "
            "alone.",
            f"For several pods set `completionMode: Indexed` ({_DOCUMENT}).",
        )

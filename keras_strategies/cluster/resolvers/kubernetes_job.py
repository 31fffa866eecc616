"""The variables of a pod of an indexed Job or JobSet.

Kubernetes sets the pod's index and name; the rest is the manifest's, by the
names that JAX, MaxText and Kubeflow's JAXJob use.
"""

import dataclasses
from collections.abc import Mapping

from keras_strategies.cluster.addresses import (
    check_address,
    join_address,
    read_number,
    read_port,
    shown,
)

_INDICES = ("JOB_COMPLETION_INDEX", "PROCESS_ID")
_COUNTS = ("JAX_PROCESS_COUNT", "NUM_PROCESSES")
_COORDINATORS = ("JAX_COORDINATOR_ADDRESS", "COORDINATOR_ADDRESS")
_PORTS = ("JAX_COORDINATOR_PORT", "COORDINATOR_PORT")
_POD = "HOSTNAME"
_JOB_SET = "JOBSET_NAME"
_SETTER = "Kubernetes in the pods of an indexed Job, or by their manifest"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodOfJob:
    """One pod of an indexed Job.

    Attributes:
      index: Which one, in [0, count).
      count: How many pods the Job has.
      coordinator: `host:port` of pod 0.
    """

    index: int
    count: int
    coordinator: str


def has_job_variables(environ: Mapping[str, str]) -> bool:
    """Whether this is a pod of an indexed Job, or of a JAXJob."""
    is_jax_job = bool(environ.get("PROCESS_ID")) and any(
        environ.get(name) for name in _COORDINATORS
    )
    return bool(environ.get("JOB_COMPLETION_INDEX")) or is_jax_job


def read_pod_of_job(environ: Mapping[str, str], port: int) -> PodOfJob:
    """Reads the variables of a pod.

    Args:
      environ: The environment variables.
      port: Where pod 0 listens, unless a variable says so.

    Raises:
      RuntimeError: one is missing.
      ValueError: one cannot be followed.
    """
    name = _first(environ, _COUNTS)
    if name is None:
        raise RuntimeError(
            f"{_COUNTS[0]} not found in environment. A pod does not know how "
            "many its Job has. Received: a pod's index, and no number of "
            f"pods. Set {_COUNTS[0]} in the manifest to the Job's "
            "`parallelism` (docs/clusters.md)."
        )
    count = read_number(environ, name, "the manifest", least=1)
    name = _first(environ, _INDICES) or _INDICES[0]
    index = read_number(environ, name, _SETTER, most=count - 1)
    for variable in _PORTS:
        if environ.get(variable):
            port = read_port(environ, variable, "the manifest")
            break
    coordinator = _coordinator(environ, index, port)
    check_address(coordinator, "pod 0")
    return PodOfJob(index=index, count=count, coordinator=coordinator)


def _coordinator(environ: Mapping[str, str], index: int, port: int) -> str:
    name = _first(environ, _COORDINATORS)
    if name is not None:
        address = environ[name]
        has_port = address.rpartition("]")[2].count(":") == 1
        return address if has_port else join_address(address, port)
    # The pods of an indexed Job are called job-0, job-1, ..., those of a
    # JobSet are found below its name.
    pod, job_set = environ.get(_POD, ""), environ.get(_JOB_SET, "")
    job, dash, number = pod.rpartition("-")
    if not job_set or not dash or number != str(index):
        raise RuntimeError(
            f"{_COORDINATORS[0]} not found in environment. Pods must know "
            f"where pod 0 is. Received: {_POD}={shown(pod)}, "
            f"{_JOB_SET}={shown(job_set)}. Set {_COORDINATORS[0]} in the "
            "manifest to the name of pod 0 in the headless service, or "
            f"{_JOB_SET} to the JobSet's name (docs/clusters.md)."
        )
    return join_address(f"{job}-0.{job_set}", port)


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((name for name in names if environ.get(name)), None)

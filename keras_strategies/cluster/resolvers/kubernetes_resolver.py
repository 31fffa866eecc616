"""A resolver for the pods of a Kubernetes cluster.

In each pod of an indexed Job or JobSet, Kubernetes sets the variables with the
pod's index and name. The manifest must set the other variables; their names
are those that JAX, MaxText and Kubeflow's JAXJob use.
"""

import enum
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from keras_strategies.cluster.addresses import (
    check_address,
    join_address,
    read_number,
    read_port,
    shorten,
)
from keras_strategies.cluster.checks import check_port
from keras_strategies.cluster.resolvers.resolver import (
    ClusterResolver,
)
from keras_strategies.cluster.spec import ClusterSpec

_LABELS = {"worker": ["job-name=tensorflow"]}
# The second name of each pair is that of Kubeflow's JAXJob.
_INDEX = "JOB_COMPLETION_INDEX", "PROCESS_ID"
_COUNT = "JAX_PROCESS_COUNT", "NUM_PROCESSES"
_COORDINATOR = "JAX_COORDINATOR_ADDRESS", "COORDINATOR_ADDRESS"
_PORT = "JAX_COORDINATOR_PORT", "COORDINATOR_PORT"
_POD = "HOSTNAME"
_JOB_SET = "JOBSET_NAME"
_SETTER = "Kubernetes in the pods of an indexed Job, or by their manifest"


class KubernetesExecutableLocation(enum.Enum):
    """Whether the program runs inside the Kubernetes cluster or outside.

    The location determines which credentials the program uses.

    Attributes:
      WITHIN_CLUSTER: In a pod, with the credentials of its service account.
      OFF_CLUSTER: Elsewhere, with the credentials in `~/.kube/config`.

    Example:
      ```python
      location = ks.cluster_resolver.KubernetesExecutableLocation
      resolver = ks.cluster_resolver.KubernetesClusterResolver(
          {"worker": ["job-name=train"]},
          executable_location=location.OFF_CLUSTER,
      )
      ```
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1


class KubernetesClusterResolver(ClusterResolver):
    """A resolver for Kubernetes pods, as in TensorFlow.

    The pods are those of an indexed Job, or those with the given labels.

        KubernetesClusterResolver()  # In a pod of an indexed Job or a JobSet.
        KubernetesClusterResolver({"worker": ["job-name=train"]})

    Without arguments, in a pod of an indexed Job, each call reads the pod's
    environment variables (see docs/clusters.md). All pods are workers, pod 0
    is the chief, and `cluster_spec` contains only the address of pod 0.

    Otherwise each call asks Kubernetes for the pods that have the labels.
    This needs the package `kubernetes`, and the program must set `task_type`
    and `task_id` itself.

    Differs from tf: without labels, the resolver can read a pod's environment
    variables. A task's address is the IP address of its pod, as TensorFlow
    documents, if the client returns this address. The credentials are loaded
    only once, as `executable_location` specifies.

    Args:
      job_to_label_mapping: A mapping from jobs to lists of label selectors.
        The pods that match a selector are ordered by name. None: reads the
        pod's variables if it belongs to an indexed Job; otherwise the mapping
        is `{"worker": ["job-name=tensorflow"]}`.
      tf_server_port: The port of every task, unless an environment variable
        specifies another port.
      rpc_layer: The protocol that `master()` prepends to addresses.
      override_client: The `kubernetes.client.CoreV1Api` to query; None to
        create one.
      executable_location: The location of the program, which determines the
        credentials that a new client uses.
      environ: The environment variables; None for those of this process.

    Raises:
      ImportError: if `kubernetes` is not installed, and no client is passed.
      TypeError: if a value of `job_to_label_mapping` is a string.
      ValueError: if `tf_server_port` is invalid.

    References:
      https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/KubernetesClusterResolver
      https://docs.jax.dev/en/latest/multi_process.html
    """

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]] | None = None,
        tf_server_port: int = 8470,
        rpc_layer: str | None = "grpc",
        override_client: Any = None,
        executable_location: KubernetesExecutableLocation = (
            KubernetesExecutableLocation.WITHIN_CLUSTER
        ),
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._port = check_port(tf_server_port, "`tf_server_port`")
        self._labels = job_to_label_mapping or _LABELS
        if any(isinstance(labels, str) for labels in self._labels.values()):
            raise TypeError(
                "`job_to_label_mapping` must map jobs to lists of label "
                f"selectors. Received: {shorten(job_to_label_mapping)}. Pass, "
                f"for example, {_LABELS}."
            )
        self._rpc_layer = rpc_layer
        self._environ = environ
        self._client = override_client
        self._is_job = (
            not job_to_label_mapping
            and override_client is None
            and is_pod_of_job(self._environ_now)
        )
        if not self._is_job and override_client is None:
            self._client = _make_client(executable_location)

    def cluster_spec(self) -> ClusterSpec:
        """Returns the addresses of all pods; in an indexed Job, of pod 0 only.

        Raises:
          RuntimeError: if a pod is not running, or a variable is not set.
          ValueError: if a variable is invalid.
        """
        if self._is_job:
            return ClusterSpec({"worker": {0: self._find_coordinator()}})
        listed = self._list_addresses
        return ClusterSpec(
            {
                job: [address for s in selectors for address in listed(s)]
                for job, selectors in self._labels.items()
            }
        )

    @property
    def num_processes(self) -> int | None:
        """The number of pods in an indexed Job; None if labels are used."""
        return self._read_count() if self._is_job else None

    def _find_task_type(self) -> str | None:
        return "worker" if self._is_job else None

    def _find_task_id(self) -> int | None:
        return self._read_index() if self._is_job else None

    def _read_count(self) -> int:
        name = _find_name(self._environ_now, _COUNT)
        if name is None:
            raise RuntimeError(
                f"{_COUNT[0]} not found in environment. A pod cannot detect "
                f"how many pods its Job has. Set {_COUNT[0]} in the manifest "
                "to the Job's `parallelism` (docs/clusters.md)."
            )
        return read_number(self._environ_now, name, "the manifest", minimum=1)

    def _read_index(self) -> int:
        maximum = self._read_count() - 1
        name = _find_name(self._environ_now, _INDEX) or _INDEX[0]
        return read_number(self._environ_now, name, _SETTER, maximum=maximum)

    def _find_coordinator(self) -> str:
        """Returns the address of pod 0."""
        environ, port = self._environ_now, self._port
        name = _find_name(environ, _PORT)
        if name is not None:
            port = read_port(environ, name, "the manifest")
        name = _find_name(environ, _COORDINATOR)
        if name is None:
            address = _name_pod_0(environ, self._read_index())
        else:
            address = environ[name]
        if address.rpartition("]")[2].count(":") != 1:
            address = join_address(address, port)
        check_address(address, "pod 0")
        return address

    def _list_addresses(self, selector: str) -> list[str]:
        """Returns the addresses of matching pods, sorted by pod name."""
        find = self._client.list_pod_for_all_namespaces
        pods = find(label_selector=selector).items
        pods = sorted(pods, key=lambda pod: pod.metadata.name)
        for pod in pods:
            if pod.status.phase != "Running":
                raise RuntimeError(
                    f'Pod "{pod.metadata.name}" is not running; phase: '
                    f'"{pod.status.phase}". All pods that match the label '
                    f"selector {shorten(selector)} must be running. Wait until "
                    f"it is running, or pass a "
                    "selector that excludes it."
                )
        return [join_address(_read_ip(pod), self._port) for pod in pods]


def is_pod_of_job(environ: Mapping[str, str]) -> bool:
    """Returns whether this is a pod of an indexed Job or of a JAXJob."""
    name = _find_name(environ, _INDEX)
    has_coordinator = _find_name(environ, _COORDINATOR) is not None
    return name == _INDEX[0] or (name is not None and has_coordinator)


def _find_name(
    environ: Mapping[str, str], names: tuple[str, str]
) -> str | None:
    """Returns the first of some variables that is set and not empty."""
    return next((name for name in names if environ.get(name)), None)


def _name_pod_0(environ: Mapping[str, str], index: int) -> str:
    # The pods of an indexed Job are named job-0, job-1, ...; the pods of a
    # JobSet have the DNS names job-0.jobset, ...
    pod, job_set = environ.get(_POD, ""), environ.get(_JOB_SET, "")
    job, dash, number = pod.rpartition("-")
    if not job_set or not dash or number != str(index):
        raise RuntimeError(
            f"{_COORDINATOR[0]} not found in environment. Every pod needs the "
            f"address of pod 0. Received: {_POD}={shorten(pod)}, "
            f"{_JOB_SET}={shorten(job_set)}. Set {_COORDINATOR[0]} in the "
            "manifest to the name of pod 0 in the headless service, or "
            f"{_JOB_SET} to the JobSet's name (docs/clusters.md)."
        )
    return f"{job}-0.{job_set}"


def _read_ip(pod: Any) -> str:
    ip = getattr(pod.status, "pod_ip", None)
    return ip if isinstance(ip, str) else pod.status.host_ip


def _make_client(location: KubernetesExecutableLocation) -> Any:
    try:
        config = importlib.import_module("kubernetes.config")
        client = importlib.import_module("kubernetes.client")
    except ImportError as error:
        raise ImportError(
            "Querying pods needs the Kubernetes Python client, which is not "
            "installed. Run `pip install kubernetes`, "
            "pass `override_client`, or start the program in an indexed Job, "
            "where the client is not needed (docs/clusters.md)."
        ) from error
    if location == KubernetesExecutableLocation.OFF_CLUSTER:
        config.load_kube_config()
    else:
        config.load_incluster_config()
    return client.CoreV1Api()

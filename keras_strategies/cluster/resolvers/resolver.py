"""The base class of cluster resolvers, with the same names as in TensorFlow."""

import abc
import os
from collections.abc import Mapping

from keras_strategies.cluster.addresses import add_rpc_layer
from keras_strategies.cluster.spec import ClusterSpec


class ClusterResolver(abc.ABC):
    """Base class of cluster resolvers, which describe a cluster's tasks.

    User-defined resolvers inherit from it, too. A subclass defines
    `cluster_spec`, and either sets `task_type` and `task_id` or overrides these
    properties. Most resolvers only read environment variables that describe the
    cluster: they start no devices and open no connections. The exceptions are
    `KubernetesClusterResolver`, which may query Kubernetes, and
    `TPUClusterResolver`, which can connect a TPU's hosts.

    Differs from tf: `num_accelerators` does not count accelerators, except in
    `TPUClusterResolver`, because counting would start JAX's devices. It has no
    argument `config_proto`.

    References:
      https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/ClusterResolver

    Example:
      >>> class Pair(ks.cluster_resolver.ClusterResolver):
      ...     def cluster_spec(self):
      ...         hosts = ["host0:2222", "host1:2222"]
      ...         return ks.cluster_resolver.ClusterSpec({"worker": hosts})
      >>> resolver = Pair()
      >>> resolver.task_type, resolver.task_id = "worker", 1
      >>> resolver.master()
      'host1:2222'
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _num_accelerators: dict[str, int] | None = None
    _environ: Mapping[str, str] | None = None

    @property
    def _environ_now(self) -> Mapping[str, str]:
        # Not stored on the instance: `os.environ` cannot be pickled, and a
        # copy of it would become outdated.
        return choose_environ(self._environ)

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the known addresses of the cluster's tasks.

        Most resolvers read their environment variables again at each call.

        Returns:
          A `ClusterSpec`, which is empty without a cluster.
        """

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, for a session of TensorFlow 1.

        Without arguments, most resolvers return the address of this process's
        task. The exceptions are:

        - `SimpleClusterResolver`: returns its argument `master`;
        - `TFConfigClusterResolver`: returns "" in a cluster with a single
          task. If TF_CONFIG has a "session_master", returns it for every task;
        - `TorchrunClusterResolver`, and `KubernetesClusterResolver` in an
          indexed Job: return the chief's address;
        - `UnionResolver`: returns the first resolver's result.

        Args:
          task_type: The task's job.
          task_id: The task's index in that job. If only one of `task_type` and
            `task_id` is passed, `TPUClusterResolver` and the resolvers listed
            above, except `TFConfigClusterResolver`, ignore it. Other resolvers
            use this process's value for the omitted argument.
          rpc_layer: The protocol to prepend. For example, "grpc" gives
            "grpc://host:port". A TPU resolver always prepends "grpc".

        Returns:
          The address, or "" without a cluster.

        Raises:
          ValueError: if no such task exists, or its address is unknown.
        """
        address = self._find_address(task_type, task_id)
        if address is None:
            return ""
        return add_rpc_layer(address, self._choose_layer(rpc_layer))

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """Returns how many accelerators of each kind a task has.

        Args:
          task_type: The task's job. Not used, because all tasks have the same
            number of accelerators.
          task_id: The task's index in that job. Not used.

        Returns:
          A dict such as `{"GPU": 4}`. It is empty if the resolver does not know
          the number.
        """
        del task_type, task_id
        return self._num_accelerators or {}

    @property
    def num_processes(self) -> int | None:
        """The number of training processes, if some addresses are unknown.

        None if `cluster_spec` contains the addresses of all processes. Not in
        tf.
        """
        return None

    @property
    def environment(self) -> str | None:
        """The environment in which the program runs; "" by default."""
        return ""

    @property
    def task_type(self) -> str | None:
        """The job of this process, as set or detected; None if unknown."""
        if self._task_type is None:
            return self._find_task_type()
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job; None if unknown."""
        if self._task_id is None:
            return self._find_task_id()
        return self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol that `master` prepends to addresses; not used by JAX."""
        if self._rpc_layer is None:
            return self._find_rpc_layer()
        return self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    # Subclasses override these methods to detect values that were not set.

    def _find_task_type(self) -> str | None:
        return None

    def _find_task_id(self) -> int | None:
        return None

    def _find_rpc_layer(self) -> str | None:
        return None

    def _choose_layer(self, rpc_layer: str | None) -> str | None:
        return rpc_layer or self._rpc_layer

    def _find_address(
        self, task_type: str | None, task_id: int | None
    ) -> str | None:
        """Returns the address for `master`; None if `master` returns ""."""
        is_partial = self.num_processes is not None
        if is_partial and (task_type is None or task_id is None):
            task_type, task_id = "worker", 0
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return None
        return self.cluster_spec().task_address(task_type, task_id)


def choose_environ(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    """Returns `environ`; if it is None, `os.environ`."""
    return os.environ if environ is None else environ

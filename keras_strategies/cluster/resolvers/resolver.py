"""The interface of cluster resolvers, with tf's names."""

import abc
import os
from collections.abc import Mapping

from keras_strategies.cluster.addresses import with_rpc_layer
from keras_strategies.cluster.spec import ClusterSpec


class ClusterResolver(abc.ABC):
    """Answers who is in the cluster and which task this process is.

    Base class of all resolvers, and of users' own: a subclass gives
    `cluster_spec`, and sets `task_type` and `task_id` or overrides them. A
    resolver reads the environment variables of its cluster and nothing else:
    it starts no devices and connects to nobody.

    Differs from tf: `num_accelerators` is what the resolver was given, since
    counting would start JAX's devices; it takes no `config_proto`.

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

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """The addresses of all tasks that are known; empty without a cluster.

        Returns:
          The `ClusterSpec` of this moment: the variables are read again.
        """

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, for tf 1.

        Without a task it is this process's, but:

        - `SimpleClusterResolver`: the `master` that it was given;
        - `TFConfigClusterResolver`: "" in a cluster of a single task. A
          "session_master" of TF_CONFIG is returned for every task;
        - `TorchrunClusterResolver`, and `KubernetesClusterResolver` in an
          indexed Job: the chief's;
        - `UnionResolver`: the first resolver's answer.

        Args:
          task_type: The task's job.
          task_id: The task's index in it. Of a task that is named by one of
            the two alone, the resolvers above ignore it, and others take the
            missing one from this process.
          rpc_layer: What goes before the address: "grpc" gives
            "grpc://host:port", as always for a TPU.

        Returns:
          The address, or "" without a cluster.

        Raises:
          ValueError: there is no such task, or its address is not known.
        """
        address = self._address_of_task(task_type, task_id)
        if address is None:
            return ""
        return with_rpc_layer(address, self._chosen_layer(rpc_layer))

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """Returns how many accelerators a task has, by kind.

        Args:
          task_type: The task's job. Not used: all tasks have the same number.
          task_id: The task's index in it. Not used.

        Returns:
          Such as `{"GPU": 4}`; empty where the resolver was given none.
        """
        del task_type, task_id
        return self._num_accelerators or {}

    @property
    def num_processes(self) -> int | None:
        """How many processes train, where the addresses of some are unknown.

        None where `cluster_spec` has all of them. Not in tf.
        """
        return None

    @property
    def environment(self) -> str | None:
        """Where the program runs: "" outside of Google."""
        return ""

    @property
    def task_type(self) -> str | None:
        """The job of this process: as set, else as found; None if unknown."""
        if self._task_type is None:
            return self._find_task_type()
        return self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index in its job: as set, else as found; None if unknown."""
        if self._task_id is None:
            return self._find_task_id()
        return self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """What `master` puts before addresses; JAX does not use it."""
        if self._rpc_layer is None:
            return self._find_rpc_layer()
        return self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    # What a kind of cluster knows, where nothing was set.

    def _find_task_type(self) -> str | None:
        return None

    def _find_task_id(self) -> int | None:
        return None

    def _find_rpc_layer(self) -> str | None:
        return None

    def _chosen_layer(self, rpc_layer: str | None) -> str | None:
        return rpc_layer or self._rpc_layer

    def _address_of_task(
        self, task_type: str | None, task_id: int | None
    ) -> str | None:
        """Returns the address for `master`, or None for ""."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return None
        return self.cluster_spec().task_address(task_type, task_id)


def environ_or_own(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    """The mapping to read; None is this process's environment variables."""
    return os.environ if environ is None else environ

"""The base class of cluster resolvers, with tf's names."""

import abc
import os
from collections.abc import Mapping

from keras_strategies.cluster.addresses import add_rpc_layer
from keras_strategies.cluster.spec import ClusterSpec


class ClusterResolver(abc.ABC):
    """The tasks of a cluster, and the task of this process.

    The base class of all resolvers, also of user-defined ones: a subclass
    defines `cluster_spec`, and sets `task_type` and `task_id` or overrides
    them. A resolver reads only the environment variables of its cluster: it
    starts no devices and opens no connections.

    Differs from tf: `num_accelerators` returns a number that was passed to the
    resolver, since counting would start JAX's devices; it takes no
    `config_proto`.

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
        # Not kept: `os.environ` has no pickle, and its copies grow old.
        return choose_environ(self._environ)

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the known addresses of all tasks; empty without a cluster.

        Returns:
          The current `ClusterSpec`: each call reads the variables again.
        """

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, for tf 1.

        By default, the address of this process's task, except:

        - `SimpleClusterResolver`: its argument `master`;
        - `TFConfigClusterResolver`: "" in a cluster of a single task. A
          "session_master" of TF_CONFIG is returned for every task;
        - `TorchrunClusterResolver`, and `KubernetesClusterResolver` in an
          indexed Job: the chief's address;
        - `UnionResolver`: the first resolver's result.

        Args:
          task_type: The task's job.
          task_id: The task's index in it. If only one of the two is passed,
            the resolvers above ignore it, and others take the missing one
            from this process.
          rpc_layer: The protocol to prepend: "grpc" returns
            "grpc://host:port", as a TPU resolver always does.

        Returns:
          The address, or "" without a cluster.

        Raises:
          ValueError: if there is no such task, or its address is unknown.
        """
        address = self._find_address(task_type, task_id)
        if address is None:
            return ""
        return add_rpc_layer(address, self._choose_layer(rpc_layer))

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """Returns the number of a task's accelerators, by kind.

        Args:
          task_type: The task's job. Not used: all tasks have the same number.
          task_id: The task's index in it. Not used.

        Returns:
          A dict such as `{"GPU": 4}`; empty if the resolver has no number.
        """
        del task_type, task_id
        return self._num_accelerators or {}

    @property
    def num_processes(self) -> int | None:
        """The number of training processes, if some addresses are unknown.

        None if `cluster_spec` contains all of them. Not in tf.
        """
        return None

    @property
    def environment(self) -> str | None:
        """The environment in which the program runs: "" outside Google."""
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
        """The index in its job, as set or detected; None if unknown."""
        if self._task_id is None:
            return self._find_task_id()
        return self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The protocol that `master` prepends; JAX does not use it."""
        if self._rpc_layer is None:
            return self._find_rpc_layer()
        return self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    # Detected by each kind of cluster, for values that are not set.

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
        """Returns the address for `master`, or None for ""."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return None
        return self.cluster_spec().task_address(task_type, task_id)


def choose_environ(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    """Returns the variables to read; by default those of this process."""
    return os.environ if environ is None else environ

"""A resolver with a cluster that it was given."""

from keras_strategies.cluster.checks import check_type
from keras_strategies.cluster.resolvers.resolver import ClusterResolver
from keras_strategies.cluster.spec import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """A cluster that the program describes itself; as tf's.

        spec = ClusterSpec({"worker": ["host0:2222", "host1:2222"]})
        resolver = SimpleClusterResolver(spec, task_type="worker", task_id=0)

    Args:
      cluster_spec: All tasks.
      master: What `master()` answers when no task is named.
      task_type: The job of this process.
      task_id: The index of this process in it.
      environment: What `environment` answers.
      num_accelerators: What `num_accelerators()` answers, such as
        `{"GPU": 4}`.
      rpc_layer: What `master()` puts before addresses.

    Raises:
      TypeError: `cluster_spec` is no `ClusterSpec`, `master` no str.
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: dict[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        cure = "Make one of a dict, or of `spec.as_dict()` for one of tf's."
        kind = "a `ks.cluster_resolver.ClusterSpec`"
        check_type("`cluster_spec`", cluster_spec, ClusterSpec, kind, cure)
        cure = "Leave it out, or give an address."
        check_type("`master`", master, str, "a str", cure)
        self._cluster_spec = cluster_spec
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._num_accelerators = num_accelerators
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """The `ClusterSpec` given."""
        return self._cluster_spec

    @property
    def environment(self) -> str:
        """What was given."""
        return self._environment

    def _address_of_task(
        self, task_type: str | None, task_id: int | None
    ) -> str | None:
        if task_type is None or task_id is None:
            return self._master
        return super()._address_of_task(task_type, task_id)

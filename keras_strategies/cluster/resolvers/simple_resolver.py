"""A resolver for a cluster that the user's program describes."""

from keras_strategies.cluster.checks import check_type
from keras_strategies.cluster.resolvers.resolver import ClusterResolver
from keras_strategies.cluster.spec import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """A resolver that returns the cluster passed to it, as in TensorFlow.

        spec = ClusterSpec({"worker": ["host0:2222", "host1:2222"]})
        resolver = SimpleClusterResolver(spec, task_type="worker", task_id=0)

    Args:
      cluster_spec: The addresses of the cluster's tasks.
      master: The address that `master()` returns if no task is passed.
      task_type: The job of this process.
      task_id: The index of this process in its job.
      environment: The value of the property `environment`.
      num_accelerators: The result of `num_accelerators()`, such as
        `{"GPU": 4}`.
      rpc_layer: The protocol that `master()` prepends to addresses.

    Raises:
      TypeError: if `cluster_spec` is not a `ClusterSpec`, or `master` is not
        a str.
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
        fix = (
            "Create one with `ClusterSpec(jobs)`, where `jobs` is a dict or "
            "the `as_dict()` of a TensorFlow ClusterSpec."
        )
        kind = "a `ks.cluster_resolver.ClusterSpec`"
        check_type("`cluster_spec`", cluster_spec, ClusterSpec, kind, fix)
        fix = "Omit it, or pass an address."
        check_type("`master`", master, str, "a str", fix)
        self._cluster_spec = cluster_spec
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._num_accelerators = num_accelerators
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the argument `cluster_spec` of the constructor."""
        return self._cluster_spec

    @property
    def environment(self) -> str:
        """The argument `environment` of the constructor."""
        return self._environment

    def _find_address(
        self, task_type: str | None, task_id: int | None
    ) -> str | None:
        if task_type is None or task_id is None:
            return self._master
        return super()._find_address(task_type, task_id)

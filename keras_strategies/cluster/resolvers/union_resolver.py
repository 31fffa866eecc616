"""Resolvers for the jobs of several resolvers, and for a given cluster."""

from typing import Any

from keras_strategies.cluster.addresses import add_rpc_layer, shorten
from keras_strategies.cluster.checks import check_type
from keras_strategies.cluster.resolvers.resolver import ClusterResolver
from keras_strategies.cluster.spec import ClusterSpec


class UnionResolver(ClusterResolver):
    """A resolver that combines the jobs of several others, as in TensorFlow.

    Everything except the jobs comes from the first resolver.

        first = TFConfigClusterResolver()
        more = SimpleClusterResolver(ClusterSpec({"evaluator": ["host9:2222"]}))
        UnionResolver(first, more)

    Differs from tf: a `task_id` of 0 and an empty `task_type` also override
    the first resolver's values, and `rpc_layer` also applies to `master()`
    without a task.

    Args:
      *resolvers: One or more resolvers.
      task_type: The job of this process. None: the first resolver's.
      task_id: The index of this process in its job. None: the first
        resolver's.
      rpc_layer: The protocol that `master()` prepends to addresses. None: the
        first resolver's.

    Raises:
      TypeError: if an argument is not a `ClusterResolver`.
      ValueError: if no resolver is passed.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not resolvers:
            raise ValueError(
                "At least one ClusterResolver is required. Pass the resolvers "
                "to combine as positional arguments."
            )
        fix = "Pass resolvers of `ks.cluster_resolver`."
        for resolver in resolvers:
            kind = "a `ClusterResolver`"
            check_type("Each argument", resolver, ClusterResolver, kind, fix)
        self._resolvers = resolvers
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the jobs of all resolvers.

        If several resolvers list the addresses of the same job, the lists are
        concatenated. If one of them has a dict from indices to addresses for
        the job, all tasks of the job keep their indices instead.

        Raises:
          KeyError: if at least one resolver has a dict for a job, and two
            resolvers have a task with the same index in that job.
        """
        parts = [
            (job, tasks)
            for resolver in self._resolvers
            for job, tasks in resolver.cluster_spec().as_dict().items()
        ]
        have_dicts = {job for job, tasks in parts if isinstance(tasks, dict)}
        merged: dict[str, Any] = {}
        for job, tasks in parts:
            if job in have_dicts:
                _merge(merged.setdefault(job, {}), tasks, job)
            else:
                merged.setdefault(job, []).extend(tasks)
        return ClusterSpec(merged)

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task; see `ClusterResolver.master`."""
        rpc_layer = rpc_layer or self._rpc_layer
        if task_type is not None and task_id is not None:
            address = self.cluster_spec().task_address(task_type, task_id)
            return add_rpc_layer(address, rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None
    ) -> dict[str, int]:
        """Returns the first resolver's `num_accelerators`."""
        return self._resolvers[0].num_accelerators(task_type, task_id)

    @property
    def num_processes(self) -> int | None:
        """The first `num_processes` that is not None, among all resolvers."""
        counts = (resolver.num_processes for resolver in self._resolvers)
        return next((count for count in counts if count is not None), None)

    @property
    def environment(self) -> str | None:
        """The first resolver's `environment`."""
        return self._resolvers[0].environment

    def _find_rpc_layer(self) -> str | None:
        return self._resolvers[0].rpc_layer

    def _find_task_type(self) -> str | None:
        return self._resolvers[0].task_type

    def _find_task_id(self) -> int | None:
        return self._resolvers[0].task_id


UnionClusterResolver = UnionResolver
"""The name of the same class in TensorFlow's sources."""


def _merge(
    merged: dict[int, str], tasks: list[str] | dict[int, str], job: str
) -> None:
    tasks = dict(enumerate(tasks)) if isinstance(tasks, list) else tasks
    if twice := sorted(merged.keys() & tasks.keys()):
        raise KeyError(
            "Duplicate keys: the combined resolvers must have different tasks. "
            f"Received: the task indices {shorten(twice)} of job "
            f"{shorten(job)} in several resolvers. Define each task in only "
            "one of them."
        )
    merged.update(tasks)


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

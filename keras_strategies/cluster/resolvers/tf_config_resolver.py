"""The cluster that the variable TF_CONFIG describes."""

from collections.abc import Mapping

from keras_strategies.cluster.addresses import parse_index
from keras_strategies.cluster.resolvers.resolver import (
    ClusterResolver,
    environ_or_own,
)
from keras_strategies.cluster.resolvers.tf_config import (
    VARIABLE,
    TFConfig,
    parse_tf_config,
)
from keras_strategies.cluster.spec import ClusterSpec


class TFConfigClusterResolver(ClusterResolver):
    """Reads TF_CONFIG, at each call; as tf's.

    ```sh
    TF_CONFIG='{"cluster": {"chief": ["host0:2222"],
                            "worker": ["host1:2222", "host2:2222"]},
                "task": {"type": "worker", "index": 1}}'
    ```

    A cluster of workers only has worker 0 for its chief. Without TF_CONFIG,
    or with `{}`, there is no cluster.

    Differs from tf: the whole text is checked at each call (docs/parity.md).
    Everything but `environment` raises ValueError or TypeError for a TF_CONFIG
    that cannot be followed; the error does not repeat it.

    Args:
      task_type: The job of this process, in place of TF_CONFIG's.
      task_id: The index of this process in it, in place of TF_CONFIG's.
      rpc_layer: What `master()` puts before addresses, in place of
        TF_CONFIG's.
      environment: What `environment` answers.
      environ: The variables to read; None for those of this process.

    References:
      https://www.tensorflow.org/api_docs/python/tf/distribute/cluster_resolver/TFConfigClusterResolver
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self._task_type = task_type
        self._task_id = task_id
        self._rpc_layer = rpc_layer
        self._environment = environment
        self._environ = environ

    def cluster_spec(self) -> ClusterSpec:
        """The jobs of TF_CONFIG; empty if it has none."""
        return self._read().cluster

    @property
    def environment(self) -> str | None:
        """What was given."""
        return self._environment

    @property
    def task_type(self) -> str | None:
        """The job of this process: as given, else TF_CONFIG's."""
        if self._task_type is None:
            return self._read().task_type
        return str(self._task_type)

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process: as given, else TF_CONFIG's."""
        if self._task_id is None:
            return self._read().task_id
        return parse_index(self._task_id, "`task_id`")

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    def _find_rpc_layer(self) -> str | None:
        return self._read().rpc_layer

    def _chosen_layer(self, rpc_layer: str | None) -> str | None:
        if self._read().session_master is not None:
            return None
        return self.rpc_layer if rpc_layer is None else rpc_layer

    def _address_of_task(
        self, task_type: str | None, task_id: int | None
    ) -> str | None:
        config = self._read()
        if config.session_master is not None:
            return config.session_master
        spec = config.cluster
        if not spec or (len(spec.jobs) == 1 and _has_one_task(spec)):
            return None
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        # What is not known is refused there.
        return spec.task_address(task_type, task_id)  # pyright: ignore[reportArgumentType]

    def _read(self) -> TFConfig:
        return parse_tf_config(environ_or_own(self._environ).get(VARIABLE, ""))


def _has_one_task(spec: ClusterSpec) -> bool:
    # As tf: {"worker": {"1": ...}} has a place for task 0, too.
    return len(spec.job_tasks(spec.jobs[0])) == 1

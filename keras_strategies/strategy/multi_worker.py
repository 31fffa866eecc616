"""`MultiWorkerMirroredStrategy`: a replica on each device of all processes."""

from typing import Any

from keras_strategies.names import dry_run
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.strategy.extended import StrategyExtended
from keras_strategies.strategy.runtime import is_chief_alone
from keras_strategies.strategy.strategy import Strategy
from keras_strategies.strategy.tf_compat.options import (
    CommunicationOptions,
    check_seconds,
)
from keras_strategies.variables.partitioners import PartitionerLike


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on the devices of several processes.

    Every process runs the same script. Variables are replicated on every device
    of all processes and start with the values of the chief (process 0); the
    rows of each batch are split between the devices. Calls to `fit`,
    `evaluate`, `predict`, `run` and `reduce` are collective: all processes must
    make the same calls in the same order.

    Create the strategy before anything else uses JAX's devices, or after
    `jax.distributed.initialize`. If neither the arguments nor TF_CONFIG
    describe a cluster, the strategy behaves like a `MirroredStrategy`. If a
    process is missing, was started twice, or has different versions of Python
    or packages, all other processes raise an error.

    Args:
      cluster_resolver: Describes the processes of the job: a resolver of
        `ks.cluster_resolver` or of tf. None to read TF_CONFIG, if it is set.
      communication_options: `ks.experimental.CommunicationOptions`.
      coordinator_address: The "host:port" on which process 0 will listen.
        Together with the next two arguments, it is an alternative to a
        resolver.
      num_processes: The number of processes.
      process_id: The index of this process, from 0.
      startup_timeout_s: The time to wait for all processes, in seconds.
      predict_in: "all" if `predict` returns all rows in every process; "chief"
        if it returns them only in the chief, and arrays without rows in the
        other processes.
      variable_partitioner: Chooses which variables the replicas shard:
        `ks.experimental.FullySharded()`, `ks.experimental.SlotsOnly()`, or a
        function. The function receives a variable's path, shape and dtype, and
        returns the dimension to shard, or None to replicate the variable. By
        default, all variables are replicated.

    Raises:
      ValueError: if `predict_in` is unknown, the description of the cluster is
        incomplete or wrong, or processes have different numbers of devices.
      RuntimeError: if JAX's devices are already in use, the processes did not
        connect in time, or they have different versions, strategies or numbers
        of processes.

    Example:
      ```python
      strategy = ks.MultiWorkerMirroredStrategy(
          coordinator_address="10.0.0.1:12345", num_processes=2, process_id=0
      )
      with strategy.scope():
          model = keras.Sequential([keras.layers.Dense(1)])
          model.compile("adam", "mse")
      model.fit(x, y, batch_size=256)
      ```
    """

    def __init__(
        self,
        cluster_resolver: Any = None,
        communication_options: CommunicationOptions | None = None,
        *,
        coordinator_address: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        startup_timeout_s: float = 300.0,
        predict_in: str = "all",
        variable_partitioner: PartitionerLike | None = None,
    ) -> None:
        # Imported here because it takes a tenth of the package's import time.
        from keras_strategies.job import place

        options = communication_options or CommunicationOptions()
        check_seconds("startup_timeout_s", startup_timeout_s)
        outputs_on_chief = is_chief_alone(predict_in)
        numbers = coordinator_address, num_processes, process_id
        self._cluster_resolver = place.join(
            cluster_resolver, numbers, type(self).__name__, startup_timeout_s
        )
        mesh = dry_run.find_mesh(
            lambda: ReplicaMesh(devices=place.list_devices())
        )
        super().__init__(
            mesh,
            variable_partitioner=variable_partitioner,
            outputs_on_chief=outputs_on_chief,
        )
        self._extended = StrategyExtended(
            self._runtime, self._runner, is_multi_worker=True
        )
        place.set_timeout(options.timeout_seconds)

    @property
    def cluster_resolver(self) -> Any:
        """The resolver that was passed, or one made for this process's job.

        Returns:
          A resolver of `ks.cluster_resolver`, or the tf resolver that was
          passed.
        """
        return self._cluster_resolver

"""MultiWorkerMirroredStrategy: one replica on each device of all processes."""

from typing import Any

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.keras_bridge.variables.partitioners import PartitionerLike
from keras_strategies.strategy.extended import StrategyExtended
from keras_strategies.strategy.runtime import is_chief_alone
from keras_strategies.strategy.strategy import Strategy
from keras_strategies.strategy.tf_compat.options import (
    CommunicationOptions,
    check_seconds,
    checked_options,
)


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training on the devices of several processes.

    Every process runs the same script. Variables are mirrored on every device
    of all processes and start with the chief's values (process 0); a batch's
    rows are divided over them. Calls of `fit`, `evaluate`, `predict`, `run`
    and `reduce` are collective: all processes make them, in the same order.

    Make it before anything else uses JAX's devices, or after
    `jax.distributed.initialize`. Without a cluster, from its arguments or from
    TF_CONFIG, it is a `MirroredStrategy`. A process that is missing, there
    twice, or of another version is an error in all the others.

    Args:
      cluster_resolver: The processes of the job (`ks.cluster_resolver`, or
        one of tf's); None for those of TF_CONFIG, if it is set.
      communication_options: `ks.experimental.CommunicationOptions`.
      coordinator_address: "host:port" of process 0, where it is to listen;
        with the next two, instead of a resolver.
      num_processes: How many processes there are.
      process_id: Which of them this one is.
      startup_timeout_s: How long to wait for all processes, in seconds.
      predict_in: "all": `predict` returns all rows in every process;
        "chief": in the chief, and arrays without rows in the others.
      variable_partitioner: Which variables the replicas divide among them:
        `ks.experimental.FullySharded()`, `ks.experimental.SlotsOnly()`, or a
        function of a variable's path, shape and dtype that returns a
        dimension, or None to leave it whole. None: each holds all.

    Raises:
      ValueError: an unknown `predict_in`; an incomplete or wrong cluster;
        processes with different numbers of devices.
      RuntimeError: JAX's devices are in use already; the processes did not
        meet in time, or differ.

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
        # It would take a tenth of the time of importing this package.
        from keras_strategies.cluster.job import place

        options = checked_options(communication_options)
        check_seconds("startup_timeout_s", startup_timeout_s)
        outputs_on_chief = is_chief_alone(predict_in)
        numbers = coordinator_address, num_processes, process_id
        self._cluster_resolver = place.join(
            cluster_resolver, numbers, type(self).__name__, startup_timeout_s
        )
        mesh = ReplicaMesh(devices=place.list_devices())
        options.check_platform(mesh.platform)
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
        """The resolver given, or one of this process's place in the job.

        Returns:
          An object of `ks.cluster_resolver`, or one of tf's if it was given.
        """
        return self._cluster_resolver

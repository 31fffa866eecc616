"""`TPUStrategy`: replicas of one TPU core each, or of several."""

from collections.abc import Mapping
from typing import Any

from keras_strategies.keras_bridge.variables.partitioners import PartitionerLike
from keras_strategies.strategy.compile_only import CompileOnlyStrategy
from keras_strategies.tpu.cluster_resolver import TPUClusterResolver
from keras_strategies.tpu.replica_meshes import (
    Assignments,
    check_resolver,
    choose_assignment,
    make_mesh,
)


class TPUStrategy(CompileOnlyStrategy):
    """Synchronous training on TPUs, of one host or of all hosts of a job.

    A replica is a TPU core or, with an assignment, a block of cores that
    share a model. On other platforms it takes all devices that JAX shows, so
    that a script can be tried without TPUs. On several hosts every process
    runs the same script, and calls are collective, as with
    `MultiWorkerMirroredStrategy`.

    Args:
      tpu_cluster_resolver: A `TPUClusterResolver` of all hosts, which join
        the job here if they have not joined yet; or one of "local", for this
        host's devices only. None: all devices that JAX shows.
      device_assignment: The cores of each replica; for a job of several
        slices, one assignment for each. Hosts that have cores of one replica
        read the same rows. None: each core is a replica.
      layout_map: The variables that a replica shards over its cores: a
        `keras.distribution.LayoutMap`, or a dict, from paths of variables or
        regular expressions to tuples of None and "model", or to functions of
        a shape that return them; `ks.experimental.transformer_layout` makes
        one. Other variables are replicated on every core. Not in tf, where
        `experimental_split_to_logical_devices` splits tensors.
      variable_partitioner: The choice of variables that the replicas shard,
        along other dimensions than their cores:
        `ks.experimental.FullySharded()`, `ks.experimental.SlotsOnly()`, or a
        function of a variable's path, shape and dtype that returns a
        dimension, or None to replicate it. None: all are replicated.
      experimental_device_assignment: tf's other name of `device_assignment`.
      experimental_spmd_xla_partitioning: Not used: XLA always partitions.

    Raises:
      ValueError: if an assignment has no devices or is passed twice, if
        processes share only some of their replicas or have different numbers
        of replicas, or if `layout_map` is not valid.
      TypeError: if the resolver or the assignment has another type.

    Example:
      ```python
      topology = ks.tpu.experimental.initialize_tpu_system(
          devices=jax.devices()
      )
      assignment = ks.tpu.experimental.DeviceAssignment.build(
          topology, computation_shape=[2, 1, 1, 1], num_replicas=4
      )
      strategy = ks.TPUStrategy(
          device_assignment=assignment,
          layout_map={".*/kernel": (None, "model")},
      )
      ```

    References:
      https://www.tensorflow.org/api_docs/python/tf/distribute/TPUStrategy
    """

    def __init__(
        self,
        tpu_cluster_resolver: TPUClusterResolver | None = None,
        device_assignment: Assignments | None = None,
        *,
        layout_map: Mapping[str, Any] | None = None,
        variable_partitioner: PartitionerLike | None = None,
        experimental_device_assignment: Assignments | None = None,
        experimental_spmd_xla_partitioning: bool = True,
    ) -> None:
        del experimental_spmd_xla_partitioning
        assignment = choose_assignment(
            device_assignment, experimental_device_assignment
        )
        self._resolver = check_resolver(tpu_cluster_resolver)
        mesh = make_mesh(self._resolver, assignment, variable_partitioner)
        super().__init__(
            mesh,
            layout_map=layout_map,
            variable_partitioner=variable_partitioner,
        )

    @property
    def cluster_resolver(self) -> TPUClusterResolver | None:
        """The resolver that was passed, or None."""
        return self._resolver

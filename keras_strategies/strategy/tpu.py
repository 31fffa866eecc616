"""`TPUStrategy`: each replica runs on one TPU core or on several."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from keras_strategies.names import dry_run
from keras_strategies.strategy.compile_only import CompileOnlyStrategy
from keras_strategies.tpu.cluster_resolver import TPUClusterResolver
from keras_strategies.tpu.replica_meshes import (
    Assignments,
    check_resolver,
    choose_assignment,
    make_mesh,
)
from keras_strategies.variables.partitioners import PartitionerLike


class TPUStrategy(CompileOnlyStrategy):
    """Synchronous training on the TPUs of one host or of all hosts in a job.

    Each replica is a TPU core or, with a device assignment, a block of cores
    that share one copy of the model. On other platforms the strategy uses all
    devices visible to JAX, so that a script can be tried without TPUs. On
    several hosts every process runs the same script, and calls are collective,
    as with `MultiWorkerMirroredStrategy`.

    Args:
      tpu_cluster_resolver: A `TPUClusterResolver` for all hosts; a host that
        has not joined the job yet joins it here. Or
        `TPUClusterResolver("local")`, for only the devices of this host. None
        for all devices visible to JAX.
      device_assignment: The cores of each replica; for a job with several
        slices, one assignment for each slice. Hosts that share a replica read
        the same rows. None makes each core a replica.
      layout_map: How each replica shards variables over its cores: a
        `keras.distribution.LayoutMap` or a dict. The keys are variable paths or
        regular expressions. A value is a tuple with None or "model" for each
        dimension, or a function from a shape to such a tuple.
        `ks.experimental.transformer_layout` makes a map. Variables that no key
        matches are replicated on every core. Not in tf, where
        `experimental_split_to_logical_devices` splits tensors.
      context_parallel: Whether the cores of a replica share its sequences, for
        long contexts: each core computes a part of the tokens, and in attention
        a part of the heads. Variables that `variable_partitioner` shards are
        sharded over the cores, too. Not together with `layout_map`. Not in tf.
      variable_partitioner: Chooses which variables the replicas shard:
        `ks.experimental.FullySharded()`, `ks.experimental.SlotsOnly()`, or a
        function. The function receives a variable's path, shape and dtype, and
        returns the dimension to shard, or None to replicate the variable. By
        default, all variables are replicated. A dimension that `layout_map`
        shards cannot be chosen.
      experimental_device_assignment: Another name for `device_assignment`, as
        in tf.
      experimental_spmd_xla_partitioning: Not used: XLA always partitions.

    Raises:
      ValueError: if an assignment has no devices or is passed under both names,
        if processes share only some of their replicas or have
        different numbers of replicas, if `layout_map` is not valid, or if
        replicas of one core should share sequences.
      TypeError: if the resolver, the assignment or `context_parallel` has the
        wrong type.

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
        context_parallel: bool = False,
        variable_partitioner: PartitionerLike | None = None,
        experimental_device_assignment: Assignments | None = None,
        experimental_spmd_xla_partitioning: bool = True,
    ) -> None:
        del experimental_spmd_xla_partitioning
        assignment = choose_assignment(
            device_assignment, experimental_device_assignment
        )
        self._resolver = check_resolver(tpu_cluster_resolver)
        mesh = dry_run.find_mesh(
            lambda: make_mesh(self._resolver, assignment, variable_partitioner),
            assignment,
            variable_partitioner,
        )
        mesh = dataclasses.replace(mesh, context_parallel=context_parallel)
        super().__init__(
            mesh,
            layout_map=layout_map,
            variable_partitioner=variable_partitioner,
        )

    @property
    def cluster_resolver(self) -> TPUClusterResolver | None:
        """The resolver that was passed, or None."""
        return self._resolver

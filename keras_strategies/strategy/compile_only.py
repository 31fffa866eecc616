"""Strategies over absent TPU slices, for ahead-of-time compilation."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from keras_strategies.keras_bridge.variables.partitioners import PartitionerLike
from keras_strategies.strategy.strategy import Strategy
from keras_strategies.tpu.replica_meshes import make_topology_mesh


class CompileOnlyStrategy(Strategy):
    """The base class of strategies that can compile for absent TPU slices."""

    _resolver: Any = None

    @classmethod
    def for_topology(
        cls,
        name: str,
        *,
        num_slices: int = 1,
        computation_shape: Sequence[int] | None = None,
        layout_map: Mapping[str, Any] | None = None,
        variable_partitioner: PartitionerLike | None = None,
    ) -> Self:
        """Makes a strategy that can only compile, for a named TPU slice.

        Use it with `compile_step` and `compile_run`: on any Linux machine, the
        TPU compiler reports the memory and the collectives that a step would
        need. Models are created in the strategy's scope as usual, but their
        variables stay on the host. Calls that would run on the slice (`fit`,
        `run`, `reduce`, ...) raise RuntimeError. Needs libtpu, which is
        installed by this package's extra `tpu`.

        Args:
          name: The TPU generation and the number of chips in each dimension,
            such as "v5e:16x16".
          num_slices: The number of such slices, connected by the data centre's
            network.
          computation_shape: The number of a replica's cores in each dimension:
            x, y, z and core within a chip. By default, each core is a replica.
            Together, the replicas use all cores of the slice.
          layout_map: See `TPUStrategy`.
          variable_partitioner: See `TPUStrategy`.

        Raises:
          ImportError: if libtpu is not installed.
          ValueError: if no slice has this name, or `computation_shape` does not
            fit into it.

        Example:
          ```python
          strategy = ks.TPUStrategy.for_topology("v5e:16x16")
          with strategy.scope():
              model = make_model()
              model.compile("adam", "mse")
          rows = 128 * strategy.num_replicas_in_sync
          batch = (
              jax.ShapeDtypeStruct((rows, 32), "float32"),
              jax.ShapeDtypeStruct((rows, 1), "float32"),
          )
          print(strategy.compile_step(model, batch))
          ```
        """
        mesh = make_topology_mesh(
            name, num_slices, computation_shape, variable_partitioner
        )
        strategy = cls.__new__(cls)
        strategy._resolver = None
        Strategy.__init__(
            strategy,
            mesh,
            layout_map=layout_map,
            variable_partitioner=variable_partitioner,
        )
        return strategy

"""Strategies over absent TPU slices, for ahead-of-time compilation."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from keras_strategies.keras_bridge.variables.partitioners import PartitionerLike
from keras_strategies.strategy.strategy import Strategy
from keras_strategies.tpu.replica_meshes import make_topology_mesh


class CompileOnlyStrategy(Strategy):
    """A strategy that can also be made for a named topology."""

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
        """Makes a strategy for a named TPU slice, which can only compile.

        For `compile_step` and `compile_run`: the TPU compiler reports a
        step's requirements, on any Linux machine. Models are made in the
        strategy's scope as usual, and stay on the host. Calls that would run
        on the slice (`fit`, `run`, `reduce`, ...) raise RuntimeError. Needs
        libtpu, the extra `tpu`.

        Args:
          name: The generation and the chips in each dimension, such as
            "v5e:16x16".
          num_slices: The number of such slices, joined by the data centre's
            network.
          computation_shape: A replica's cores in x, y, z and core; one core
            by default. Replicas fill the slice.
          layout_map: See `TPUStrategy`.
          variable_partitioner: See `TPUStrategy`.

        Raises:
          ImportError: if libtpu is not installed.
          ValueError: if there is no such slice, or `computation_shape` is
            impossible.

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

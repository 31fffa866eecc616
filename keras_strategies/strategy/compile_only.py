"""Strategies over TPU slices that are not there, which compile only."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from keras_strategies.keras_bridge.variables.partitioners import PartitionerLike
from keras_strategies.strategy.strategy import Strategy
from keras_strategies.tpu.replica_meshes import make_topology_mesh


class CompileOnly(Strategy):
    """A strategy that can be made over a topology by its name."""

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
        """A strategy over a TPU slice by its name, which compiles only.

        For `compile_step` and `compile_run`: the TPU compiler says what a
        step needs, on any Linux machine. Models are made in its scope as
        usual, and stay on the host. What would run on the slice (`fit`, `run`,
        `reduce`, ...) raises RuntimeError. Needs libtpu, the extra `tpu`.

        Args:
          name: Generation and chips in each dimension, as "v5e:16x16".
          num_slices: The number of such slices, joined by the data centre.
          computation_shape: A replica's cores in x, y, z and core; one core
            if left out. Replicas fill the slice.
          layout_map: See `TPUStrategy`.
          variable_partitioner: See `TPUStrategy`.

        Raises:
          ImportError: libtpu is not installed.
          ValueError: no such slice, or an impossible `computation_shape`.

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
        made = cls.__new__(cls)
        made._resolver = None
        Strategy.__init__(
            made,
            mesh,
            layout_map=layout_map,
            variable_partitioner=variable_partitioner,
        )
        return made

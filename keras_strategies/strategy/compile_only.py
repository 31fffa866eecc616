"""Strategies over absent TPUs and GPUs, for ahead-of-time compilation."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax

from keras_strategies.gpu.topology_devices import is_gpu_name, make_gpu_devices
from keras_strategies.strategy.strategy import Strategy
from keras_strategies.tpu.device_groups import make_tpu_devices
from keras_strategies.tpu.replica_meshes import (
    make_abstract_mesh,
)
from keras_strategies.variables.partitioners import PartitionerLike


def make_devices(
    name: str, num_slices: int = 1, *, has_unlimited_memory: bool = False
) -> tuple[jax.Device, ...]:
    """Returns the devices of absent TPU slices or GPUs, by their name.

    Args:
      name: A name such as "v5e:4x4", "h100:8" or "h100:8x8".
      num_slices: The number of TPU slices.
      has_unlimited_memory: For GPUs, see `make_gpu_devices`.

    Raises: see `make_tpu_devices` and `make_gpu_devices`.
    """
    if not is_gpu_name(name):
        return make_tpu_devices(name, num_slices=num_slices)
    if num_slices != 1:
        raise ValueError(
            "`num_slices` must be 1 for GPUs, whose name contains the number "
            f"of hosts. Received: {name!r}, num_slices={num_slices}. Pass, for "
            "example, 'h100:8x8' for 8 hosts with 8 GPUs each."
        )
    return make_gpu_devices(name, has_unlimited_memory=has_unlimited_memory)


class CompileOnlyStrategy(Strategy):
    """The base class of strategies that can compile for absent devices."""

    _resolver: Any = None

    @classmethod
    def for_topology(
        cls,
        name: str,
        *,
        num_slices: int = 1,
        computation_shape: Sequence[int] | None = None,
        layout_map: Mapping[str, Any] | None = None,
        context_parallel: bool = False,
        variable_partitioner: PartitionerLike | None = None,
    ) -> Self:
        """Makes a strategy that can only compile, for named TPUs or GPUs.

        Use it with `compile_step` and `compile_run`: on any Linux machine, the
        compiler reports the memory and the collectives that a step would need.
        Models are created in the strategy's scope as usual, but their variables
        stay on the host. Calls that would run on the devices (`fit`, `run`,
        `reduce`, ...) raise RuntimeError. TPUs need libtpu, which is installed
        by this package's extra `tpu`; GPUs need JAX's CUDA plugin, which is
        installed by the extra `gpu-compile`.

        Args:
          name: The TPU generation and the number of chips in each dimension,
            such as "v5e:16x16"; or the GPU, the number of hosts (1 if it is
            left out) and the number of GPUs of each host, such as "h100:8" or
            "h100:8x8".
          num_slices: The number of such TPU slices, connected by the data
            center's network.
          computation_shape: The number of a replica's cores in each dimension:
            x, y, z and core within a chip. By default, each core is a replica.
            Together, the replicas use all cores of the slice. For GPUs, x is
            the position of a GPU among all GPUs.
          layout_map: See `TPUStrategy`.
          context_parallel: See `TPUStrategy`.
          variable_partitioner: See `TPUStrategy`.

        Raises:
          ImportError: if libtpu or the CUDA plugin is not installed, or JAX
            loaded no CUDA plugin, because it found no CUDA.
          ValueError: if no slice and no GPU has this name, or
            `computation_shape` does not fit.

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
        mesh = make_abstract_mesh(
            make_devices(name, num_slices),
            computation_shape,
            variable_partitioner,
        )
        strategy = cls.__new__(cls)
        strategy._resolver = None
        Strategy.__init__(
            strategy,
            dataclasses.replace(mesh, context_parallel=context_parallel),
            layout_map=layout_map,
            variable_partitioner=variable_partitioner,
        )
        return strategy

"""The strategies for one machine: several of its devices, or one device."""

import os
from collections.abc import Sequence

import jax

from keras_strategies.names import dry_run
from keras_strategies.names.device_names import (
    find_device,
    find_devices,
    local_devices,
)
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.strategy.compile_only import CompileOnlyStrategy
from keras_strategies.strategy.strategy import Strategy
from keras_strategies.variables.partitioners import PartitionerLike


class MirroredStrategy(CompileOnlyStrategy):
    """Synchronous training on several devices of one machine.

    Every variable is replicated on every device; the rows of each batch are
    split between the devices.

    Args:
      devices: The devices, as names ("gpu:0", "/gpu:1", "CPU:2") or as JAX
        devices. By default, all devices of the default platform.
      cross_device_ops: Must be None, because XLA chooses how devices
        communicate. In tf, it selects an implementation.
      variable_partitioner: Chooses which variables the replicas shard:
        `ks.experimental.FullySharded()`, `ks.experimental.SlotsOnly()`, or a
        function. The function receives a variable's path, shape and dtype, and
        returns the dimension to shard, or None to replicate the variable. By
        default, all variables are replicated.

    Raises:
      ValueError: if a device is unknown or passed twice, if `devices` is
        empty, or if `cross_device_ops` is not None.

    Example:
      ```python
      strategy = ks.MirroredStrategy(["cpu:0", "cpu:1"])
      ```
    """

    def __init__(
        self,
        devices: Sequence[str | jax.Device] | None = None,
        cross_device_ops: None = None,
        variable_partitioner: PartitionerLike | None = None,
    ) -> None:
        if cross_device_ops is not None:
            raise ValueError(
                "`cross_device_ops` must be None: XLA chooses how the devices "
                f"communicate. Received: {cross_device_ops!r}. Leave it out."
            )
        mesh = dry_run.find_mesh(lambda: _make_mesh(devices))
        super().__init__(mesh, variable_partitioner=variable_partitioner)
        if os.environ.get("TF_CONFIG"):
            # Imported here because it takes a tenth of the import time.
            from keras_strategies.job import place

            place.warn_of_unused_cluster(type(self).__name__)


class OneDeviceStrategy(Strategy):
    """A strategy with a single replica on one device.

    It runs the same code paths as the other strategies, so that a script can be
    tried on one device.

    Args:
      device: The device, as a name ("gpu:0") or a JAX device.

    Raises:
      ValueError: if the device is unknown.

    Example:
      ```python
      strategy = ks.OneDeviceStrategy("cpu:0")
      with strategy.scope():
          model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(1)])
          model.compile("adam", "mse")
      model.fit(x, y, batch_size=64)
      ```
    """

    def __init__(self, device: str | jax.Device) -> None:
        mesh = dry_run.find_mesh(
            lambda: ReplicaMesh(devices=(find_device(device, local_devices()),))
        )
        super().__init__(mesh)


def _make_mesh(devices: Sequence[str | jax.Device] | None) -> ReplicaMesh:
    if devices is None:
        return ReplicaMesh(devices=jax.local_devices())
    return ReplicaMesh(devices=find_devices(devices, local_devices()))

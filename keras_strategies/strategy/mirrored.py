"""Strategies of one machine: on several of its devices, or on one."""

from collections.abc import Sequence

import jax

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.names.device_names import (
    find_device,
    find_devices,
    local_devices,
)
from keras_strategies.keras_bridge.variables.partitioners import PartitionerLike
from keras_strategies.strategy.strategy import Strategy


class MirroredStrategy(Strategy):
    """Synchronous training on several devices of one machine.

    Every variable is replicated on every device; a batch's rows are split
    between them.

    Args:
      devices: Devices as names ("gpu:0", "/gpu:1", "CPU:2") or jax devices;
        by default all devices of the default platform.
      cross_device_ops: Must be None, because XLA chooses how devices
        communicate. Differs from tf: there it selects an implementation.
      variable_partitioner: The choice of variables that the replicas shard:
        `ks.experimental.FullySharded()`, `ks.experimental.SlotsOnly()`, or a
        function of a variable's path, shape and dtype that returns a
        dimension, or None to replicate it. None: all are replicated.

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
        if devices is None:
            chosen = tuple(jax.local_devices())
        else:
            chosen = find_devices(devices, local_devices())
        super().__init__(
            ReplicaMesh(devices=chosen),
            variable_partitioner=variable_partitioner,
        )


class OneDeviceStrategy(Strategy):
    """A strategy of one replica on one device.

    Runs the same code paths as the other strategies.

    Args:
      device: The device, as a name ("gpu:0") or a jax device.

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
        chosen = find_device(device, local_devices())
        super().__init__(ReplicaMesh(devices=(chosen,)))

"""OneDeviceStrategy: everything on one device, for trying and comparing."""

import jax

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.names.device_names import find_device, local_devices
from keras_strategies.strategy.strategy import Strategy


class OneDeviceStrategy(Strategy):
    """Places all variables and all computation on one device.

    Runs the same code paths as the other strategies, with one replica.

    Args:
      device: The device, as a name ("gpu:0") or a jax device.

    Raises:
      ValueError: an unknown device.
    """

    def __init__(self, device: str | jax.Device) -> None:
        chosen = find_device(device, local_devices())
        super().__init__(ReplicaMesh(devices=(chosen,)))

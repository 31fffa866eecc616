"""TPUStrategy: one replica on each TPU core of this machine."""

import jax

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.strategy.strategy import Strategy


class TPUStrategy(Strategy):
    """Synchronous training on TPUs.

    Runs over all local devices that JAX shows: TPU cores on a TPU machine,
    elsewhere whatever there is, so that a script can be tried without one.

    Args:
      tpu_cluster_resolver: Must be None: the devices are this machine's.
      device_assignment: Must be None: a replica is one core.

    Raises:
      ValueError: an argument is given.
    """

    def __init__(
        self,
        tpu_cluster_resolver: None = None,
        device_assignment: None = None,
    ) -> None:
        for name, value in (
            ("tpu_cluster_resolver", tpu_cluster_resolver),
            ("device_assignment", device_assignment),
        ):
            if value is not None:
                raise ValueError(
                    f"`{name}` is not supported: TPUStrategy runs over this "
                    "machine's devices, one replica a core. Received: "
                    f"{value!r}. Leave it out, or choose devices with "
                    "`MirroredStrategy(devices=...)`."
                )
        super().__init__(ReplicaMesh(devices=tuple(jax.local_devices())))

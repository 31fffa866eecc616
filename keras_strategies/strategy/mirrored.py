"""The strategies for one machine, whose devices users may name."""

import collections
import functools
import logging
import os
import re
from collections.abc import Iterable, Sequence

import jax

from keras_strategies.names import dry_run
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.strategy.compile_only import CompileOnlyStrategy
from keras_strategies.strategy.strategy import Strategy
from keras_strategies.variables.partitioners import PartitionerLike

_logger = logging.getLogger(__name__)


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
        if (
            devices is None
            and mesh.platform == "cpu"
            and mesh.num_replicas == 1
        ):
            _report_single_cpu()
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


@functools.cache
def _report_single_cpu() -> None:
    _logger.warning(
        "MirroredStrategy has one replica, because JAX has one device: this "
        "machine's CPU. For four virtual devices, set the environment variable "
        "XLA_FLAGS=--xla_force_host_platform_device_count=4 before JAX starts."
    )


def _make_mesh(devices: Sequence[str | jax.Device] | None) -> ReplicaMesh:
    if devices is None:
        return ReplicaMesh(devices=jax.local_devices())
    return ReplicaMesh(devices=find_devices(devices, local_devices()))


_NAME = re.compile(
    r"^(?:/?job:[^/]+)?(?:/replica:\d+)?(?:/task:\d+)?"
    r"/?(?:device:)?(?P<platform>[A-Za-z]+)(?::(?P<index>\d+))?$"
)
_SAME_PLATFORM = {"cuda": "gpu", "rocm": "gpu"}


def find_device(
    name: str | jax.Device, available: Sequence[jax.Device]
) -> jax.Device:
    """Returns the device that a user's name refers to.

    Args:
      name: A JAX device, or a string with a platform and an index among that
        platform's devices, such as "gpu:1", "/gpu:1" or "/device:GPU:1". As
        in TensorFlow, the string may begin with a job and a task. Without an
        index it refers to the first device of the platform.
      available: The devices to choose from.

    Raises:
      ValueError: if no such device exists. The message lists the available
        devices.
      TypeError: if `name` is neither a string nor a JAX device.
    """
    if isinstance(name, jax.Device):
        if name not in available:
            raise ValueError(_describe_unknown(str(name), available))
        return name
    if not isinstance(name, str):
        raise TypeError(
            "A device must be a name or a JAX device. Received: "
            f"{name!r} of type {type(name).__name__}. Pass for example "
            f"'{_names(available)[0]}'."
        )
    match = _NAME.match(name.strip())
    if match is None:
        raise ValueError(_describe_unknown(name, available))
    platform = match["platform"].lower()
    platform = _SAME_PLATFORM.get(platform, platform)
    same = [d for d in available if d.platform == platform]
    index = int(match["index"] or 0)
    if index >= len(same):
        raise ValueError(_describe_unknown(name, available))
    return same[index]


def find_devices(
    names: Sequence[str | jax.Device], available: Sequence[jax.Device]
) -> tuple[jax.Device, ...]:
    """Returns the devices that several names refer to; see `find_device`."""
    if isinstance(names, str | jax.Device):
        names = [names]
    if not isinstance(names, Iterable):
        raise TypeError(
            "Devices must be a sequence of names or JAX devices. "
            f"Received: {names!r} of type {type(names).__name__}. Pass for "
            f"example {_names(available)[:2]}."
        )
    return tuple(find_device(name, available) for name in names)


def local_devices() -> list[jax.Device]:
    """Returns this process's devices of the default platform, then its CPUs."""
    devices = list(jax.local_devices())
    if devices[0].platform != "cpu":
        devices += jax.local_devices(backend="cpu")
    return devices


def _names(available: Sequence[jax.Device]) -> list[str]:
    seen: collections.Counter[str] = collections.Counter()
    names = []
    for device in available:
        names.append(f"{device.platform}:{seen[device.platform]}")
        seen[device.platform] += 1
    return names


def _describe_unknown(name: str, available: Sequence[jax.Device]) -> str:
    return (
        f"Unknown device {name!r}. A device must be the name of an existing "
        "device, which consists of a platform and an index. Received: "
        f"{name!r}. Available devices: {', '.join(_names(available))}. Pass "
        "one of these names."
    )

"""Parses names of devices, such as "CPU:0", "/gpu:1" or "tpu:3"."""

import collections
import re
from collections.abc import Iterable, Sequence

import jax

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

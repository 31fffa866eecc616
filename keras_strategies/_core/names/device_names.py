"""Devices as users write them: "CPU:0", "/gpu:1", "tpu:3", jax devices."""

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
    """Returns the device that a user's name means.

    Args:
      name: A platform and an index among that platform's devices ("gpu:1",
        "/gpu:1", "/device:GPU:1", also with tf's job and task parts; without
        an index the first one), or a jax device.
      available: The devices to choose from.

    Raises:
      ValueError: no such device; the text lists those that exist.
      TypeError: neither a string nor a jax device.
    """
    if isinstance(name, jax.Device):
        if name not in available:
            raise ValueError(_unknown(str(name), available))
        return name
    if not isinstance(name, str):
        raise TypeError(
            "A device is given by its name or as a jax device. Received: "
            f"{name!r} of type {type(name).__name__}. Write for example "
            f"'{_names(available)[0]}'."
        )
    match = _NAME.match(name.strip())
    if match is None:
        raise ValueError(_unknown(name, available))
    platform = match["platform"].lower()
    platform = _SAME_PLATFORM.get(platform, platform)
    same = [d for d in available if d.platform == platform]
    index = int(match["index"] or 0)
    if index >= len(same):
        raise ValueError(_unknown(name, available))
    return same[index]


def find_devices(
    names: Sequence[str | jax.Device], available: Sequence[jax.Device]
) -> tuple[jax.Device, ...]:
    """Returns the devices of several names; see `find_device`."""
    if isinstance(names, str | jax.Device):
        names = [names]
    if not isinstance(names, Iterable):
        raise TypeError(
            "Devices are given as a sequence of names or jax devices. "
            f"Received: {names!r} of type {type(names).__name__}. Write for "
            f"example {_names(available)[:2]}."
        )
    return tuple(find_device(name, available) for name in names)


def local_devices() -> list[jax.Device]:
    """Returns this process's devices: the default platform's, then CPUs."""
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


def _unknown(name: str, available: Sequence[jax.Device]) -> str:
    return (
        f"Unknown device {name!r}. A device is a platform and an index, and "
        f"must exist. Received: {name!r}. Existing devices: "
        f"{', '.join(_names(available))}."
    )

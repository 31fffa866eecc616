"""Orders of TPU devices, and groups of replicas that shard variables.

The chips of a group are a box of the slice, of whole hosts: XLA's collectives
over it then use links of its own. Over a whole large slice they would become
all-reduces of whole arrays, and of other sets of chips XLA compiles none.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from keras_strategies.tpu.coordinates import (
    Cell,
    box_of,
    chip_of,
    has_coordinates,
    slice_of,
)

_MOST = 64
"""Chips of a group, if nothing else is said."""


def default_device_order(
    devices: Iterable[jax.Device],
) -> tuple[jax.Device, ...]:
    """Returns devices slice after slice, in each process after process.

    The rows of each process are then one piece of a batch. Devices without
    coordinates (CPUs, GPUs) keep their order.

    Args:
      devices: Devices of one platform, none twice; of each slice equally many.

    Raises:
      ValueError: no devices, or slices of different sizes.
    """
    devices = tuple(devices)
    if not devices:
        raise ValueError(
            "An order needs at least one device. Received: devices=(). Pass "
            "`jax.devices()`."
        )
    if not all(map(has_coordinates, devices)):
        return devices
    sizes = Counter(map(slice_of, devices))
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "All slices must have the same number of devices. Received: number "
            f"of devices by slice {dict(sizes)}. Choose as many of each slice."
        )
    return tuple(sorted(devices, key=lambda d: (slice_of(d), d.process_index)))


def grouped_device_order(
    devices: Sequence[jax.Device], shards: int | None
) -> tuple[tuple[jax.Device, ...], int | None]:
    """Devices in the order of their groups, and how many a group has.

    Args:
      devices: Devices of one platform, none twice; of each slice equally many.
      shards: How many devices a group has. None: those of a slice, or of a
        large slice the most that are a box of at most 64 chips.

    Returns:
      The devices, and their number in a group; of devices without coordinates
      (CPUs, GPUs) as it was given.

    Raises:
      ValueError: no boxes of so many devices fill the slices.
    """
    ordered = default_device_order(devices)
    if not all(map(has_coordinates, ordered)):
        return ordered, shards
    slices: dict[int, list[jax.Device]] = {}
    for device in ordered:
        slices.setdefault(slice_of(device), []).append(device)
    found: list[jax.Device] = []
    for of_slice in slices.values():
        replicas = np.array(of_slice, dtype=object)[:, None]
        groups, shards = _grouped(replicas, shards)
        for group in groups:
            found += group.flat
    return tuple(found), shards


def grouped_replicas(
    replicas: np.ndarray, shards: int | None
) -> tuple[np.ndarray, int | None]:
    """As `grouped_device_order`, of replicas of several cores in one slice.

    Args:
      replicas: Their devices, (replicas, cores).
      shards: How many replicas a group has.

    Returns:
      The replicas, those of a group after each other, and their number.

    Raises:
      ValueError: no boxes of so many replicas fill the slice.
    """
    if not all(map(has_coordinates, replicas.flat)):
        return replicas, shards
    groups, shards = _grouped(replicas, shards)
    return np.concatenate(groups), shards


def _grouped(
    replicas: np.ndarray, shards: int | None
) -> tuple[list[np.ndarray], int]:
    """The replicas of each group in a slice, and how many a group has.

    Args:
      replicas: Their devices, (replicas, cores).
      shards: How many replicas a group has; None for the default.
    """
    size, cores = replicas.shape
    if shards is not None and shards % size == 0:
        return [replicas], shards
    origin, _ = box_of([chip_of(device) for device in replicas.flat])
    boxes = {
        count // cores: box
        for count, box in _boxes(list(replicas.flat))
        if all(_is_in_one(replica, origin, box) for replica in replicas)
    }
    of_chip = replicas.size // len(set(map(chip_of, replicas.flat)))
    fit = [n for n in boxes if n * cores <= _MOST * of_chip]
    count = max(fit, default=size) if shards is None else shards
    if count == size:
        return [replicas], count
    if count not in boxes:
        raise ValueError(
            "On TPUs a group that divides variables is a box of whole hosts, "
            "with all cores of its replicas. Received: "
            f"shards={count} of slices with {size} replicas. "
            f"Choose one of {sorted(boxes)}, or None."
        )
    return _groups(replicas, boxes[count]), count


def _boxes(devices: Sequence[jax.Device]) -> Iterator[tuple[int, Cell]]:
    """Numbers of devices and boxes of chips that fill a slice.

    Of several with as many devices, one that spans most dimensions comes
    last, as there chips are linked to rings.
    """
    chips = {chip_of(device) for device in devices}
    cores = len(devices) // len(chips)
    _, whole = box_of(sorted(chips))
    if math.prod(whole) != len(chips):
        return
    hosts: dict[int, set[Cell]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, set()).add(chip_of(device))
    sizes = [box_of(sorted(of_host))[1] for of_host in hosts.values()]
    host = np.max(sizes, axis=0).tolist()
    sides = [
        [n for n in range(1, size + 1) if size % n == 0 and n % own == 0]
        for size, own in zip(whole, host, strict=True)
    ]
    boxes = sorted(
        itertools.product(*sides),
        key=lambda box: (
            sum(a == b for a, b in zip(box, whole, strict=True)),
            -max(box),
        ),
    )
    for box in boxes:
        yield math.prod(box) * cores, box


def _groups(replicas: np.ndarray, box: Cell) -> list[np.ndarray]:
    """The replicas in each box, in the order of the boxes."""
    origin, _ = box_of([chip_of(device) for device in replicas.flat])
    groups: dict[Cell, list[Any]] = {}
    for replica in replicas:
        place = _place(replica[0], origin, box)
        groups.setdefault(place, []).append(replica)
    return [np.array(groups[place]) for place in sorted(groups)]


def _is_in_one(replica: np.ndarray, origin: Cell, box: Cell) -> bool:
    """Whether all cores of a replica lie in one box."""
    return len({_place(device, origin, box) for device in replica}) == 1


def _place(device: jax.Device, origin: Cell, box: Cell) -> Cell:
    """Which of the boxes that fill a slice a device is in."""
    return tuple(
        (at - start) // side
        for at, start, side in zip(chip_of(device), origin, box, strict=True)
    )

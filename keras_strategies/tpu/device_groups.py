"""Groups of replicas that divide variables, on TPU slices.

The chips of a group are a box of the slice, of whole hosts: XLA's collectives
over it then use links of its own. Over a whole large slice they would become
all-reduces of whole arrays, and of other sets of chips XLA compiles none.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import jax

from keras_strategies.tpu.coordinates import (
    box_of,
    chip_of,
    has_coordinates,
    slice_of,
)
from keras_strategies.tpu.device_order import default_device_order
from keras_strategies.tpu.rings import Cell

_MOST = 64
"""Chips of a group, if nothing else is said."""


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
    size = len(next(iter(slices.values())))
    if shards is not None and shards % size == 0:
        return ordered, shards
    found: list[jax.Device] = []
    for of_slice in slices.values():
        boxes = dict(_boxes(of_slice))
        if shards is None:
            cores = size // len({chip_of(d) for d in of_slice})
            most = [n for n in boxes if n <= _MOST * cores]
            shards = max(most, default=size)
        if shards not in boxes:
            raise ValueError(
                "On TPUs a group that divides variables is a box of whole "
                f"hosts. Received: shards={shards} of slices with {size} "
                f"devices. Choose one of {sorted(boxes)}, or None."
            )
        for group in _groups(of_slice, boxes[shards]):
            found += default_device_order(group)
    return tuple(found), shards


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
    host = [
        max(sizes)
        for sizes in zip(
            *(box_of(sorted(of_host))[1] for of_host in hosts.values()),
            strict=True,
        )
    ]
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


def _groups(devices: Sequence[jax.Device], box: Cell) -> list[list[jax.Device]]:
    """The devices of each box, in the order of the boxes."""
    origin, _ = box_of([chip_of(device) for device in devices])
    groups: dict[Cell, list[jax.Device]] = {}
    for device in devices:
        place = tuple(
            (at - start) // side
            for at, start, side in zip(
                chip_of(device), origin, box, strict=True
            )
        )
        groups.setdefault(place, []).append(device)
    return [groups[place] for place in sorted(groups)]

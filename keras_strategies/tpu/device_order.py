"""The order of replicas in which neighbours are on neighbouring chips.

References:
  - `jax.experimental.mesh_utils`:
    https://docs.jax.dev/en/latest/jax.experimental.mesh_utils.html
"""

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils

from keras_strategies.tpu.coordinates import (
    box_of,
    chip_of,
    core_of,
    has_coordinates,
    slice_of,
)
from keras_strategies.tpu.rings import (
    Cell,
    count_hops,
    count_ring_hops,
    paths_through_block,
    ring_of_grid,
)

# No TPU host has more chips, and all paths through so few are tried quickly.
_MOST_CHIPS_PER_HOST = 8


def default_device_order(
    devices: Iterable[jax.Device],
) -> tuple[jax.Device, ...]:
    """Returns devices in the order in which replicas lie on them best.

    Slice follows slice. In a slice the devices of a process follow each
    other, the first process's first, and of such orders the one with the
    fewest hops between neighbours is taken: JAX's own (`mesh_utils`), a ring
    through the hosts, or the order as given. Devices without coordinates
    (CPUs, GPUs) keep their order.

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
    if not all(has_coordinates(device) for device in devices):
        return devices
    slices = _split_slices(devices)
    from_jax = _order_of_jax(devices, len(slices))
    ordered: list[jax.Device] = []
    for index, given in enumerate(slices):
        start = index * len(given)
        candidates = [
            from_jax[start : start + len(given)],
            _order_by_hosts(given),
            given,
        ]
        ordered += min(filter(None, candidates), key=_cost)
    return tuple(ordered)


def _split_slices(
    devices: Sequence[jax.Device],
) -> list[tuple[jax.Device, ...]]:
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(slice_of(device), []).append(device)
    sizes = {index: len(members) for index, members in slices.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            "All slices hold equally many devices. Received: number of "
            f"devices by slice {sizes}. Choose as many of each slice."
        )
    return [tuple(slices[index]) for index in sorted(slices)]


def _order_of_jax(
    devices: Sequence[jax.Device], num_slices: int
) -> tuple[jax.Device, ...]:
    """JAX's order, or nothing where JAX has none."""
    size = len(devices) // num_slices
    try:
        if num_slices == 1:
            mesh = mesh_utils.create_device_mesh((size,), devices)
        else:
            mesh = mesh_utils.create_hybrid_device_mesh(
                (size,), (num_slices,), devices
            )
    except (AssertionError, NotImplementedError, ValueError):
        # jax 0.10 asserts: no holes, and one device a chip on most kinds.
        return ()
    return tuple(mesh.flat)


def _cost(devices: Sequence[jax.Device]) -> tuple[int, int]:
    """How often the process changes more than needed, then the hops."""
    owners = [device.process_index for device in devices]
    runs = len(list(itertools.groupby(owners)))
    hops = count_ring_hops([chip_of(device) for device in devices])
    return runs - len(set(owners)), hops


def _order_by_hosts(
    devices: Sequence[jax.Device],
) -> tuple[jax.Device, ...]:
    """A ring through the hosts and in each through its chips.

    Nothing where the hosts' chips are not equal boxes that fill a larger box.
    """
    cores: dict[Cell, list[jax.Device]] = {}
    hosts: dict[int, set[Cell]] = {}
    for device in devices:
        cores.setdefault(chip_of(device), []).append(device)
        hosts.setdefault(device.process_index, set()).add(chip_of(device))
    tiling = _tile(hosts)
    if tiling is None:
        return ()
    corners, block = tiling
    if len(corners) == 1:
        chips = [_add(corners[0], cell) for cell in ring_of_grid(block)]
    elif math.prod(block) <= _MOST_CHIPS_PER_HOST:
        chips = _wind_through(corners, block)
    else:
        return ()
    return tuple(
        device for chip in chips for device in sorted(cores[chip], key=core_of)
    )


def _tile(hosts: dict[int, set[Cell]]) -> tuple[list[Cell], Cell] | None:
    """The corners of the hosts' boxes as a ring, and the shape of a box."""
    boxes = {host: box_of(sorted(chips)) for host, chips in hosts.items()}
    owners = {corner: host for host, (corner, _) in boxes.items()}
    origin, whole = box_of([chip for chips in hosts.values() for chip in chips])
    block = boxes[min(hosts)][1]
    grid = [-(-size // part) for size, part in zip(whole, block, strict=True)]
    corners = [
        _add(origin, [i * part for i, part in zip(cell, block, strict=True)])
        for cell in ring_of_grid(grid)
    ]
    is_tiled = (
        all(shape == block for _, shape in boxes.values())
        and all(len(chips) == math.prod(block) for chips in hosts.values())
        and sorted(owners) == sorted(corners)
    )
    if not is_tiled:
        return None
    first = corners.index(boxes[min(hosts)][0])
    return corners[first:] + corners[:first], block


def _wind_through(corners: Sequence[Cell], block: Cell) -> list[Cell]:
    """The chips of blocks, block after block, with the fewest hops.

    For every chip to start at: the best way to each exit of each block, from
    the best ways to the exits of the block before it.
    """
    paths = paths_through_block(block)
    steps = [_subtract(b, a) for a, b in itertools.pairwise(corners)]
    # Few kinds of steps lead from block to block: their hops are counted once.
    gaps = {step: _gaps(step, paths) for step in set(steps)}
    back = _gaps(_subtract(corners[0], corners[-1]), paths)
    best: tuple[float, _Way | None] = (math.inf, None)
    for start in paths:
        ways = {end: (0, (None, (start, end))) for end in paths[start]}
        for step in steps:
            ways = _continue(ways, gaps[step], paths)
        for end, (hops, way) in ways.items():
            hops += back[start, end]
            if hops < best[0]:
                best = hops, way
    pairs = reversed(list(_pairs_of(best[1])))
    return [
        _add(corner, cell)
        for corner, (entry, exit_) in zip(corners, pairs, strict=True)
        for cell in paths[entry][exit_]
    ]


_Paths = dict[Cell, dict[Cell, list[Cell]]]
_Gaps = dict[tuple[Cell, Cell], int]
_Way = tuple[Any, tuple[Cell, Cell]]
"""The way before, and the entry and exit of the last block."""


def _gaps(step: Cell, paths: _Paths) -> _Gaps:
    """Hops to an entry of the next block from an exit of the one before."""
    return {
        (entry, end): count_hops(end, _add(entry, step))
        for entry in paths
        for end in paths
    }


def _pairs_of(way: _Way | None) -> Iterator[tuple[Cell, Cell]]:
    while way is not None:
        way, pair = way
        yield pair


def _continue(
    ways: dict[Cell, tuple[int, _Way]], gaps: _Gaps, paths: _Paths
) -> dict[Cell, tuple[int, _Way]]:
    longer: dict[Cell, tuple[int, _Way]] = {}
    for entry, exits in paths.items():
        hops, way = min(
            (
                (so_far + gaps[entry, end], way)
                for end, (so_far, way) in ways.items()
            ),
            key=operator.itemgetter(0),
        )
        for end in exits:
            if end not in longer or hops < longer[end][0]:
                longer[end] = (hops, (way, (entry, end)))
    return longer


def _add(a: Sequence[int], b: Sequence[int]) -> Cell:
    return tuple(p + q for p, q in zip(a, b, strict=True))


def _subtract(a: Sequence[int], b: Sequence[int]) -> Cell:
    return tuple(p - q for p, q in zip(a, b, strict=True))

"""Specifications of accelerators, for estimates."""

import dataclasses
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax


_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Specifications of one device (a chip, or one of a chip's cores).

    If JAX shows the two cores of a chip as two devices, the values are those of
    one core.

    Attributes:
      name: The name in topologies, such as "v5e".
      memory_bytes: Bytes of memory that the compiler allows a program to use.
      flops: Peak rate in multiplications and additions per second, for matrix
        products in bfloat16.
      memory_bandwidth: Bandwidth of the memory, in bytes per second.
      link_bandwidth: Total bandwidth of all links to other chips of the slice,
        in bytes sent per second.
      num_links: The number of links of a chip: 4 on 2-D slices, 6 on 3-D
        slices.
      on_chip_bytes: Bytes of vector memory (VMEM), on the chip itself.
      source: The web page that contains these values.
    """

    name: str
    memory_bytes: int
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    num_links: int
    on_chip_bytes: int
    source: str


_DOCS = "https://cloud.google.com/tpu/docs/"


def _make_chip(
    name: str,
    gib: float,
    tflops: float,
    memory: float,
    links: tuple[float, int],
    mib: int,
) -> Chip:
    bandwidth, num_links = links
    return Chip(
        name=name,
        memory_bytes=int(gib * _GIB),
        flops=tflops * 1e12,
        memory_bandwidth=memory * 1e9,
        link_bandwidth=bandwidth * 1e9,
        num_links=num_links,
        on_chip_bytes=mib * 2**20,
        source=_DOCS + name,
    )


# Specifications by JAX's `device_kind`. The memory is the "available HBM" in
# error messages of libtpu 0.0.42, and that on the chip is what JAX's Pallas
# lists (jax 0.10). The other values are from the web pages, which list the
# bandwidth of links per direction.
_BY_KIND = {
    "TPU v4": _make_chip("v4", 30.75, 275, 1228, (300, 6), 32),
    "TPU v5 lite": _make_chip("v5e", 15.75, 197, 819, (200, 4), 128),
    "TPU v5": _make_chip("v5p", 95.74, 459, 2765, (600, 6), 128),
    "TPU v6 lite": _make_chip("v6e", 31.25, 918, 1640, (400, 4), 128),
    # JAX shows such a chip as two devices. The values are those of one device.
    "TPU7x": _make_chip("tpu7x", 94.75, 1153.5, 3690, (600, 6), 64),
}
# For a v4 chip whose two cores JAX shows as two devices.
_OF_V4_CORE = _make_chip("v4", 15.25, 137.5, 614, (150, 6), 16)


def find_chip(device: "jax.Device") -> Chip | None:
    """Returns the specifications of a device, or None if they are unknown."""
    kind = device.device_kind
    if kind == "TPU v4" and getattr(device, "num_cores", 2) == 1:
        return _OF_V4_CORE
    return _BY_KIND.get(kind)


def find_memory(device: "jax.Device", num_local: int = 1) -> int | None:
    """Returns the bytes of memory that a program may use on a device.

    Args:
      device: The device.
      num_local: If the device is a CPU: the number of CPU devices that share
        the machine's memory.

    Returns:
      The number of bytes, or None if it is unknown.
    """
    chip = find_chip(device)
    if chip is not None:
        return chip.memory_bytes
    if device.platform == "cpu":
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return pages * size // num_local if pages > 0 else None
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")

"""Figures of accelerators, for estimates."""

import dataclasses
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax


_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """What one device of an accelerator can do.

    Of a chip that JAX sees as two devices, half of the chip.

    Attributes:
      name: As in names of topologies: "v5e".
      memory_bytes: What the compiler lets a program have.
      flops: Multiplications and additions of bfloat16 matrices a second.
      memory_bandwidth: Bytes a second, of its memory.
      link_bandwidth: Bytes a second that leave it, by all of its links to
        other chips of the slice together.
      source: Where the figures are from.
    """

    name: str
    memory_bytes: int
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    source: str


_DOCS = "https://cloud.google.com/tpu/docs/"


def _chip(
    name: str, gib: float, tflops: float, memory: float, links: float, page: str
) -> Chip:
    return Chip(
        name=name,
        memory_bytes=int(gib * _GIB),
        flops=tflops * 1e12,
        memory_bandwidth=memory * 1e9,
        link_bandwidth=links * 1e9,
        source=_DOCS + page,
    )


# By JAX's `device_kind`. Memory is the "available HBM" of libtpu 0.0.42's
# errors; the rest is from the pages, whose Gbps of links are those of one
# direction.
_BY_KIND = {
    "TPU v4": _chip("v4", 30.75, 275, 1228, 300, "v4"),
    "TPU v5 lite": _chip("v5e", 15.75, 197, 819, 200, "v5e"),
    "TPU v5": _chip("v5p", 95.74, 459, 2765, 600, "v5p"),
    "TPU v6 lite": _chip("v6e", 31.25, 918, 1640, 400, "v6e"),
    # Half of a chip.
    "TPU7x": _chip("tpu7x", 94.75, 1153.5, 3690, 600, "tpu7x"),
}
# A v4 whose two cores are two devices.
_OF_V4_CORE = _chip("v4", 15.25, 137.5, 614, 150, "v4")


def chip_of(device: "jax.Device") -> Chip | None:
    """The figures of a device; None if there are none."""
    kind = device.device_kind
    if kind == "TPU v4" and getattr(device, "num_cores", 2) == 1:
        return _OF_V4_CORE
    return _BY_KIND.get(kind)


def memory_of(device: "jax.Device", num_local: int = 1) -> int | None:
    """Bytes that a program may have on a device.

    Args:
      device: The device.
      num_local: How many share the machine's memory, if it is a CPU's.

    Returns:
      None: unknown.
    """
    chip = chip_of(device)
    if chip is not None:
        return chip.memory_bytes
    if device.platform == "cpu":
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return pages * size // num_local if pages > 0 else None
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")

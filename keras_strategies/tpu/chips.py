"""Specifications of accelerators, for estimates."""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from keras_strategies.gpu.topology_devices import TARGETS, is_absent_gpu

if TYPE_CHECKING:
    import jax


_GIB = 2**30
_FRACTIONS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Environment variables with the share of a GPU's memory that JAX uses."""
_FRACTION = 0.75


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """Specifications of one device (a chip, or one of a chip's cores).

    If JAX shows the two cores of a chip as two devices, the values are those of
    one core.

    Attributes:
      name: The name in topologies, such as "v5e".
      memory_bytes: Bytes of memory that the compiler allows a program to use;
        for a GPU, all of its memory.
      flops: Peak rate in multiplications and additions per second, for matrix
        products in bfloat16.
      memory_bandwidth: Bandwidth of the memory, in bytes per second.
      link_bandwidth: Total bandwidth of all links to other chips of the slice,
        or to other GPUs of the host, in bytes sent per second.
      num_links: The number of links of a chip: 4 on 2-D slices, 6 on 3-D
        slices. For a GPU, of its NVLinks.
      on_chip_bytes: Bytes of vector memory (VMEM), on the chip itself. 0 for a
        GPU.
      other_flops: Peak rates for products in other dtypes, by XLA's names. By
        default, they are those in bfloat16.
      host_bandwidth: The bandwidth of PCIe to the host per direction, in bytes
        per second: that of 16 lanes for a GPU; for a TPU, an assumed one.
      network_bandwidth: For a GPU, the bandwidth of the network between hosts,
        in bytes that each GPU sends per second. An assumption: the value is
        that of NVIDIA's machines.
      workspace_bytes: For a GPU, bytes of memory that cuBLAS uses in addition
        to those of the program.
      integer_ops: Integer operations per second. For a TPU: 4 operations of
        each of 8 x 128 lanes in a cycle, as in XLA's estimates. Unlimited for a
        GPU.
      product_share: The share of the peak rate that matrix products reach.
      memory_share: The share of the memory's bandwidth that instructions reach.
        For a TPU, the one that XLA's estimates assume.
      min_seconds: The time of an instruction with little work. In TPU
        programs compiled at full effort, XLA estimates 1,500 to 2,400 cycles of
        0.67 ns for most of them.
    """

    name: str
    memory_bytes: int
    flops: float
    memory_bandwidth: float
    link_bandwidth: float
    num_links: int
    on_chip_bytes: int
    other_flops: Mapping[str, float] = dataclasses.field(default_factory=dict)
    network_bandwidth: float = 0.0
    host_bandwidth: float = 16e9
    workspace_bytes: int = 0
    integer_ops: float = math.inf
    product_share: float = 1.0
    memory_share: float = 0.9
    min_seconds: float = 1.2e-6

    def find_flops(self, dtype: str) -> float:
        """Returns the peak rate for products of a dtype."""
        return self.other_flops.get(dtype, self.flops)


def _make_chip(
    name: str,
    gib: float,
    tflops: float,
    memory: float,
    links: tuple[float, int],
    mib: int,
    lanes: int = 32,
) -> Chip:
    # In a cycle, matrix units compute `lanes` operations for each operation of
    # the vector units.
    bandwidth, num_links = links
    return Chip(
        name=name,
        memory_bytes=int(gib * _GIB),
        flops=tflops * 1e12,
        memory_bandwidth=memory * 1e9,
        link_bandwidth=bandwidth * 1e9,
        num_links=num_links,
        on_chip_bytes=mib * 2**20,
        integer_ops=tflops * 1e12 / lanes,
    )


def _make_gpu(
    name: str,
    tflops: tuple[float, float, float],
    links: tuple[float, int],
    network: float,
    workspace: int,
) -> Chip:
    """Returns a GPU's specifications.

    Args:
      name: The name in topologies.
      tflops: The peak rates for products in bfloat16, TF32 and float32.
      links: The bandwidth of all NVLinks per direction, in GB/s, and their
        number.
      network: The bandwidth of the network, in GB/s.
      workspace: MiB of cuBLAS's workspace.
    """
    target = TARGETS[name]
    half, tf32, exact = (rate * 1e12 for rate in tflops)
    bandwidth, num_links = links
    return Chip(
        name=name,
        memory_bytes=target.memory,
        flops=half,
        memory_bandwidth=float(target.memory_bandwidth),
        link_bandwidth=bandwidth * 1e9,
        num_links=num_links,
        on_chip_bytes=0,
        # By default, XLA multiplies float32 arrays as TF32.
        other_flops={"f32": tf32, "f32 exact": exact, "f64": exact},
        network_bandwidth=network * 1e9,
        host_bandwidth=32e9 if name == "a100" else 64e9,
        workspace_bytes=workspace * 2**20,
        # In four models on an H100 (benchmarks/gpu_run.py).
        product_share=0.65,
        memory_share=0.75,
        min_seconds=2.5e-6,
    )


# Rates without sparsity, of https://www.nvidia.com/en-us/data-center/. The
# network is that of a DGX, which has one adapter for each GPU: of 200 Gb/s for
# A100s, else of 400. The workspaces are the defaults of cuBLAS:
# https://docs.nvidia.com/cuda/cublas/#cublassetworkspace
GPUS = {
    gpu.name: gpu
    for gpu in (
        _make_gpu("a100", (312, 156, 19.5), (300, 12), 25, 4),
        _make_gpu("h100", (989.5, 494.7, 67), (450, 18), 50, 32),
        _make_gpu("h200", (989.5, 494.7, 67), (450, 18), 50, 32),
        _make_gpu("b200", (2250, 1125, 75), (900, 18), 50, 32),
    )
}
"""The specifications of GPUs by their names."""

# Specifications by JAX's `device_kind`. The memory is the "available HBM" in
# error messages of libtpu 0.0.42, and that on the chip is what JAX's Pallas
# lists (jax 0.10). The other values are from the pages of the generations below
# https://cloud.google.com/tpu/docs/, which list the bandwidth of links per
# direction.
_BY_KIND = {
    "TPU v4": _make_chip("v4", 30.75, 275, 1228, (300, 6), 32),
    "TPU v5 lite": _make_chip("v5e", 15.75, 197, 819, (200, 4), 128),
    "TPU v5": _make_chip("v5p", 95.74, 459, 2765, (600, 6), 128),
    "TPU v6 lite": _make_chip("v6e", 31.25, 918, 1640, (400, 4), 128, 128),
    # JAX shows such a chip as two devices. The values are those of one device.
    "TPU7x": _make_chip("tpu7x", 94.75, 1153.5, 3690, (600, 6), 64, 128),
    **{TARGETS[name].device_kind: gpu for name, gpu in GPUS.items()},
}
TPU_NAMES = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x")
"""The generations of TPUs in the names of slices."""

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
    if chip is not None and device.platform == "tpu":
        return chip.memory_bytes
    if chip is not None and is_absent_gpu(device):
        share = _find_fraction()
        return int(chip.memory_bytes * share) - chip.workspace_bytes
    if device.platform == "cpu":
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return pages * size // num_local if pages > 0 else None
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")


def _find_fraction() -> float:
    """Returns the share of a GPU's memory that JAX gives to a process."""
    texts = [os.environ.get(name) for name in _FRACTIONS]
    share = float(next(filter(None, texts), _FRACTION))
    if not 0 < share <= 1:
        raise ValueError(
            f"{_FRACTIONS[1]} must be above 0 and at most 1. Received: {share}."
        )
    return share

"""Estimates how long a GPU takes for an instruction or a collective.

An instruction takes the longer one of the times for its operations and for its
bytes, at the shares of the GPU's peak rate and bandwidth that kernels reached
in four models on an H100 (benchmarks/gpu_run.py). XLA chooses the kernels of
matrix products, convolutions and attention only on a GPU, by measuring them.
For other kernels, it can add estimates to a program's text
(`xla_gpu_collect_cost_model_stats`), which assume the full bandwidth (jax
0.10.2).
"""

from collections.abc import Sequence
from typing import Any

from keras_strategies.planning.program.chips import Chip
from keras_strategies.planning.program.hlo import Computation, Instruction
from keras_strategies.planning.program.links import Collective
from keras_strategies.planning.program.networks import Network
from keras_strategies.planning.program.products import is_convolution
from keras_strategies.planning.program.tpu_clock import KERNEL_UTILIZATION
from keras_strategies.planning.program.walk import Spent
from keras_strategies.planning.program.work import Work

_PRODUCTS_SHARE = 0.65
"""The share of the peak rate that matrix products reach."""
_MEMORY_SHARE = 0.75
"""The share of the memory's bandwidth that kernels reach."""
_CONVOLUTIONS_SHARE = 0.55
"""The share of the peak rate, or of the bandwidth, that convolutions reach."""
_LAUNCH_SECONDS = 2.5e-6
"""The time of a kernel with little work."""


class GpuClock:
    """Implements `Clock` for GPUs.

    Args:
      chip: The GPU.
      devices: The devices in the order of the program's mesh.
    """

    def __init__(self, chip: Chip, devices: Sequence[Any]) -> None:
        self._chip = chip
        self._network = Network(chip, devices)

    def measure(
        self,
        computation: Computation,
        instruction: Instruction,
        work: Work,
        is_resident: bool,
    ) -> Spent:
        """Implements `Clock.measure`."""
        chip = self._chip
        sizes = *work.read.values(), *work.written.values(), work.parts
        moved = sum(sizes)
        if not moved:
            return Spent()
        kernels = work.kernel_flops / chip.flops
        compute = kernels + sum(
            n / chip.find_flops(dtype) for dtype, n in work.products.items()
        )
        memory = moved / chip.memory_bandwidth
        if is_convolution(instruction):
            busy = max(compute, memory) / _CONVOLUTIONS_SHARE
        else:
            products = (compute - kernels) / _PRODUCTS_SHARE
            busy = max(
                products + kernels / KERNEL_UTILIZATION, memory / _MEMORY_SHARE
            )
        seconds = max(busy, _LAUNCH_SECONDS)
        return Spent(
            seconds=seconds,
            compute_seconds=compute,
            moved_bytes=moved,
            is_latency=seconds == _LAUNCH_SECONDS,
        )

    def measure_links(self, collective: Collective) -> tuple[float, float]:
        """Implements `Clock.measure_links`."""
        return self._network.measure(collective)

    def is_resident(self, body: Computation) -> bool:
        """Implements `Clock.is_resident`: GPUs have no such memory."""
        return False

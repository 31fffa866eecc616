"""Estimates a step's time from its computation, memory and communication.

References:
  - Williams et al., Roofline (2009): https://doi.org/10.1145/1498765.1498785
  - How to Scale Your Model (2025): https://jax-ml.github.io/scaling-book/
"""

import math

from keras_strategies._core.compiled import Figures
from keras_strategies.planning.compile.chips import Chip
from keras_strategies.planning.report.planned_step import Estimate

_LAUNCH_SECONDS = 1e-4
"""The time that JAX needs to start a program. No execution takes less time."""
# The number of times that a chip's links carry an array: 2 in an all-reduce,
# which sends it around a ring twice, and 1 in other collectives.
_PASSES = {"all-reduce": 2.0}
_KERNEL_UTILIZATION = 0.5
"""The share of the peak rate that attention's kernels are assumed to reach.

XLA does not estimate their time.
"""


def estimate(
    figures: Figures,
    chip: Chip,
    model_flops: float | None,
    *,
    steps: int = 1,
    step_bytes: float = math.inf,
) -> Estimate:
    """Estimates the time of a training step.

    Args:
      figures: The operations, bytes and collectives of the step's program, as
        XLA reports them after compiling at low effort.
      chip: The chip that the program runs on.
      model_flops: Floating-point operations of the model per step and device,
        forward and backward, without rematerialization. None if unknown.
      steps: The number of training steps in the program. The operations that
        XLA reports are those of one step.
      step_bytes: Bytes of the model's state and one step's batch on a device.
    """
    # XLA counts the body of the loop over steps only once.
    compute = max(figures.flops, model_flops or 0.0) / chip.flops
    # The state is read once, and written in place once. The batches of the
    # program's other steps are not counted.
    used = min(figures.argument_bytes, step_bytes)
    moved = 2 * used + figures.output_bytes
    memory = moved / chip.memory_bandwidth
    sent = sum(n * _PASSES.get(k, 1.0) for k, n in figures.sent.items())
    links = sent / chip.link_bandwidth
    least = max(compute, memory, links, _LAUNCH_SECONDS / steps)
    kernels = figures.kernel_flops / chip.flops / _KERNEL_UTILIZATION
    optimal = figures.optimal_seconds
    seconds = max(optimal and optimal + kernels, least)

    def utilization(took: float) -> float | None:
        if model_flops is None or not took:
            return None
        return model_flops / chip.flops / took

    return Estimate(
        seconds=seconds,
        compute_seconds=compute,
        memory_seconds=memory,
        link_seconds=links,
        utilization=utilization(seconds),
        most_utilization=utilization(least),
    )

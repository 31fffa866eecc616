"""Estimates a step's time from its computation, memory and communication.

References:
  - Williams et al., Roofline (2009): https://doi.org/10.1145/1498765.1498785
  - How to Scale Your Model (2025): https://jax-ml.github.io/scaling-book/
"""

from collections.abc import Iterable

from keras_strategies.planning.program.costs import Costs
from keras_strategies.planning.report.planned_step import Estimate
from keras_strategies.planning.seam import (
    chips,
    is_gpu_name,
)

HOST_SECONDS = 3e-4
"""The time in which Python starts a program. On two cores, a step of `fit` of a
tiny model takes 0.2 ms on one device and 0.4 ms on four."""
_NOTE = (
    "Bytes and collectives are reported by the compiler. Times are estimates."
)
_GPU_NOTE = (
    "XLA chooses the kernels of products, convolutions and attention only on a "
    "GPU. Here, products and convolutions reach the share of the GPU's peak "
    "that they reached on an H100, and the memory that cuDNN uses is not "
    "counted. Between hosts, the network of NVIDIA's machines is assumed."
)
_HIDDEN = ("all-gather",)
"""Collectives that XLA computes beside other work in programs for training, but
not in those compiled at low effort."""


def estimate(
    costs: Costs,
    chip: chips.Chip,
    model_flops: float | None,
    *,
    steps: int = 1,
    scheduled: Costs | None = None,
    host_bytes: float = 0.0,
) -> Estimate | None:
    """Estimates the time of a training step.

    Returns None if the program's text could not be parsed.

    Args:
      costs: The costs of the step's program, compiled at low effort if there
        are several.
      chip: The chip that the program runs on.
      model_flops: Floating-point operations of the model per step and device,
        forward and backward, without rematerialization. None if unknown.
      steps: The number of training steps in the program.
      scheduled: The costs of the program at full effort, which tell how long it
        waits for collectives. None if it was not compiled at full effort.
      host_bytes: The bytes of slots that a step moves from the host and back.
    """
    if costs.unread:
        return None
    compute = max(
        costs.compute_seconds / steps, (model_flops or 0.0) / chip.flops
    )
    memory = costs.moved_bytes / steps / chip.memory_bandwidth
    links = sum(costs.link_seconds.values()) / steps
    latency = costs.latency_seconds / steps
    host = HOST_SECONDS / steps
    minimum = max(compute, memory, links, latency, host)
    waits, hidden = costs.waiting_seconds, _HIDDEN
    if scheduled is not None and not scheduled.unread:
        waits, hidden = scheduled.waiting_seconds, ()
    waiting = sum(n for kind, n in waits.items() if kind not in hidden)
    transfers = 2 * host_bytes / chip.host_bandwidth
    seconds = max((costs.busy_seconds + waiting) / steps, minimum) + transfers
    utilization = None
    if model_flops is not None and seconds:
        utilization = model_flops / chip.flops / seconds
    return Estimate(
        seconds=seconds,
        compute_seconds=compute,
        memory_seconds=memory,
        link_seconds=links,
        latency_seconds=latency,
        host_seconds=host,
        transfer_seconds=transfers,
        utilization=utilization,
    )


def write_notes(topologies: Iterable[str]) -> tuple[str, ...]:
    """Returns sentences that apply to all candidates of a plan.

    Args:
      topologies: The names of the candidates' topologies.
    """
    has_gpus = any(map(is_gpu_name, topologies))
    return (_NOTE, _GPU_NOTE) if has_gpus else (_NOTE,)


def describe_unknown(costs: Costs) -> str:
    """Returns a sentence about what the times leave out, or ""."""
    if costs.unread:
        return (
            "The times are unknown, because the compiler wrote the program in "
            f"a form that this version cannot parse ({costs.unread})."
        )
    if not costs.unknown_loops:
        return ""
    names = ", ".join(costs.unknown_loops)
    return (
        f"The number of iterations of a loop is unknown ({names}), so the "
        "time of one iteration is counted."
    )

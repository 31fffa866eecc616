"""`PlannedStep`: the memory and time of a step on devices, in a layout."""

import dataclasses
from collections.abc import Mapping
from typing import Any

BYTES_PER_GB = 1e9
KINDS = (
    "weights",
    "slots",
    "other",
    "gradients",
    "activations",
    "temporary",
    "code",
)
"""The categories of a device's memory in `PlannedStep.memory`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimated time of a training step, and what bounds it from below.

    Attributes:
      seconds: The estimated time: that of all instructions and of the links for
        which they wait, or the largest bound, whichever is larger.
      compute_seconds: The time to compute all operations at the chip's peak
        rate.
      memory_seconds: The time to read and write all bytes that the program
        moves to and from the chip's memory.
      link_seconds: The time to send the collectives' data over the links.
      latency_seconds: The time of the instructions with so little work that
        only their number matters, such as those of a loop over time.
      host_seconds: The time in which Python starts the step.
      transfer_seconds: The time to move slots from the host and back, one
        direction after the other. `seconds` contains it.
      utilization: The model FLOPs utilization (MFU): the fraction of the chip's
        peak rate that the model's operations (without recomputed ones) reach.
        None if unknown.
    """

    seconds: float
    compute_seconds: float
    memory_seconds: float
    link_seconds: float
    latency_seconds: float
    host_seconds: float
    utilization: float | None
    transfer_seconds: float = 0.0

    @property
    def bounds(self) -> Mapping[str, float]:
        """The bounds in seconds, by what limits the step's time."""
        bounds = {
            "compute": self.compute_seconds,
            "memory": self.memory_seconds,
            "links": self.link_seconds,
            "latency": self.latency_seconds,
            "host": self.host_seconds,
        }
        transfers = self.transfer_seconds
        return bounds | ({"PCIe": transfers} if transfers else {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """The memory, collectives and time of a training step on some devices.

    The devices and the layout, which defines how the model's variables are
    sharded over them, are those of one candidate of a plan.

    Attributes:
      topology: The name of the devices, such as "v5e:4x4" or "h100:8", or JAX's
        name of their kind.
      layout: The name of the model's layout on them: "replicated",
        "sharded:64", ...
      num_devices: The number of devices.
      num_replicas: The number of replicas.
      rows: The number of rows of the global batch.
      limit_bytes: Bytes of memory that a program may use on a device, or None
        if unknown.
      bytes_in_all: Total bytes that the step needs on a device, or None if
        unknown.
      host_bytes: Bytes of slots in the memory of the host of a process.
      memory: The needed bytes by category: "weights", "slots" (the optimizer's
        state), "other" (metrics, the batch and padding), "gradients" (as if all
        gradients existed at the same time, an upper bound), "activations"
        (memory that grows with the number of rows), "code" (the program itself)
        and "temporary" (the rest).
      counts: The number of collectives in a step, by their kind, such as
        "all-reduce".
      sent: Bytes of the arrays that the collectives in a step send, by kind.
      estimate: The estimated time of a step, or None if unknown.
      top_operations: The seconds of the operations that take longest, by
        descriptions such as "gather in random_rotation".
      tokens: The number of tokens per row. None if rows are not sequences of
        tokens.
      max_rows: The largest number of rows per replica that fits, or None if
        unknown.
      is_full_effort: Whether the bytes are those of a program compiled at full
        effort, as for training. Otherwise the program was compiled faster, and
        the reported bytes are up to a quarter more or a third less than at full
        effort.
      is_accepted: Whether the TPU's compiler accepted the program of the
        whole model for this number of rows. Then the step fits, even if the sum
        of the bytes exceeds the limit because some arrays share memory.
      advice: A sentence of advice, or "".
      error: If the step could not be planned: the reason. Otherwise None.

    Example:
      >>> step = ks.PlannedStep(
      ...     topology="v5e:2x2", layout="replicated", num_devices=4,
      ...     num_replicas=4, rows=64, limit_bytes=16_000_000_000,
      ...     bytes_in_all=9e9,
      ... )
      >>> step.fits
      True
      >>> ks.PlannedStep.from_json(step.to_json()) == step
      True
    """

    topology: str
    layout: str
    num_devices: int = 0
    num_replicas: int = 0
    rows: int = 0
    limit_bytes: int | None = None
    bytes_in_all: float | None = None
    host_bytes: float = 0.0
    memory: Mapping[str, float] = dataclasses.field(default_factory=dict)
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    sent: Mapping[str, float] = dataclasses.field(default_factory=dict)
    estimate: Estimate | None = None
    top_operations: Mapping[str, float] = dataclasses.field(
        default_factory=dict
    )
    tokens: int | None = None
    max_rows: int | None = None
    is_full_effort: bool = False
    is_accepted: bool = False
    advice: str = ""
    error: str | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the step fits, or None if unknown."""
        if self.error is not None:
            return False
        if self.is_accepted:
            return True
        if self.bytes_in_all is None or self.limit_bytes is None:
            return None
        return self.bytes_in_all <= self.limit_bytes

    @property
    def rows_per_second(self) -> float | None:
        """Rows of the batch processed per second, or None if unknown."""
        if self.estimate is None or not self.estimate.seconds:
            return None
        return self.rows / self.estimate.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the batch processed per second, or None if unknown."""
        if self.tokens is None or self.rows_per_second is None:
            return None
        return self.tokens * self.rows_per_second

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "PlannedStep":
        """Creates a step from a dict that `to_json` returned."""
        names = {field.name for field in dataclasses.fields(cls)}
        facts = {n: value for n, value in found.items() if n in names}
        if facts.get("estimate") is not None:
            facts["estimate"] = Estimate(**facts["estimate"])
        return cls(**facts)

    def to_json(self) -> dict[str, Any]:
        """Returns the step as a dict that `json.dumps` accepts."""
        return {
            **dataclasses.asdict(self),
            "fits": self.fits,
            "rows_per_second": self.rows_per_second,
            "tokens_per_second": self.tokens_per_second,
        }


def format_gb(size: float) -> str:
    """Formats bytes as GB: two decimals below 10 GB, otherwise one."""
    gigabytes = size / BYTES_PER_GB
    digits = 2 if gigabytes < 10 else 1
    return f"{gigabytes:.{digits}f}"

"""`PlannedStep`: the requirements of a step on one slice, in one layout."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

BYTES_PER_GB = 1e9
KINDS = ("weights", "slots", "other", "gradients", "activations", "temporary")
"""Kinds of a device's memory."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """An estimate of a step's time, with its lower bounds.

    Attributes:
      seconds: The estimate: XLA's, or the largest bound.
      compute_seconds: The time of all operations at the chip's peak.
      memory_seconds: The time to read and write the state once.
      link_seconds: The time to send the collectives' data over all links of a
        chip.
      utilization: The share of the chip's peak that the model's operations
        take (without rematerialization), or None if unknown.
      most_utilization: The same for a step as fast as its largest bound.
    """

    seconds: float
    compute_seconds: float
    memory_seconds: float
    link_seconds: float
    utilization: float | None
    most_utilization: float | None

    @property
    def bounds(self) -> Mapping[str, float]:
        """The seconds of each bound, by name."""
        return {
            "compute": self.compute_seconds,
            "memory": self.memory_seconds,
            "links": self.link_seconds,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """The requirements of a step on one slice, in one layout.

    Attributes:
      topology: The slice's name, or the devices' kind.
      layout: The name of the model's layout on the slice: "replicated",
        "sharded:64", ...
      num_devices: The number of devices of the slice.
      num_replicas: The number of replicas.
      rows: The rows of the global batch.
      limit_bytes: Bytes that a program may use on a device, or None if
        unknown.
      bytes_in_all: Bytes that the step needs on a device, or None if unknown.
      memory: The same by kind: "weights", "slots", "other" (metrics, the
        batch and padding), "gradients" (an upper bound: all at once),
        "activations" (memory that grows with the rows) and "temporary".
      counts: The number of collectives of a step, by kind.
      sent: Bytes of the arrays that they send, by kind.
      estimate: The estimated time of a step, or None if unknown.
      tokens: Tokens of a row, or None if rows are not sequences of tokens.
      most_rows: The most rows of each replica that fit, or None if unknown.
      is_most_verified: Whether `most_rows` was compiled at full effort, and
        one more row on each replica does not fit.
      is_full_effort: Whether the bytes are those of a program compiled at full
        effort, as for training. Otherwise they are those of one compiled
        faster, which needs up to a tenth more or a third less.
      is_accepted: Whether the slice's compiler accepted the model itself, with
        its rows. Then it fits, even if the bytes of arrays that share memory
        add up to more than the limit.
      blocks: The numbers of blocks of the two compiled models and of the
        model, or None if the model itself was compiled.
      compile_seconds: The total time of compiling.
      advice: Advice, in a sentence, or "".
      error: The reason why there are no figures, or None if there are.

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
    num_devices: int
    num_replicas: int
    rows: int
    limit_bytes: int | None
    bytes_in_all: float | None = None
    memory: Mapping[str, float] = dataclasses.field(default_factory=dict)
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    sent: Mapping[str, float] = dataclasses.field(default_factory=dict)
    estimate: Estimate | None = None
    tokens: int | None = None
    most_rows: int | None = None
    is_most_verified: bool = False
    is_full_effort: bool = False
    is_accepted: bool = False
    blocks: tuple[int, int, int] | None = None
    compile_seconds: float = 0.0
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
        """Rows of the global batch that are trained on per second, or None."""
        if self.estimate is None or not self.estimate.seconds:
            return None
        return self.rows / self.estimate.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that are trained on per second, or None."""
        if self.tokens is None or self.rows_per_second is None:
            return None
        return self.tokens * self.rows_per_second

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "PlannedStep":
        """Returns the step from a dict that `to_json` returned."""
        names = {field.name for field in dataclasses.fields(cls)}
        facts = {n: value for n, value in found.items() if n in names}
        if facts.get("estimate") is not None:
            facts["estimate"] = Estimate(**facts["estimate"])
        if facts.get("blocks") is not None:
            facts["blocks"] = tuple(facts["blocks"])
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
    """Returns bytes as GB, with three digits or one decimal."""
    gigabytes = size / BYTES_PER_GB
    digits = 2 if gigabytes < 10 else 1
    return f"{gigabytes:.{digits}f}"


def find_fastest(steps: Iterable[PlannedStep]) -> PlannedStep | None:
    """Returns the fitting step with the most rows per second and device."""
    fit = [(s.rows_per_second, s) for s in steps if s.fits]
    rates = [(rate / s.num_devices, s) for rate, s in fit if rate]
    return max(rates, key=lambda pair: pair[0], default=(0.0, None))[1]

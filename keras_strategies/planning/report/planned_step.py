"""`PlannedStep`: what a step needs on one slice, in one layout."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

BYTES_PER_GB = 1e9
KINDS = ("weights", "slots", "other", "gradients", "activations", "temporary")
"""What a device's memory is taken by."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """How long a step takes, and what it cannot be faster than.

    Attributes:
      seconds: An estimate: XLA's own, or the largest bound.
      compute_seconds: All operations at the chip's peak.
      memory_seconds: The state read and written once.
      link_seconds: What collectives send, over all links of a chip.
      utilization: Of the chip's peak, by the operations that the model has
        (without those that are done again); None: unknown.
      most_utilization: The same, were a step as fast as its largest bound.
    """

    seconds: float
    compute_seconds: float
    memory_seconds: float
    link_seconds: float
    utilization: float | None
    most_utilization: float | None

    @property
    def bounds(self) -> Mapping[str, float]:
        """Seconds of each bound, by name."""
        return {
            "compute": self.compute_seconds,
            "memory": self.memory_seconds,
            "links": self.link_seconds,
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """What a step needs on one slice, in one layout.

    Attributes:
      topology: The slice's name, or the devices' kind.
      layout: How the model lies on it: "replicated", "sharded:64", ...
      num_devices: Devices of the slice.
      num_replicas: Replicas that they are.
      rows: Of the global batch.
      limit_bytes: What a program may have on a device; None: unknown.
      bytes_in_all: What it needs on a device; None: unknown.
      memory: The same by kind: "weights", "slots", "other" (metrics, the
        batch and padding), "gradients" (at most; all at once), "activations"
        (what grows with the rows) and "temporary".
      counts: Collectives of a step, by kind.
      sent: Bytes of the arrays that they send, by kind.
      estimate: How long a step takes; None: unknown.
      tokens: Tokens of a row; None: rows are no sequences of them.
      most_rows: Rows on each replica that fit; None: unknown.
      is_most_verified: Whether they were compiled at full effort, and one row
        more on each replica, which does not fit.
      is_full_effort: Whether bytes are those of a program as it would be run;
        else of one that was compiled faster, and needs a tenth more or a
        third less.
      is_accepted: Whether the slice's compiler took the model itself, with its
        rows: it fits, also where bytes that share room add up to more.
      blocks: Of how many blocks the two models were that were compiled, and
        the model's own number; None: the model itself was.
      compile_seconds: How long compiling took, all in all.
      advice: What to do, in a sentence; "" for nothing.
      error: Why there are no figures, in a sentence; None: there are.

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
        """Whether it fits; None: unknown."""
        if self.error is not None:
            return False
        if self.is_accepted:
            return True
        if self.bytes_in_all is None or self.limit_bytes is None:
            return None
        return self.bytes_in_all <= self.limit_bytes

    @property
    def rows_per_second(self) -> float | None:
        """Rows of the global batch that are trained on in a second."""
        if self.estimate is None or not self.estimate.seconds:
            return None
        return self.rows / self.estimate.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens that are trained on in a second."""
        if self.tokens is None or self.rows_per_second is None:
            return None
        return self.tokens * self.rows_per_second

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "PlannedStep":
        """The step of which `to_json` returned this."""
        names = {field.name for field in dataclasses.fields(cls)}
        facts = {n: value for n, value in found.items() if n in names}
        if facts.get("estimate") is not None:
            facts["estimate"] = Estimate(**facts["estimate"])
        if facts.get("blocks") is not None:
            facts["blocks"] = tuple(facts["blocks"])
        return cls(**facts)

    def to_json(self) -> dict[str, Any]:
        """All of it, as `json.dumps` takes it."""
        return {
            **dataclasses.asdict(self),
            "fits": self.fits,
            "rows_per_second": self.rows_per_second,
            "tokens_per_second": self.tokens_per_second,
        }


def in_gb(size: float) -> str:
    """Bytes as GB, with three digits."""
    gigabytes = size / BYTES_PER_GB
    digits = 2 if gigabytes < 10 else 1
    return f"{gigabytes:.{digits}f}"


def fastest(steps: Iterable[PlannedStep]) -> PlannedStep | None:
    """Returns the one that fits with most rows a second and device."""
    fit = [(s.rows_per_second, s) for s in steps if s.fits]
    rates = [(rate / s.num_devices, s) for rate, s in fit if rate]
    return max(rates, key=lambda pair: pair[0], default=(0.0, None))[1]

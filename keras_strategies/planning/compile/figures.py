"""Figures of a compiled step: bytes, collectives, operations."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

import jax

from keras_strategies._core.jaxprs.hlo_text import bytes_of, counts_of

LOW_EFFORT = {"exec_time_optimization_effort": -1.0}
"""XLA's option by which large programs for TPUs compile in minutes."""

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_EXHAUSTED = "RESOURCE_EXHAUSTED"
_NEEDED = re.compile(r"temporaries \((?P<size>\d+(\.\d+)?)(?P<unit>[KMGT]?)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """What a program needs of each device.

    Attributes:
      argument_bytes: The state and the batch.
      output_bytes: Results that are not state in place.
      temporary_bytes: What there is in between.
      flops: Operations, as XLA counts them.
      optimal_seconds: XLA's own estimate of a run, of programs for TPUs that
        were compiled at low effort; else 0.
      counts: Collectives, by kind.
      sent: Bytes of the arrays that they send, by kind.
      compile_seconds: How long compiling took.
    """

    argument_bytes: float
    output_bytes: float
    temporary_bytes: float
    flops: float
    optimal_seconds: float
    counts: Mapping[str, float]
    sent: Mapping[str, float]
    compile_seconds: float

    @property
    def bytes_in_all(self) -> float:
        """Bytes on a device in all."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes

    def grown_by(self, before: "Figures", after: "Figures") -> "Figures":
        """These, and the bytes by which others grew."""

        def grown(name: str) -> float:
            own = getattr(self, name)
            return own + getattr(after, name) - getattr(before, name)

        names = ("argument_bytes", "output_bytes", "temporary_bytes")
        return dataclasses.replace(self, **{n: grown(n) for n in names})

    def combined(self, weight: float, other: "Figures", of_other: float) -> Any:
        """`weight` times these and `of_other` times the other ones.

        Seconds to compile are added up.
        """

        def add(a: Any, b: Any) -> Any:
            if isinstance(a, Mapping):
                kinds = dict.fromkeys((*a, *b))
                return {k: add(a.get(k, 0), b.get(k, 0)) for k in kinds}
            return max(weight * a + of_other * b, 0)

        names = [field.name for field in dataclasses.fields(self)]
        sums = {n: add(getattr(self, n), getattr(other, n)) for n in names}
        took = self.compile_seconds + other.compile_seconds
        return dataclasses.replace(self, **sums | {"compile_seconds": took})


class DoesNotFit(Exception):  # noqa: N818
    """The compiler says that a program needs too much memory.

    Attributes:
      needed: Bytes that it needs, as far as the compiler says.
    """

    def __init__(self, message: str, needed: float | None) -> None:
        super().__init__(message)
        self.needed = needed


def figures_of(executable: Any, seconds: float) -> Figures:
    """The figures of a compiled program.

    Args:
      executable: A `jax.stages.Compiled`.
      seconds: How long it took to compile.
    """
    memory, text = executable.memory_analysis(), executable.as_text()
    cost = executable.cost_analysis() or {}
    counts, sent = counts_of(text), bytes_of(text)
    return Figures(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        flops=max(cost.get("flops", 0.0), 0.0),
        # At full effort it is negative (libtpu 0.0.42).
        optimal_seconds=max(cost.get("optimal_seconds", 0.0), 0.0),
        counts={kind: n for kind, n in counts.items() if n},
        sent={kind: sent[kind] for kind, n in counts.items() if n},
        compile_seconds=seconds,
    )


def as_misfit(error: jax.errors.JaxRuntimeError) -> DoesNotFit | None:
    """What the compiler's error says of a program that is too large.

    Returns:
      None: it is another error.
    """
    # Of its status JAX has the name alone, as the message's first word.
    message = str(error)
    if not message.startswith(_EXHAUSTED):
        return None
    found = _NEEDED.search(message)
    needed = None
    if found is not None:
        needed = float(found["size"]) * _UNITS[found["unit"]]
    return DoesNotFit(message.splitlines()[0], needed)


@functools.cache
def compilers() -> tuple[str, ...]:
    """The versions that a program's figures depend on."""
    import importlib.metadata as metadata

    found = []
    for name in ("jax", "jaxlib", "libtpu"):
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return tuple(found)

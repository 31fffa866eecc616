"""A program that was compiled to be looked at: its collectives and memory."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from keras_strategies._core.jaxprs.hlo_text import (
    COLLECTIVES,
    bytes_of,
    counts_of,
)
from keras_strategies._core.mesh import ReplicaMesh

BYTES_PER_MB = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """What a compiled program needs of each device, as plain numbers.

    Attributes:
      argument_bytes: Of the state and the batch.
      output_bytes: Of results that are not state in place.
      temporary_bytes: Of what there is in between.
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

    @classmethod
    def measure(cls, executable: Any, seconds: float) -> "Figures":
        """Reads the figures of a compiled program.

        Args:
          executable: A `jax.stages.Compiled`.
          seconds: How long it took to compile.
        """
        memory, text = executable.memory_analysis(), executable.as_text()
        cost = executable.cost_analysis() or {}
        counts, sent = counts_of(text), bytes_of(text)
        outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
        return cls(
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=outputs,
            temporary_bytes=memory.temp_size_in_bytes,
            flops=max(cost.get("flops", 0.0), 0.0),
            # At full effort it is negative (libtpu 0.0.42).
            optimal_seconds=max(cost.get("optimal_seconds", 0.0), 0.0),
            counts={kind: n for kind, n in counts.items() if n},
            sent={kind: sent[kind] for kind, n in counts.items() if n},
            compile_seconds=seconds,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CompiledProgram:
    """One step or function, compiled for a strategy's devices.

    What `Strategy.compile_step` and `Strategy.compile_run` return. Nothing of
    it has run.

    Attributes:
      name: What was compiled: "train step".
      num_replicas: Number of replicas.
      cores_per_replica: Number of devices of each.
      trace_seconds: How long tracing and lowering took.
      compile_seconds: How long compiling took.
      executable: JAX's compiled object (`jax.stages.Compiled`).

    Example:
      ```python
      program = strategy.compile_step(model, (x, y))
      print(program.collectives["all-reduce"], program.bytes_per_chip)
      ```
    """

    name: str
    num_replicas: int
    cores_per_replica: int
    trace_seconds: float
    compile_seconds: float
    executable: Any

    def as_text(self) -> str:
        """The program as XLA will run it on a device (HLO)."""
        return self.executable.as_text()

    @property
    def collectives(self) -> dict[str, int]:
        """How many collectives of each kind the program has.

        In the program's text: one in a loop counts once.
        """
        counts = self._figures.counts
        return {kind: int(counts.get(kind, 0)) for kind in COLLECTIVES}

    @property
    def collective_bytes(self) -> dict[str, int]:
        """Bytes of the arrays that the collectives of each kind send.

        Of whole arrays: what is gathered, reduced, or summed up and then
        scattered. One in a loop counts once.
        """
        sent = self._figures.sent
        return {kind: int(sent.get(kind, 0)) for kind in COLLECTIVES}

    @property
    def argument_bytes(self) -> int:
        """Bytes on each device of the state and the batch."""
        return int(self._figures.argument_bytes)

    @property
    def output_bytes(self) -> int:
        """Bytes on each device of the results that are not state in place."""
        return int(self._figures.output_bytes)

    @property
    def temporary_bytes(self) -> int:
        """Bytes on each device of what the program needs in between."""
        return int(self._figures.temporary_bytes)

    @property
    def bytes_per_chip(self) -> int:
        """Bytes on each device in all, without the program's own code.

        Of a chip with two cores, on each core.
        """
        return int(self._figures.bytes_in_all)

    @functools.cached_property
    def _figures(self) -> Figures:
        return Figures.measure(self.executable, self.compile_seconds)

    def __str__(self) -> str:
        cores = self.cores_per_replica
        sent = self.collective_bytes
        found = [
            f"{n} {kind} ({sent[kind] / BYTES_PER_MB:.3f} MB)"
            for kind, n in self.collectives.items()
            if n
        ]
        sizes = (
            ("arguments", self.argument_bytes),
            ("outputs", self.output_bytes),
            ("temporary", self.temporary_bytes),
        )
        parts = ", ".join(f"{n / BYTES_PER_MB:.3f} {name}" for name, n in sizes)
        return (
            f"{self.name}: {self.num_replicas} replicas"
            f"{f' of {cores} cores' if cores > 1 else ''}\n"
            f"collectives: {', '.join(found) or 'none'}\n"
            f"MB per chip: {self.bytes_per_chip / BYTES_PER_MB:.3f} ({parts})\n"
            f"seconds: {self.trace_seconds:.2f} to trace, "
            f"{self.compile_seconds:.2f} to compile"
        )


def compile_program(
    lower: Callable[[], Any],
    mesh: ReplicaMesh,
    name: str,
    options: Mapping[str, Any] | None = None,
) -> CompiledProgram:
    """Lowers and compiles a program, with the time both take.

    Args:
      lower: Returns the lowered program.
      mesh: The replicas it is for.
      name: What it is.
      options: XLA's, by their names; None: as the program would be run.

    Raises:
      TypeError: the options are no mapping.
    """
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(
            "`compiler_options` maps names of XLA's options to their values. "
            f"Received: {options!r} of type {type(options).__name__}. Pass for "
            'example {"exec_time_optimization_effort": -1.0}.'
        )
    start = time.perf_counter()
    lowered = lower()
    middle = time.perf_counter()
    with without_jax_cache() if mesh.is_abstract else contextlib.nullcontext():
        executable = lowered.compile(compiler_options=options and dict(options))
    return CompiledProgram(
        name=name,
        num_replicas=mesh.num_replicas,
        cores_per_replica=mesh.cores_per_replica,
        trace_seconds=middle - start,
        compile_seconds=time.perf_counter() - middle,
        executable=executable,
    )


@contextlib.contextmanager
def without_jax_cache() -> Iterator[None]:
    """Keeps programs out of JAX's cache on disk.

    Held around compilations at once, which would restore it for each other.
    jax 0.10 writes those for devices that are not there, and cannot read them
    again: it warns, and compiles anew.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 1e9)
    try:
        yield
    finally:
        jax.config.update(name, before)

"""Inspection of a compiled program: its collectives and its memory."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from keras_strategies._core.jaxprs.hlo_text import (
    COLLECTIVES,
    count_collective_bytes,
    count_collectives,
)
from keras_strategies._core.mesh import ReplicaMesh

BYTES_PER_MB = 1e6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """The resources that a compiled program needs on each device.

    Attributes:
      argument_bytes: Bytes of the state and the batch.
      output_bytes: Bytes of the results that are not written into the state.
      temporary_bytes: Bytes of intermediate values.
      flops: Number of operations, as XLA counts them.
      optimal_seconds: XLA's estimate of the run time, for TPU programs that
        were compiled at low effort; else 0.
      counts: Number of collectives, by kind.
      sent: Bytes of the arrays that the collectives send, by kind.
      compile_seconds: Compile time in seconds.
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
        """The total number of bytes on a device."""
        return self.argument_bytes + self.output_bytes + self.temporary_bytes

    @classmethod
    def measure(cls, executable: Any, seconds: float) -> "Figures":
        """Reads the figures of a compiled program.

        Args:
          executable: A `jax.stages.Compiled`.
          seconds: Its compile time.
        """
        memory, text = executable.memory_analysis(), executable.as_text()
        cost = executable.cost_analysis() or {}
        counts, sent = count_collectives(text), count_collective_bytes(text)
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
    """A step or function, compiled for a strategy's devices.

    `Strategy.compile_step` and `Strategy.compile_run` return it. It has not
    been run.

    Attributes:
      name: A description of the program, such as "train step".
      num_replicas: Number of replicas.
      cores_per_replica: Number of devices of each replica.
      trace_seconds: Time in seconds to trace and lower the program.
      compile_seconds: Time in seconds to compile it.
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
        """Returns the optimized HLO of the program, as each device runs it."""
        return self.executable.as_text()

    @property
    def collectives(self) -> dict[str, int]:
        """The number of collectives of each kind in the program's text.

        A collective in a loop counts once.
        """
        counts = self._figures.counts
        return {kind: int(counts.get(kind, 0)) for kind in COLLECTIVES}

    @property
    def collective_bytes(self) -> dict[str, int]:
        """The bytes of the arrays that the collectives of each kind send.

        The size of the full arrays counts: the gathered result, the reduced
        array, or the sum before it is scattered. A collective in a loop counts
        once.
        """
        sent = self._figures.sent
        return {kind: int(sent.get(kind, 0)) for kind in COLLECTIVES}

    @property
    def argument_bytes(self) -> int:
        """The bytes of the state and the batch on each device."""
        return int(self._figures.argument_bytes)

    @property
    def output_bytes(self) -> int:
        """The bytes on each device of results not written into the state."""
        return int(self._figures.output_bytes)

    @property
    def temporary_bytes(self) -> int:
        """The bytes of the program's intermediate values on each device."""
        return int(self._figures.temporary_bytes)

    @property
    def bytes_per_chip(self) -> int:
        """The total number of bytes on each device, without program code.

        If a chip has two cores, this is the number on each core.
        """
        return int(self._figures.bytes_in_all)

    @functools.cached_property
    def _figures(self) -> Figures:
        return Figures.measure(self.executable, self.compile_seconds)

    def __str__(self) -> str:
        cores = self.cores_per_replica
        sent = self.collective_bytes
        collectives = [
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
            f"collectives: {', '.join(collectives) or 'none'}\n"
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
    """Lowers and compiles a program, and measures the time of both.

    Args:
      lower: A function that returns the lowered program.
      mesh: The replicas of the program.
      name: A description of the program.
      options: XLA's compiler options by name; None for those that a normal
        run uses.

    Raises:
      TypeError: if `options` is not a mapping.
    """
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(
            "`compiler_options` must be a mapping of XLA's option names to "
            f"values. Received: {options!r} of type {type(options).__name__}. "
            'Pass for example {"exec_time_optimization_effort": -1.0}.'
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
    """Keeps programs out of JAX's cache on disk within a block.

    jax 0.10 caches programs for absent devices but cannot read them back: it
    warns and compiles again. Concurrent compilations share one such block;
    with one each, the first to finish would restore the option for the others.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 1e9)
    try:
        yield
    finally:
        jax.config.update(name, before)

"""Inspects a compiled program: its collectives and its memory."""

import collections
import contextlib
import dataclasses
import functools
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from keras_strategies.gpu.host_arguments import place_host_arguments
from keras_strategies.gpu.topology_devices import complete_options
from keras_strategies.passes.hlo import (
    COLLECTIVES,
    Instruction,
    list_collectives,
    parse,
)
from keras_strategies.spmd.dispatch import CacheChoice, without_jax_cache
from keras_strategies.spmd.mesh import ReplicaMesh

BYTES_PER_MB = 1e6
_TRANSFORMED = re.compile(r"\b(?:jvp|transpose|vmap)\(|\)")
_NO_LAYER = re.compile(
    r"^(?:jit\(.*|pjit|shard_map|while|body|cond|branch_\d+_fun|closed_call|"
    r"checkpoint|remat2?|rematted_computation|custom_[jv][vj]p_call\w*|)$"
)
_MAX_LENGTH = 80


def measure_memory(executable: Any) -> dict[str, int]:
    """Reads from XLA which memory a compiled program needs on each device.

    Args:
      executable: A `jax.stages.Compiled`.

    Returns:
      A dict of bytes: "argument_bytes" of the state and the batch,
      "output_bytes" of the results that do not overwrite the state in place,
      and "temporary_bytes" of intermediate values.
    """
    memory = executable.memory_analysis()
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        "temporary_bytes": _measure_temporaries(executable, memory),
    }


def measure_collectives(text: str) -> dict[str, dict[str, int]]:
    """Counts the collectives in a program's text.

    Returns:
      A dict: "counts" has the number of collectives of each kind, such as
      "all-reduce", and "sent" the bytes of the arrays that these send.
    """
    counts = collections.Counter[str]()
    sent = collections.Counter[str]()
    for collective in list_collectives(parse(text)):
        counts[collective.kind] += 1
        sent[collective.kind] += int(collective.size)
    return {"counts": dict(counts), "sent": dict(sent)}


def lower(program: jax.stages.Wrapped, *args: Any) -> jax.stages.Lowered:
    """Lowers a jitted function, as its method `lower`, and checks its inputs.

    JAX lowers a function that uses intermediate values of another trace, and
    passes these values as further arguments. Such a program cannot be run.

    Raises:
      RuntimeError: if the function uses intermediate values of another trace.
    """
    traced = program.trace(*args)
    number = len(jax.tree.leaves(traced.args_info))
    foreign = len(traced.jaxpr.in_avals) - number
    if foreign > 0:
        raise RuntimeError(
            "A function that is compiled must not use intermediate values of "
            f"another trace. Received: a function that uses {foreign} of them. "
            "A layer leaves them behind if `keras.RematScope` rematerializes "
            "it and it updates state or adds losses (`Dropout`, "
            "`BatchNormalization`, `add_loss`), which Keras does not support, "
            "or if it stores intermediate values in its attributes. Create "
            "such a layer outside of the `keras.RematScope`, or return the "
            "values from `call`."
        )
    leaves = jax.tree.leaves(args)
    placed = (getattr(leaf, "sharding", None) for leaf in leaves)
    devices = next((s.device_set for s in placed if s is not None), ())
    return place_host_arguments(traced.lower(), devices)


def _measure_temporaries(executable: Any, memory: Any) -> int:
    """Returns the bytes of a program's intermediate values.

    For TPUs, JAX's `temp_size_in_bytes` counts more than is allocated, mostly
    if the program has loops. What XLA compares with the device's memory is the
    peak, which contains the arguments. JAX adds those on the host to it.
    """
    shardings = jax.tree.leaves(getattr(executable, "input_shardings", ()))
    platforms = {next(iter(s.device_set)).platform for s in shardings[:1]}
    if platforms != {"tpu"}:
        return memory.temp_size_in_bytes
    # In small programs, the peak is larger than the sum.
    peak = memory.peak_memory_in_bytes - memory.argument_size_in_bytes
    peak -= memory.host_argument_size_in_bytes
    return min(memory.temp_size_in_bytes, peak)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class CompiledProgram:
    """A step or function, compiled for a strategy's devices.

    `Strategy.compile_step` and `Strategy.compile_run` return objects of this
    class. The program has only been compiled, not run.

    Attributes:
      name: A description of the program, such as "train step".
      num_replicas: Number of replicas.
      cores_per_replica: Number of devices of each replica.
      trace_seconds: Time in seconds to trace and lower the program.
      compile_seconds: Time in seconds to compile it.
      argument_bytes: Bytes of the state and the batch on each device.
      output_bytes: Bytes per device of results that do not overwrite the state.
      temporary_bytes: Bytes of intermediate values on each device.
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
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    executable: Any

    def as_text(self) -> str:
        """Returns the optimized HLO of the program, as each device runs it."""
        return self.executable.as_text()

    @property
    def collectives(self) -> dict[str, int]:
        """The number of collectives of each kind in the program's text.

        A collective in a loop is counted once, not once per iteration.
        """
        return self._count("counts")

    @property
    def collective_bytes(self) -> dict[str, int]:
        """The bytes of the arrays that the collectives of each kind send.

        The size of the full array is counted, not the size of a shard. The full
        array is the result of an all-gather, the reduced array of an
        all-reduce, or the sum of a reduce-scatter before it is scattered. A
        collective in a loop is counted once.
        """
        return self._count("sent")

    def _count(self, name: str) -> dict[str, int]:
        counts = self._collectives[name]
        return {kind: counts.get(kind, 0) for kind in COLLECTIVES}

    @functools.cached_property
    def _collectives(self) -> dict[str, Any]:
        return measure_collectives(self.as_text())

    @property
    def bytes_per_chip(self) -> int:
        """The total bytes of memory on each device, without the program's code.

        If JAX shows the two cores of a chip as two devices, these are the bytes
        of one core.
        """
        return self.argument_bytes + self.output_bytes + self.temporary_bytes

    def __str__(self) -> str:
        cores = self.cores_per_replica
        sent = self.collective_bytes
        collectives = [
            f"{n} {kind} ({sent[kind] / BYTES_PER_MB:.3f} MB)"
            for kind, n in self.collectives.items()
            if n
        ]
        sizes = (
            (self.argument_bytes, "arguments"),
            (self.output_bytes, "outputs"),
            (self.temporary_bytes, "temporary"),
        )
        parts = ", ".join(f"{n / BYTES_PER_MB:.3f} {name}" for n, name in sizes)
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
    """Lowers and compiles a program, and measures how long both take.

    Args:
      lower: A function that returns the lowered program.
      mesh: The replicas of the program.
      name: A description of the program.
      options: XLA compiler options by name. None for the options that a normal
        run uses.
    """
    with CacheChoice():
        start = time.perf_counter()
        lowered = lower()
        middle = time.perf_counter()
        is_cached = not mesh.is_abstract
        with contextlib.nullcontext() if is_cached else without_jax_cache():
            executable = lowered.compile(
                compiler_options=complete_options(options, mesh.devices)
            )
    return CompiledProgram(
        name=name,
        num_replicas=mesh.num_replicas,
        cores_per_replica=mesh.cores_per_replica,
        trace_seconds=middle - start,
        compile_seconds=time.perf_counter() - middle,
        executable=executable,
        **measure_memory(executable),
    )


def describe_source(instruction: Instruction) -> str:
    """Returns a text such as "gather in random_rotation"."""
    source = _TRANSFORMED.sub("", instruction.source)
    *names, operation = source.split("/")
    layers = [name for name in names if not _NO_LAYER.match(name)]
    where = "/".join(layers)[:_MAX_LENGTH] or "the step"
    return f"{(operation or instruction.opcode)[:_MAX_LENGTH]} in {where}"

"""Steps of small models, compiled for absent GPUs."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import keras

import keras_strategies as ks
from keras_strategies.spmd.compiled import compile_program
from keras_strategies.spmd.rows import padded_rows
from keras_strategies.step.lower_step import lower_step

LOGS = 2
"""The entries of the loss's mean: a sum and its number of rows."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A step, and the collectives that its program must have.

    Attributes:
      sent: For each kind of collective its number, and the bytes that it sends.
      model: Makes the model.
      x: The shape of a row of the input, and its dtype.
      y: The shape of a row of the target, and its dtype.
      rows: The rows of each replica.
      missing: The rows that are missing in the global batch.
      loss: The loss.
      optimizer: Makes the optimizer.
      compiled: Other arguments of `compile`.
      kind: "train", "test" or "predict".
      steps: The number of steps in the program.
      policy: The dtype policy.
      topology: The GPUs.
      partitioner: The strategy's `variable_partitioner`.
      cores: The number of GPUs of a replica, over which a transformer is
        sharded.
    """

    sent: Mapping[str, tuple[int, int]]
    model: Callable[[], keras.Model]
    x: tuple[tuple[int, ...], str]
    y: tuple[tuple[int, ...], str] = ((8,), "float32")
    rows: int = 8
    missing: int = 0
    loss: Any = "mse"
    optimizer: Callable[[], Any] = keras.optimizers.Adam
    compiled: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    kind: str = "train"
    steps: int = 1
    policy: str = "float32"
    topology: str = "h100:8"
    partitioner: Any = None
    cores: int = 1

    def compile(self) -> ks.CompiledProgram:
        """Compiles the step's program."""
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(self.policy)
        try:
            return self._compile()
        finally:
            keras.config.set_dtype_policy(before)

    def _compile(self) -> ks.CompiledProgram:
        strategy = self._make_strategy()
        with strategy.scope(), ks.abstract():
            model = self.model()
            model.compile(self.optimizer(), self.loss, **self.compiled)
        count = self.rows * strategy.num_replicas_in_sync - self.missing
        batch = tuple(
            jax.ShapeDtypeStruct((count, *shape), dtype)
            for shape, dtype in (self.x, self.y)
        )
        if self.steps == 1:
            return strategy.compile_step(model, batch, kind=self.kind)
        build = strategy._get_binding("compile_step", model).build_for_shapes
        return compile_program(
            lambda: lower_step(
                model, strategy.mesh, self.kind, batch, build, self.steps
            ),
            strategy.mesh,
            "train steps",
        )

    def _make_strategy(self) -> ks.Strategy:
        layout_map = None
        if self.cores > 1:
            with ks.abstract():
                layout_map = ks.experimental.transformer_layout(
                    self.model(), self.cores
                )
        return ks.MirroredStrategy.for_topology(
            self.topology,
            computation_shape=[self.cores, 1, 1, 1],
            layout_map=layout_map,
            variable_partitioner=self.partitioner,
        )

    def count_batch_bytes(self, num_replicas: int) -> int:
        """Returns the bytes of the batch on each GPU."""
        rows = self.rows * num_replicas - self.missing
        rows = padded_rows(rows, num_replicas) // num_replicas
        return self.steps * sum(
            rows * math.prod(shape) * jax.numpy.dtype(dtype).itemsize
            for shape, dtype in (self.x, self.y)
        )


def check_step(case: Case) -> dict[str, tuple[int, int]]:
    """Compiles a step, and checks that its state is donated.

    Returns:
      The number of collectives of each kind, and the bytes that they send.
    """
    program = case.compile()
    if case.kind == "train":
        check_donation(program, case.count_batch_bytes(program.num_replicas))
    counts, sent = program.collectives, program.collective_bytes
    return {kind: (n, sent[kind]) for kind, n in counts.items() if n}


def check_donation(program: ks.CompiledProgram, not_written: int) -> None:
    """Checks that a program writes its state in place.

    Args:
      program: The program.
      not_written: The bytes of the arguments that are not state.
    """
    memory = program.executable.memory_analysis()
    state = memory.argument_size_in_bytes - not_written
    assert memory.alias_size_in_bytes == state > 0
    # Logs, and the addresses of the results.
    assert memory.output_size_in_bytes - state < 1000

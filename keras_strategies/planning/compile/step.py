"""The interface of planned steps, and the bytes of their variables."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import keras

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._types import Array, Batch
from keras_strategies.keras_bridge.steps.lower_step import shape_of
from keras_strategies.keras_bridge.variables import shardings
from keras_strategies.planning.compile.equal_blocks import Blocks


class Step:
    """A step that can be lowered for any number of rows.

    Attributes:
      mesh: The mesh of replicas.
      rows: The rows of the global batch.
      tokens: Tokens of a row, or None if rows are not sequences of tokens.
      blocks: Equal blocks of the model, or None. Fewer can be lowered.
      keeps_nothing_else: Whether a block adds no more than `block_bytes`,
        because it is rematerialized in the backward pass.
      steps: Steps of the program (`steps_per_execution`).
      note: A remark for the report, set when the step is lowered.
    """

    mesh: ReplicaMesh
    rows: int
    tokens: int | None = None
    blocks: Blocks | None = None
    keeps_nothing_else: bool = False
    steps: int = 1
    note: str = ""

    def lower(self, rows: int, blocks: int | None) -> jax.stages.Lowered:
        """Lowers the step for a number of global rows, and of blocks.

        Args:
          rows: Rows of the global batch.
          blocks: The number of blocks to keep, or None for all.
        """
        raise NotImplementedError

    def with_remat(self) -> "Step | None":
        """Returns the step with its model's blocks under `keras.RematScope`.

        Returns None if layers already are, or if no blocks are layers.
        """
        return None

    def model_flops(self, rows: int, blocks: int | None) -> float | None:
        """Returns a device's operations without rematerialization, if known."""
        return None

    def state_bytes(self) -> Mapping[str, float]:
        """Returns a device's bytes of weights, slots, other and gradients."""
        raise NotImplementedError

    def batch_bytes(self, rows: int) -> float:
        """Returns the bytes of a step's batch on a device; 0: unknown."""
        return 0.0

    def block_bytes(self, rows: int) -> tuple[float, float]:
        """Returns the least and the most temporary bytes that a block adds.

        They are bytes of a device. The most include all of its gradients.
        """
        return 0.0, 0.0


def with_rows(batch: Batch, rows: int) -> Batch:
    """Returns the shapes of a batch, or of an array, with that many rows."""

    def resize(leaf: Array) -> jax.ShapeDtypeStruct:
        shape = shape_of(leaf)
        return jax.ShapeDtypeStruct((rows, *shape.shape[1:]), shape.dtype)

    return jax.tree.map(resize, batch)


def count_variable_bytes(
    variables: Iterable[keras.Variable], mesh: ReplicaMesh
) -> float:
    """Returns the bytes of variables on one device."""
    return sum(map(count_shape_bytes, shardings.shapes_of(variables, mesh)))


def count_shape_bytes(shape: jax.ShapeDtypeStruct) -> float:
    """Returns the bytes of a sharded array on one device."""
    sharding: Any = shape.sharding
    dtype = jax.dtypes.canonicalize_dtype(shape.dtype)
    return math.prod(sharding.shard_shape(shape.shape)) * dtype.itemsize

"""A step that is planned, and the bytes of its variables."""

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
    """A step that is lowered for any number of rows.

    Attributes:
      mesh: The replicas.
      rows: Of the global batch that it was given.
      tokens: Tokens of a row; None: its rows are no sequences of them.
      blocks: Equal blocks of its model, of which fewer can be lowered.
      keeps_nothing_else: Whether `block_bytes` are all that a block adds: it
        is rematerialized in the backward pass.
      steps: Steps of its program, as `steps_per_execution` says.
      note: A remark for the report, known once it is lowered.
    """

    mesh: ReplicaMesh
    rows: int
    tokens: int | None = None
    blocks: Blocks | None = None
    keeps_nothing_else: bool = False
    steps: int = 1
    note: str = ""

    def lower(self, rows: int, blocks: int | None) -> jax.stages.Lowered:
        """Lowers it for a global batch of so many rows, and so many blocks."""
        raise NotImplementedError

    def with_remat(self) -> "Step | None":
        """Returns it with its model's blocks under `keras.RematScope`.

        None: they are already, or it has no blocks that are layers.
        """
        return None

    def model_flops(self, rows: int, blocks: int | None) -> float | None:
        """Returns a device's operations, none of them twice, if known."""
        return None

    def state_bytes(self) -> Mapping[str, float]:
        """Returns a device's bytes: weights, slots, other and gradients."""
        raise NotImplementedError

    def batch_bytes(self, rows: int) -> float:
        """Returns the bytes of a step's batch on a device; 0: unknown."""
        return 0.0

    def block_bytes(self, rows: int) -> tuple[float, float]:
        """Returns the least and the most bytes that a block adds in between.

        On a device; the most are those with all of its gradients.
        """
        return 0.0, 0.0


def with_rows(batch: Batch, rows: int) -> Batch:
    """Returns the shapes of a batch, or of an array, of so many rows."""

    def resized(leaf: Array) -> jax.ShapeDtypeStruct:
        shape = shape_of(leaf)
        return jax.ShapeDtypeStruct((rows, *shape.shape[1:]), shape.dtype)

    return jax.tree.map(resized, batch)


def variable_bytes(
    variables: Iterable[keras.Variable], mesh: ReplicaMesh
) -> float:
    """Returns the bytes of variables on a device."""
    return sum(map(shape_bytes, shardings.shapes_of(variables, mesh)))


def shape_bytes(shape: jax.ShapeDtypeStruct) -> float:
    """Returns the bytes of an array with a sharding on a device."""
    sharding: Any = shape.sharding
    dtype = jax.dtypes.canonicalize_dtype(shape.dtype)
    return math.prod(sharding.shard_shape(shape.shape)) * dtype.itemsize

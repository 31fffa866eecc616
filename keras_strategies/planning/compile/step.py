"""The base class of training steps to plan, and functions that count bytes."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import keras

from keras_strategies._types import Array, Batch
from keras_strategies.planning.seam import (
    ReplicaMesh,
    get_shape,
    shardings,
)


class Step:
    """A training step that can be lowered (as by `jax.jit`) for any row count.

    Attributes:
      mesh: The mesh of replicas.
      rows: The number of rows of the global batch.
      tokens: The number of tokens per row. None if rows are not sequences of
        tokens.
      has_remat: Whether layers of the model are already rematerialized.
      logit_bytes: The bytes of logits on a device that `blocked_head` would
        save.
      steps: The number of training steps in the program
        (`steps_per_execution`).
      note: A sentence that the plan shows to the user, or "". It is set when
        the step is lowered.
    """

    mesh: ReplicaMesh
    rows: int
    tokens: int | None = None
    has_remat: bool = False
    logit_bytes: float = 0.0
    steps: int = 1
    note: str = ""

    def lower(self, rows: int) -> jax.stages.Lowered:
        """Lowers the step for a number of rows of the global batch."""
        raise NotImplementedError

    def with_remat(self) -> "Step | None":
        """Returns a copy of the step that rematerializes the model's blocks.

        It is the step of a model whose blocks were created in a
        `keras.RematScope`.

        Returns None if layers of the model are already rematerialized, or if
        its blocks are not single layers.
        """
        return None

    def model_flops(self, rows: int) -> float | None:
        """Returns the model's FLOPs per step on a device, or None if unknown.

        The operations of rematerialization are not counted.
        """
        return None

    def list_variables(self) -> Iterable[keras.Variable]:
        """Returns the variables that the step may read or write."""
        return ()

    def host_bytes(self) -> float:
        """Returns the bytes of slots on the host for each device."""
        on_host = filter(shardings.is_on_host, self.list_variables())
        return count_variable_bytes(on_host, self.mesh)

    def state_bytes(self) -> Mapping[str, float]:
        """Returns the bytes of state and gradients on a device, by category.

        The categories are "weights", "slots", "other" and "gradients".
        """
        raise NotImplementedError


def with_rows(batch: Batch, rows: int) -> Batch:
    """Returns the shapes that a batch or array would have with `rows` rows."""

    def resize(leaf: Array) -> jax.ShapeDtypeStruct:
        shape = get_shape(leaf)
        return jax.ShapeDtypeStruct((rows, *shape.shape[1:]), shape.dtype)

    return jax.tree.map(resize, batch)


def count_variable_bytes(
    variables: Iterable[keras.Variable], mesh: ReplicaMesh
) -> float:
    """Returns the total bytes of variables on one device."""
    return sum(map(count_shape_bytes, shardings.get_shapes(variables, mesh)))


def count_shape_bytes(shape: jax.ShapeDtypeStruct) -> float:
    """Returns the bytes of a sharded array on one device."""
    sharding: Any = shape.sharding
    dtype = jax.dtypes.canonicalize_dtype(shape.dtype)
    return math.prod(sharding.shard_shape(shape.shape)) * dtype.itemsize


def describe_attention(reasons: Iterable[str]) -> str:
    """Returns a sentence about attention that stores its scores, or "".

    Args:
      reasons: See `collect_reasons`.
    """
    shown = "; ".join(reasons)
    return shown and (
        f"XLA computes attention and stores the scores where it has {shown}."
    )

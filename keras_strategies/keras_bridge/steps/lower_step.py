"""A model's step lowered for shapes, without a batch or a device."""

from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies._core.batches import Segment, num_rows
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.rows import padded_rows
from keras_strategies._types import Batch
from keras_strategies.keras_bridge.step_context import ReplicaScope
from keras_strategies.keras_bridge.steps import step_functions, trace_checks
from keras_strategies.keras_bridge.variables import shardings

KINDS = ("train", "test", "predict")


def lower_step(
    model: keras.Model,
    mesh: ReplicaMesh,
    kind: str,
    batch: Batch,
    build: Callable[[Any], None],
    steps: int = 1,
    replica_scope: ReplicaScope | None = None,
) -> jax.stages.Lowered:
    """Lowers a step of a bound model.

    Args:
      model: The model.
      mesh: The replicas.
      kind: "train", "test" or "predict".
      batch: What a dataset yields, of a global batch: `(x, y)`, `x` or
        `(x, y, sample_weight)`, nests of arrays or of what has a shape and a
        dtype.
      build: Builds the model, given the batch's shapes.
      steps: Of a program, as `steps_per_execution` says; a train step that
        is not run so is lowered alone.
      replica_scope: Makes a step's replica context current for a block.

    Raises:
      ValueError: an unknown kind; a batch without rows, or with different
        numbers of them.
      TypeError: an entry of the batch without shape and dtype.
    """
    if kind not in KINDS:
        raise ValueError(
            "A model has a train, a test and a predict step. Received: "
            f"kind={kind!r}. Pass one of {', '.join(map(repr, KINDS))}."
        )
    data = tuple(batch) if isinstance(batch, list) else batch
    parts = keras.utils.unpack_x_y_sample_weight(data)
    if kind == "predict":
        data = parts = parts[:1]
    # An own step is given what it would be in `fit`: `(x, y)`, say.
    data, parts = jax.tree.map(shape_of, (data, parts))
    rows = num_rows(data)
    build(parts)
    padded = padded_rows(rows, mesh.num_replicas)
    variables = step_functions.step_variables(model, kind)
    state = tuple(shardings.shapes_of(group, mesh) for group in variables)

    def lowered(steps: int) -> jax.stages.Lowered:
        leading = (padded,) if steps == 1 else (steps, padded)
        sharding = mesh.split if steps == 1 else mesh.stacked
        placed = trace_checks.with_leading(leading, data, sharding)
        program = step_functions.make_program(
            model, mesh, kind, variables, replica_scope
        )
        segment = Segment(data=placed, rows=rows, steps=steps)
        return program.lower(state, segment)

    try:
        return lowered(steps)
    except trace_checks.StepsNotFused:
        return lowered(1)


def shape_of(leaf: object) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array, or of what stands for one.

    Raises:
      TypeError: it has none.
    """
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None or None in tuple(shape):
        raise TypeError(
            "What is compiled for is given by arrays or by their shapes and "
            f"dtypes. Received: {leaf!r} of type {type(leaf).__name__}. Pass "
            "`jax.ShapeDtypeStruct((rows, ...), 'float32')`."
        )
    dtype = jax.dtypes.canonicalize_dtype(np.dtype(dtype))
    return jax.ShapeDtypeStruct(tuple(shape), dtype)

"""Lowers a model's step from shapes, without a batch or a device."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies._types import Batch
from keras_strategies.keras_bridge.step_context import ReplicaScope
from keras_strategies.spmd.batches import Segment, num_rows
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.rows import padded_rows
from keras_strategies.step import step_functions
from keras_strategies.step.record import with_leading
from keras_strategies.step.route import Form
from keras_strategies.step.state.array_groups import find_layout
from keras_strategies.step.state.layout import PLAIN
from keras_strategies.variables import shardings

KINDS = ("train", "test", "predict")


def lower_step(
    model: keras.Model,
    mesh: ReplicaMesh,
    kind: str,
    batch: Batch,
    build: Callable[[Any], None],
    steps: int = 1,
    replica_scope: ReplicaScope = contextlib.nullcontext,
) -> jax.stages.Lowered:
    """Lowers a train, test or predict step of a bound model.

    Args:
      model: The model.
      mesh: The mesh of the replicas.
      kind: "train", "test" or "predict".
      batch: A global batch, as a dataset yields it: `x`, `(x, y)` or
        `(x, y, sample_weight)`, as nests of arrays, or of objects with a shape
        and a dtype.
      build: A function that builds the model from the batch's shapes.
      steps: The number of steps in one program, as in `steps_per_execution`. If
        the train step cannot run in a loop, a single step is lowered.
      replica_scope: Makes the context manager of a step's replica context.

    Raises:
      ValueError: if the kind is unknown, the batch has no rows, or its arrays
        have different numbers of rows.
      TypeError: if an entry of the batch has no shape and dtype.
    """
    if kind not in KINDS:
        raise ValueError(
            f"`kind` must be one of {', '.join(map(repr, KINDS))}. Received: "
            f"kind={kind!r}. Pass 'train' for the step of `fit`, 'test' for "
            "`evaluate`, or 'predict' for `predict`."
        )
    data = tuple(batch) if isinstance(batch, list) else batch
    parts = keras.utils.unpack_x_y_sample_weight(data)
    if kind == "predict":
        data = parts = parts[:1]
    elif isinstance(data, tuple) and any(part is None for part in data):
        data = keras.utils.pack_x_y_sample_weight(*parts)
    # A user-defined step gets data with the same structure as in `fit`, such as
    # `(x, y)`.
    data, parts = jax.tree.map(get_shape, (data, parts))
    rows = num_rows(data)
    build(parts)
    padded = padded_rows(rows, mesh.num_replicas)
    variables = step_functions.step_variables(model, kind)
    is_training = kind == "train"
    layout = find_layout(model, variables, mesh) if is_training else PLAIN

    program = step_functions.PROGRAMS[kind](
        model, mesh, kind, variables, replica_scope, layout
    )
    state = tuple(shardings.get_shapes(group, mesh) for group in variables)

    def place(steps: int) -> Segment:
        leading = (padded,) if steps == 1 else (steps, padded)
        sharding = mesh.split if steps == 1 else mesh.stacked
        placed = with_leading(leading, data, sharding)
        return Segment(data=placed, rows=rows, steps=steps)

    segment = place(steps)
    if steps > 1 and program.find_route(segment).form is Form.EVEN:
        segment = place(1)
    return program.lower(state, segment)


def get_shape(leaf: object) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of an array or of an abstract array.

    Raises:
      TypeError: if `leaf` has no shape and dtype.
    """
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None or None in tuple(shape):
        raise TypeError(
            "A program can be compiled only for arrays, or for their shapes "
            f"and dtypes. Received: {leaf!r} of type {type(leaf).__name__}. "
            "Pass, for example, `jax.ShapeDtypeStruct((rows, ...), 'float32')`."
        )
    dtype = jax.dtypes.canonicalize_dtype(np.dtype(dtype))
    return jax.ShapeDtypeStruct(tuple(shape), dtype)

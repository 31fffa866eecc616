"""Shapes of the arguments of `run`, to compile its program without values."""

from typing import Any

import jax
import numpy as np

from keras_strategies._types import Leaf
from keras_strategies.run.function_keys import make_value_key
from keras_strategies.spmd import values
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.step.lower_step import shape_of

REPLICATED = "whole"
"""The layout of a replicated argument."""
STATIC = "static"
"""The layout of an argument that is not an array. Such an argument is part of
the program."""

Kind = tuple[Any, ...]


def describe_argument(leaf: Leaf, mesh: ReplicaMesh) -> tuple[Kind, Any]:
    """Describes an argument of a program, its shape and its sharding.

    Args:
      leaf: A leaf of the arguments; see `Strategy.compile_run`.
      mesh: The mesh of the replicas.

    Returns:
      A pair: the description of the argument that `Runner` uses, and the
      argument's shape with its sharding. The second is None if the argument is
      not an array.

    Raises:
      ValueError: if the rows cannot be split evenly among the replicas.
    """
    if isinstance(leaf, values.Mirrored):
        return _describe_shape(REPLICATED, shape_of(leaf.array), mesh.whole)
    if isinstance(leaf, values.PerReplica):
        values.check_home(leaf, mesh)
        if leaf.layout not in (values.ROWS, values.STACKED):
            raise ValueError(
                "A program can be compiled only for a batch in which all "
                f"replicas have the same number of rows. Received: {leaf!r}. "
                "Pass the shapes of such a batch."
            )
        return _describe_shape(
            leaf.layout, shape_of(leaf.arrays[0]), mesh.split
        )
    if getattr(leaf, "shape", None) is None or not hasattr(leaf, "dtype"):
        return (STATIC, None, None, make_value_key(leaf), leaf), None
    described = shape_of(leaf)
    if not described.shape:
        return _describe_shape(REPLICATED, described, mesh.whole)
    rows = described.shape[0]
    if rows % mesh.num_replicas or not rows:
        raise ValueError(
            "The number of rows of a distributed batch must be a multiple of "
            f"the number of replicas. Received: an array of {rows} rows for "
            f"{mesh.num_replicas} replicas. Change the number of rows, or pass "
            "`ks.Mirrored(array)` to replicate the array."
        )
    return _describe_shape(values.ROWS, described, mesh.split)


def _describe_shape(
    layout: str, shape: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding
) -> tuple[Kind, Any]:
    placed = jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)
    dtype = np.dtype(shape.dtype)
    return (layout, shape.shape, dtype, None), placed

"""Implementations of `reduce`, `gather` and `experimental_local_results`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_strategies._types import Array, Leaf, Tree
from keras_strategies.hooks import on_read
from keras_strategies.run.function_keys import open_nest
from keras_strategies.spmd import values
from keras_strategies.spmd.dispatch import dispatch
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.replica_map import all_sum, as_number
from keras_strategies.spmd.values import ReduceOp, as_reduce_op

_Axes = int | tuple[int, ...] | None


def reduce(
    op: ReduceOp | str, value: Tree, axis: _Axes, mesh: ReplicaMesh
) -> Tree:
    """Implements `Strategy.reduce`: reduces each value of a nest.

    Returns:
      The nest, with each value replaced by an array.
    """
    op = as_reduce_op(op)
    return jax.tree.map(
        lambda leaf: _reduce_one(op, leaf, axis, mesh),
        open_nest(value, values.is_distributed),
        is_leaf=values.is_distributed,
    )


def _reduce_one(
    op: ReduceOp, value: Leaf, axis: _Axes, mesh: ReplicaMesh
) -> Array:
    value = _read_variable(value, mesh)
    if isinstance(value, values.Mirrored):
        value = value.array
    if not isinstance(value, values.PerReplica):
        return _reduce_plain(op, value, axis, mesh)
    values.check_home(value, mesh)
    if value.layout == values.LOCAL:
        if axis is not None:
            raise ValueError(
                "The axis of `reduce` must be None inside of `merge_call`. "
                f"Received: axis={axis}. Pass axis=None, and reduce over the "
                "dimension in the function given to `run`."
            )
        array = to_summable(value.arrays[0], op)
        (total,) = all_sum([array], mesh.all_replicas)
        return total / mesh.num_replicas if op is ReduceOp.MEAN else total
    if axis is None and value.total is not None:
        if op is ReduceOp.SUM:
            return value.total
        # The total of integers may have overflowed, but their mean, which is
        # computed in floats, does not.
        if not jnp.issubdtype(value.total.dtype, jnp.integer):
            return value.total / mesh.num_replicas
    is_stacked = value.layout == values.STACKED and value.shapes is None
    if axis is None and is_stacked:
        program = _compile_reduction(mesh, op)
        return dispatch(mesh, program, value.arrays[0])[0]
    axes = None if axis is None else _as_axes(axis)
    return _apply_to_components(value, mesh, _reduce_parts, op, axes)


def _reduce_parts(
    parts: list[Any], op: ReduceOp, axes: tuple[int, ...] | None
) -> jax.Array:
    """Reduces the components of a value, eagerly or while being traced."""
    if axes is None:
        _check_equal_shapes(parts)
        total = sum_in_order([to_summable(part, op) for part in parts])
        return total / len(parts) if op is ReduceOp.MEAN else total
    total = sum_in_order([_sum_over(to_summable(p, op), axes) for p in parts])
    if op is ReduceOp.SUM:
        return total
    count = sum(int(np.prod([p.shape[a] for a in axes])) for p in parts)
    return total / count


def _apply_to_components(
    value: values.PerReplica,
    mesh: ReplicaMesh,
    fn: Callable[..., Any],
    *args: object,
) -> Array:
    """Calls `fn(components, *args)` eagerly, or in a compiled program.

    With a single process, the first device computes the result. With several
    processes, no process has all components, so `fn` is compiled into a program
    over all devices.
    """
    if mesh.num_processes == 1:
        home = mesh.devices[0]
        parts = [jax.device_put(jnp.asarray(v), home) for v in value.values]
        return fn(parts, *args)
    if value.layout == values.PARTS:
        raise ValueError(
            "With several processes, a `PerReplica` must not be constructed "
            "directly from its components. Received: such a value in a job "
            f"with {mesh.num_processes} processes. Make it with "
            "`strategy.experimental_distribute_values_from_function`."
        )
    program = _compile_over_components(
        mesh, value.layout, value.shapes, fn, *args
    )
    return dispatch(mesh, program, value.arrays[0])[0]


@functools.lru_cache(maxsize=256)
def _compile_over_components(
    mesh: ReplicaMesh,
    layout: str,
    shapes: values.Shapes | None,
    fn: Callable[..., Any],
    *args: object,
) -> Array:
    def over(array: Array) -> tuple[Any]:
        if layout == values.ROWS:
            parts = jnp.split(array, mesh.num_replicas)
        elif shapes is None:
            parts = list(array)
        else:
            parts = list(map(values.cut, array, shapes))
        return (fn(parts, *args),)

    return jax.jit(over, out_shardings=mesh.whole)


def _read_variable(leaf: Leaf, mesh: ReplicaMesh) -> Leaf:
    """Returns the value of a variable, or any other leaf unchanged.

    The value is a `PerReplica` if the copies of the variable may differ, and
    otherwise a `Mirrored`.
    """
    if not isinstance(leaf, keras.Variable):
        return leaf
    if not on_read.is_on_read(leaf):
        return values.Mirrored(leaf.value, mesh)
    # Copied, because the next `run` donates the variable's array.
    array = jnp.copy(on_read.get_copies(leaf, mesh))
    return values.PerReplica.of(array, values.STACKED)


def _reduce_plain(
    op: ReduceOp, value: Array, axis: _Axes, mesh: ReplicaMesh
) -> Array:
    array = jnp.asarray(value)
    if axis is not None:
        axes = _as_axes(axis)
        if op is ReduceOp.MEAN:
            return jnp.mean(array, axis=axes)
        return jnp.sum(array, axis=axes) * mesh.num_replicas
    if op is ReduceOp.MEAN or mesh.num_replicas == 1:
        return value
    if isinstance(value, int | float) and value == 0:
        return value
    raise ValueError(
        f"A non-DistributedValues value {value} cannot be reduced with the "
        "given reduce op ReduceOp.SUM: it is one value, not one for each "
        "replica. Reduce a result of `run`, or use ReduceOp.MEAN."
    )


def _as_axes(axis: int | tuple[int, ...]) -> tuple[Any, ...]:
    axes = axis if isinstance(axis, tuple) else (axis,)
    return tuple(int(a) if isinstance(a, np.integer) else a for a in axes)


def to_summable(array: Array, op: ReduceOp) -> Array:
    """Converts an array to a dtype in which it can be summed or averaged.

    Returns:
      An array of the same shape. Booleans become numbers. For a mean, booleans
      and integers become float32.
    """
    is_exact = jnp.issubdtype(array.dtype, jnp.integer) or array.dtype == bool
    if op is ReduceOp.MEAN and is_exact:
        return array.astype("float32")
    return as_number(array)


def _check_equal_shapes(parts: list[Any]) -> None:
    shapes = [tuple(p.shape) for p in parts]
    if len(set(shapes)) > 1:
        raise ValueError(
            "With axis=None, values are reduced elementwise over the replicas, "
            f"so their shapes must be equal. Received: shapes {shapes}. Pass "
            "axis=0 to sum over the rows first."
        )


def sum_in_order(arrays: list[Any]) -> jax.Array:
    """Adds arrays from first to last, in the order of the replicas."""
    return functools.reduce(jnp.add, arrays)


@functools.cache
def _compile_reduction(mesh: ReplicaMesh, op: ReduceOp) -> Callable[..., Any]:
    """Compiles a reduction over an array's first dimension, the replicas."""

    def over(array: Array) -> tuple[Any]:
        array = to_summable(array, op)
        total = jnp.sum(array, axis=0, dtype=array.dtype)
        return (total / mesh.num_replicas if op is ReduceOp.MEAN else total,)

    return jax.jit(over, out_shardings=mesh.whole)


@functools.partial(jax.jit, static_argnums=1)
def _sum_over(array: Array, axes: tuple[int, ...]) -> jax.Array:
    return jnp.sum(array, axis=axes)


def gather(value: Tree, axis: int, mesh: ReplicaMesh) -> Tree:
    """Implements `Strategy.gather`: concatenates the components of each value.

    Returns:
      The nest, with each distributed value replaced by an array.
    """
    if not isinstance(axis, int):
        raise ValueError(
            "The axis of `gather` must be an integer. Received: "
            f"axis={axis!r}. Pass the dimension to concatenate, such as 0."
        )

    def one(leaf: Leaf) -> Leaf:
        leaf = _read_variable(leaf, mesh)
        if not isinstance(leaf, values.PerReplica):
            return leaf.array if isinstance(leaf, values.Mirrored) else leaf
        values.check_home(leaf, mesh)
        return _apply_to_components(leaf, mesh, _gather_parts, axis)

    value = open_nest(value, values.is_distributed)
    return jax.tree.map(one, value, is_leaf=values.is_distributed)


def _gather_parts(parts: list[Any], axis: int) -> jax.Array:
    return jnp.concatenate(parts, axis=axis)


def list_local_results(value: Tree, mesh: ReplicaMesh) -> tuple[Any, ...]:
    """Implements `Strategy.experimental_local_results`."""
    nest = open_nest(value, values.is_distributed)
    leaves, structure = jax.tree.flatten(nest, is_leaf=values.is_distributed)
    leaves = [_read_variable(leaf, mesh) for leaf in leaves]
    spread = [leaf.values for leaf in leaves if values.is_distributed(leaf)]
    if not spread:
        return (value,)
    columns = [
        leaf.values if values.is_distributed(leaf) else (leaf,) * len(spread[0])
        for leaf in leaves
    ]
    rows = zip(*columns, strict=True)
    return tuple(jax.tree.unflatten(structure, row) for row in rows)

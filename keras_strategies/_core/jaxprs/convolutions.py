"""Constrains how XLA shards convolutions, so that it computes them correctly.

XLA's partitioner (jaxlib 0.10.2 to 0.12.0.1) computes wrong convolutions, or
aborts the process, for some shardings of their operands (docs/upstream.md):

- If spatial dimensions are sharded over some of the devices only, it adds up
  the results of all devices, including copies of the same result. Sharded
  weights cause this: the gradient of a flattened image is sharded as the kernel
  of the dense layer after it.
- If features are sharded in convolutions of several groups, or in gradients of
  their kernels, it combines features of different groups.

So no spatial dimension is sharded, and no feature where there are groups. Other
dimensions stay open: rows are sharded over the replicas, and features over the
cores of a replica.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun
from jax.sharding import PartitionSpec

from keras_strategies._types import Array, Equation, Tree

Constrain = Callable[[Array, PartitionSpec], Array]
"""Constrains the sharding of an array."""

_OPEN = PartitionSpec.UNCONSTRAINED


def constrain_function(
    fn: Callable[..., Tree], constrain: Constrain, axes: tuple[str, ...]
) -> Callable[..., Tree]:
    """Wraps a function so that XLA computes its convolutions correctly.

    Args:
      fn: The function; it is traced once for each trace of the result.
      constrain: Constrains an array's sharding over the mesh axes in `axes`.
      axes: The mesh axes over which XLA may shard arrays.
    """

    def call_constrained(*args: Tree) -> Tree:
        traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        traced = constrain_convolutions(traced, constrain, axes)
        leaves = jaxpr_as_fun(traced)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    return call_constrained


def constrain_convolutions(
    traced: ClosedJaxpr, constrain: Constrain, axes: tuple[str, ...]
) -> ClosedJaxpr:
    """Constrains the operands and results of a program's convolutions.

    Programs that are mapped over devices inside of this one stay unchanged,
    because XLA does not shard them.

    Args:
      traced: The program.
      constrain: See `constrain_function`.
      axes: See `constrain_function`.

    Returns:
      The program with constraints, or the same program if it computes no
      convolution.
    """
    # Programs that several equations call are changed once.
    changed: dict[int, Jaxpr] = {}

    def change(jaxpr: Jaxpr) -> Jaxpr:
        if id(jaxpr) not in changed:
            groups = [change_equation(each) for each in jaxpr.eqns]
            equations = list(itertools.chain.from_iterable(groups))
            is_same = all(map(_is_same, equations, jaxpr.eqns))
            changed[id(jaxpr)] = (
                jaxpr if is_same else jaxpr.replace(eqns=equations)
            )
        return changed[id(jaxpr)]

    def change_equation(equation: Equation) -> list[Any]:
        name = equation.primitive.name
        if name == "conv_general_dilated":
            return _constrain_equation(equation, constrain, axes)
        if name == "shard_map":
            return [equation]
        params = {k: change_param(p) for k, p in equation.params.items()}
        if all(map(_is_same, params.values(), equation.params.values())):
            return [equation]
        return [equation.replace(params=params)]

    def change_param(param: Any) -> Any:
        if isinstance(param, ClosedJaxpr):
            inner = change(param.jaxpr)
            return param if inner is param.jaxpr else param.replace(jaxpr=inner)
        if isinstance(param, Jaxpr):
            return change(param)
        if isinstance(param, tuple):
            params = tuple(map(change_param, param))
            return param if all(map(_is_same, params, param)) else params
        return param

    jaxpr = change(traced.jaxpr)
    return traced if jaxpr is traced.jaxpr else traced.replace(jaxpr=jaxpr)


def _is_same(one: object, other: object) -> bool:
    return one is other


def _constrain_equation(
    equation: Equation, constrain: Constrain, axes: tuple[str, ...]
) -> list[Any]:
    """Returns a convolution with constraints before and after it."""
    *operands, result = (*equation.invars, *equation.outvars)
    *before, after = (
        _trace_constraint(variable, spec, constrain)
        for variable, spec in zip(
            (*operands, result),
            _find_specs(equation.params, axes),
            strict=True,
        )
    )
    (inner,), constraints = after.invars, []
    for variable, each in zip(operands, before, strict=True):
        (constraint,) = each.eqns
        constraints.append(constraint.replace(invars=[variable]))
    convolved = equation.replace(
        invars=[v for each in before for v in each.outvars], outvars=[inner]
    )
    (last,) = after.eqns
    return [*constraints, convolved, last.replace(outvars=[result])]


def _trace_constraint(
    variable: Any, spec: PartitionSpec, constrain: Constrain
) -> Jaxpr:
    array = variable.aval
    shape = jax.ShapeDtypeStruct(array.shape, array.dtype)
    return jax.make_jaxpr(lambda value: constrain(value, spec))(shape).jaxpr


def _find_specs(
    params: Mapping[str, Any], axes: tuple[str, ...]
) -> list[PartitionSpec]:
    """Returns the specs of a convolution's operands and result."""
    numbers = params["dimension_numbers"]
    (rows, features, *spatial) = numbers.lhs_spec
    (kernel_outputs, kernel_inputs, *kernel_spatial) = numbers.rhs_spec
    (result_rows, result_features, *result_spatial) = numbers.out_spec
    # The entries of dimensions that are not open, for each array.
    left: dict[int, Any] = dict.fromkeys(spatial)
    right: dict[int, Any] = dict.fromkeys(kernel_spatial)
    result: dict[int, Any] = dict.fromkeys(result_spatial)
    if params["feature_group_count"] > 1:
        left[features] = result[result_features] = None
        right[kernel_outputs] = right[kernel_inputs] = None
    if params["batch_group_count"] > 1:
        # The gradient of a grouped kernel: `rows` are the input's features, and
        # the sum over `features` is one over the batch. XLA adds up copies if
        # the batch is sharded over some of the devices only.
        left[rows] = right[kernel_outputs] = None
        result[result_rows] = result[result_features] = None
        left[features] = right[kernel_inputs] = axes
    places = range(len(numbers.lhs_spec))
    return [
        PartitionSpec(*(closed.get(dim, _OPEN) for dim in places))
        for closed in (left, right, result)
    ]

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

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from keras_strategies._types import Equation, Tree

_OPEN = PartitionSpec.UNCONSTRAINED


def constrain_function(
    fn: Callable[..., Tree], axes: tuple[str, ...], mesh: Mesh | None = None
) -> Callable[..., Tree]:
    """Wraps a function so that XLA computes its convolutions correctly.

    Args:
      fn: The function; it is traced once for each trace of the result.
      axes: The mesh axes over which XLA may shard arrays.
      mesh: The mesh; None if the function is called in a mapped function.
    """

    def call_constrained(*args: Tree) -> Tree:
        traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        traced = constrain_convolutions(traced, axes, mesh)
        leaves = jaxpr_as_fun(traced)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    return call_constrained


def constrain_convolutions(
    traced: ClosedJaxpr, axes: tuple[str, ...], mesh: Mesh | None = None
) -> ClosedJaxpr:
    """Constrains the operands and results of a program's convolutions.

    Programs that are mapped over devices inside of this one stay unchanged,
    because XLA does not shard them.

    Args:
      traced: The program.
      axes: See `constrain_function`.
      mesh: See `constrain_function`.

    Returns:
      The program with constraints, or the same program if it computes no
      convolution.
    """
    return _Rewriting(axes, mesh).change(traced)


class _Rewriting:
    """Adds constraints to a program and to the programs that it calls.

    Args:
      axes: See `constrain_function`.
      mesh: See `constrain_function`.
    """

    def __init__(self, axes: tuple[str, ...], mesh: Mesh | None) -> None:
        self._axes, self._mesh = axes, mesh
        # Programs that several equations call are changed once, and stay one.
        self._changed: dict[int, Any] = {}
        self._constraints: dict[Any, Jaxpr] = {}

    def change(self, param: Any) -> Any:
        """Returns a parameter of an equation, or the same object."""
        if isinstance(param, ClosedJaxpr | Jaxpr):
            key = id(param)
            if key not in self._changed:
                self._changed[key] = self._change_program(param)
            return self._changed[key]
        if not isinstance(param, tuple):
            return param
        entries = list(map(self.change, param))
        if all(map(operator.is_, entries, param)):
            return param
        make: Any = getattr(type(param), "_make", tuple)  # Of a named tuple.
        return make(entries)

    def _change_program(self, program: Any) -> Any:
        # Since JAX 0.11 both classes are one, and a program is its own `jaxpr`.
        if isinstance(program, ClosedJaxpr) and program.jaxpr is not program:
            inner = self.change(program.jaxpr)
            is_same = inner is program.jaxpr
            return program if is_same else program.replace(jaxpr=inner)
        equations: list[Any] = []
        for equation in program.eqns:
            equations += self._change_equation(equation)
        is_same = all(map(operator.is_, equations, program.eqns))
        return program if is_same else program.replace(eqns=equations)

    def _change_equation(self, equation: Equation) -> list[Any]:
        name, before = equation.primitive.name, equation.params
        if name == "conv_general_dilated":
            return self._constrain_equation(equation)
        if name == "shard_map":
            return [equation]
        params = {key: self.change(param) for key, param in before.items()}
        if all(map(operator.is_, params.values(), before.values())):
            return [equation]
        return [equation.replace(params=params)]

    def _constrain_equation(self, equation: Equation) -> list[Any]:
        """Returns a convolution with constraints before and after it."""
        specs = _find_specs(equation.params, self._axes)
        constraints: list[Any] = []
        operands: list[Any] = []
        for variable, spec in zip(equation.invars, specs, strict=False):
            constraint = self._make_constraint(variable, spec)
            constraints.append(constraint.replace(invars=[variable]))
            operands += constraint.outvars
        last = self._make_constraint(equation.outvars[0], specs[-1])
        convolved = equation.replace(invars=operands, outvars=last.invars)
        last = last.replace(outvars=equation.outvars)
        return [*constraints, convolved, last]

    def _make_constraint(self, variable: Any, spec: PartitionSpec) -> Equation:
        """Returns a constraint for a variable's shape, with new variables."""
        aval = variable.aval
        key = aval.shape, aval.dtype, spec
        if key not in self._constraints:
            sharding = spec
            if self._mesh is not None:
                sharding = NamedSharding(self._mesh, spec)
            constrain = functools.partial(
                jax.lax.with_sharding_constraint, shardings=sharding
            )
            shape = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
            self._constraints[key] = jax.make_jaxpr(constrain)(shape).jaxpr
        (equation,) = self._constraints[key].eqns
        return equation.replace(
            invars=[Var(v.aval) for v in equation.invars],
            outvars=[Var(v.aval) for v in equation.outvars],
        )


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

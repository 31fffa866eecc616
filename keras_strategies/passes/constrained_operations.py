"""Constrains how XLA shards operations that it would compute wrongly.

XLA's partitioner (jaxlib 0.10.2 to 0.12.0.1) computes wrong results, or aborts
the process, for some shardings of operands (docs/upstream.md):

- If spatial dimensions of convolutions are sharded over some of the devices
  only, it adds up the results of all devices, including copies of the same
  result. Sharded weights cause this: the gradient of a flattened image is
  sharded as the kernel of the dense layer after it.
- If features are sharded in convolutions of several groups, or in gradients of
  their kernels, it combines features of different groups.
- If a dimension is sharded along which the windows of a maximum overlap, the
  gradient of the maximum is wrong. Fourier transforms along a sharded dimension
  cannot be computed on CPU. Losses that combine rows in these ways cause this.
- If a loop adds scattered values (gradients of a table) to its carry, XLA for
  TPUs (libtpu 0.0.42.1) moves their sum over the devices out of the loop, in
  which all devices but the first discard what they have added before
  (https://github.com/openxla/xla/issues/49143).

So no such dimension is sharded, and XLA does not see what scatters add to.
Other dimensions stay open: rows are sharded over the replicas, and features
over the cores of a replica.
"""

import functools
import itertools
from collections.abc import Callable, Collection
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, Var, jaxpr_as_fun
from jax.sharding import (
    AbstractMesh,
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
)

from keras_strategies._types import Equation, Tree
from keras_strategies.passes.stages import rewrite_programs

_OPEN = PartitionSpec.UNCONSTRAINED
# In place of a spec: XLA must not look through the value.
_HIDDEN = PartitionSpec("hidden")


def constrain_function(
    fn: Callable[..., Tree], axes: tuple[str, ...], mesh: Mesh | None = None
) -> Callable[..., Tree]:
    """Wraps a function so that XLA shards its operations correctly.

    Args:
      fn: The function; it is traced once for each trace of the result.
      axes: The mesh axes over which XLA may shard arrays.
      mesh: The mesh; None if the function is called in a mapped function.
    """

    def call_constrained(*args: Tree) -> Tree:
        traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        traced = constrain_operations(traced, axes, mesh)
        leaves = jaxpr_as_fun(traced)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

    return call_constrained


def constrain_operations(
    traced: ClosedJaxpr, axes: tuple[str, ...], mesh: Mesh | None = None
) -> ClosedJaxpr:
    """Constrains operands and results of operations that XLA shards wrongly.

    Programs that are mapped over devices inside of this one stay unchanged,
    because XLA does not shard them.

    Args:
      traced: The program.
      axes: See `constrain_function`.
      mesh: See `constrain_function`.

    Returns:
      The program with constraints, or the same program if it has no such
      operation.
    """
    constraints = _Constraints(axes, mesh)

    def constrain(program: Jaxpr) -> list[Any]:
        parts = map(constraints.add_to, program.eqns)
        return list(itertools.chain.from_iterable(parts))

    return rewrite_programs(traced, constrain)


class _Constraints:
    """Adds constraints to equations.

    Args:
      axes: See `constrain_function`.
      mesh: See `constrain_function`.
    """

    def __init__(self, axes: tuple[str, ...], mesh: Mesh | None) -> None:
        self._axes, self._mesh = axes, mesh
        self._made: dict[Any, Jaxpr] = {}

    def add_to(self, equation: Equation) -> list[Any]:
        """Returns an equation with the constraints before and after it."""
        if equation.primitive.name not in _RULES:
            return [equation]
        before, after = _RULES[equation.primitive.name](equation, self._axes)
        operands, results = list(equation.invars), list(equation.outvars)
        first: list[Any] = []
        last: list[Any] = []
        for k, spec in enumerate(before):
            if spec is not None:
                constraint = self._make_constraint(equation, operands[k], spec)
                first.append(constraint.replace(invars=[operands[k]]))
                (operands[k],) = constraint.outvars
        for k, spec in enumerate(after):
            if spec is not None:
                constraint = self._make_constraint(equation, results[k], spec)
                last.append(constraint.replace(outvars=[results[k]]))
                (results[k],) = constraint.invars
        changed = equation.replace(invars=operands, outvars=results)
        return [*first, changed, *last] if first or last else [equation]

    def _make_constraint(self, of: Equation, variable: Any, spec: Any) -> Any:
        """Returns a constraint for a variable's shape, with new variables.

        It has the names of the equation that it is for.
        """
        aval = variable.aval
        key = aval.shape, aval.dtype, spec
        if key not in self._made:
            constrain: Any = jax.lax.optimization_barrier
            if spec is not _HIDDEN:
                mesh = self._mesh
                sharding = spec if mesh is None else NamedSharding(mesh, spec)
                constrain = functools.partial(
                    jax.lax.with_sharding_constraint, shardings=sharding
                )
            shape = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
            self._made[key] = jax.make_jaxpr(constrain)(shape).jaxpr
        (made,) = self._made[key].eqns
        return made.replace(
            invars=[Var(aval)], outvars=[Var(aval)], source_info=of.source_info
        )


_Specs = tuple[list[PartitionSpec | None], list[PartitionSpec | None]]
"""The specs of an equation's operands and of its results, where there are."""


def _close(equation: Equation, dims: Collection[int]) -> _Specs:
    """Returns specs in which some dimensions are not sharded."""
    rank = equation.outvars[0].aval.ndim
    spec = PartitionSpec(*(None if d in dims else _OPEN for d in range(rank)))

    def find_specs(values: list[Any]) -> list[PartitionSpec | None]:
        return [spec if dims and v.aval.ndim == rank else None for v in values]

    return find_specs(equation.invars), find_specs(equation.outvars)


def window_dims(equation: Equation) -> list[int]:
    """Returns the dimensions along which an equation's windows combine."""
    params = equation.params
    names = "window_dimensions window_strides base_dilation window_dilation"
    sizes = [params[n] for n in names.split() if params.get(n) is not None]
    return [
        dim
        for dim, padding in enumerate(params["padding"])
        if any(padding) or any(size[dim] != 1 for size in sizes)
    ]


def _close_windows(equation: Equation, _: tuple[str, ...]) -> _Specs:
    """Returns specs that do not shard what windows combine."""
    return _close(equation, window_dims(equation))


def _close_transformed(equation: Equation, _: tuple[str, ...]) -> _Specs:
    """Returns specs that do not shard what a Fourier transform combines."""
    rank = equation.outvars[0].aval.ndim
    return _close(equation, range(rank)[-len(equation.params["fft_lengths"]) :])


def _hide_operand(equation: Equation, _: tuple[str, ...]) -> _Specs:
    """Returns the specs of a scatter that adds to its operand."""
    return [_HIDDEN, *[None] * (len(equation.invars) - 1)], [None]


def _close_spatial(equation: Equation, axes: tuple[str, ...]) -> _Specs:
    """Returns the specs of a convolution's operands and result."""
    params = equation.params
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
    *before, after = [
        PartitionSpec(*(closed.get(dim, _OPEN) for dim in places))
        for closed in (left, right, result)
    ]
    return [*before], [after]


_RULES: dict[str, Callable[[Equation, tuple[str, ...]], _Specs]] = {
    "conv_general_dilated": _close_spatial,
    "fft": _close_transformed,
    "scatter-add": _hide_operand,
    "select_and_gather_add": _close_windows,
    "select_and_scatter": _close_windows,
    "select_and_scatter_add": _close_windows,
}


_NAME = "lower_with_sharding_in_types"
# Names of the replica axes for which constraints are omitted.
_axes: set[str] = set()


def leave_out_open_constraints(axis: str) -> None:
    """Omits open sharding constraints from programs that are mapped later.

    In a mapped program that is manual over the replicas and automatic over each
    replica's cores, jax 0.10 emits a sharding constraint after every operation,
    with all dimensions open. The constraint has no effect itself, but it hides
    constants from XLA's pass that duplicates a constant for each use. The TPU
    compiler then shards a constant as one of its uses requires, and propagates
    this sharding to all values of the same shape, so activations and weights
    are gathered unnecessarily. JAX's authors intend to omit these constraints
    (`test_open_constraints_are_still_emitted` in tests/contract).

    Only programs of `replica_map` are affected, not programs that the user maps
    or compiles with JAX. Does nothing if this version of JAX does not emit such
    constraints.

    Args:
      axis: Name of the replica axis.
    """
    from jax._src.interpreters import mlir

    original = getattr(mlir, _NAME, None)
    # The first axis installs the patch.
    if original is not None and not _axes:
        setattr(mlir, _NAME, _leaving_out(original))
    _axes.add(axis)


def _leaving_out(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def lower(ctx: Any, op: Any, aval: Any) -> Any:
        # `replica_map` makes meshes that are manual over the replicas and
        # automatic over their cores.
        mesh: AbstractMesh = aval.sharding.mesh
        is_ours = not _axes.isdisjoint(mesh.axis_names[:1])
        is_ours = is_ours and mesh.axis_types[0] == AxisType.Manual
        if is_ours and AxisType.Explicit not in mesh.axis_types:
            return op
        return original(ctx, op, aval)

    return lower

"""Changes how weights' gradients are computed in programs that XLA shards.

- JAX computes the gradient of a matrix as `transpose(dot_general(g, x))`. XLA's
  partitioner puts the sum over the devices between the two, so on CPU the
  optimizer reads transposed arrays, which is slow (docs/benchmarks.md). The
  product of the operands in the other order needs no transpose.
- With mixed precision, a gradient is summed over the rows in half precision and
  then cast to float32, so the sum over the devices is in half precision, too.
  The cast is moved before the sums.
- Calls that contain a lookup in a table, or its gradient, are replaced by their
  equations.
"""

import collections
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Var,
)

from keras_strategies._types import Equation
from keras_strategies.passes.collective_cut import inline_program
from keras_strategies.passes.stages import (
    names_in,
    rewrite_programs,
    variables,
)

_MOVES = names_in("transpose reshape squeeze expand_dims copy neg add_any")
"""Primitives that compute the same before a cast as after it."""
_ADDED_ROWS = names_in("scatter-add scatter_add")
# The function that `jnp.take` (and so `keras.ops.take`) calls under `jax.jit`.
_TAKE = "_take"
_SUMS = names_in("dot_general reduce_sum") + _ADDED_ROWS
"""Primitives that sum in the dtype of their operands."""


def rewrite_gradients(traced: ClosedJaxpr) -> ClosedJaxpr:
    """Changes how a program computes gradients, and returns the new program.

    It computes the same values, apart from rounding.
    """
    return rewrite_programs(traced, _rewrite_program)


def _rewrite_program(program: Jaxpr) -> Sequence[Any]:
    outputs = variables(program.outvars)
    widened = _Widening(program.eqns, outputs, _SUMS).widen()
    return _fold_transposes(widened, outputs)


def count_uses(
    equations: Sequence[Any], outputs: Sequence[Var]
) -> collections.Counter[Var]:
    """Counts how often variables are read."""
    read = (variables(equation.invars) for equation in equations)
    return collections.Counter(itertools.chain(outputs, *read))


def find_makers(
    equations: Sequence[Any], outputs: Sequence[Var]
) -> dict[Var, Any]:
    """Returns the equations that compute variables that are read only once."""
    uses = count_uses(equations, outputs)
    return {
        equation.outvars[0]: equation
        for equation in equations
        if len(equation.outvars) == 1 and uses[equation.outvars[0]] == 1
    }


def _fold_transposes(
    equations: Sequence[Any], outputs: Sequence[Var]
) -> Sequence[Any]:
    """Computes transposed products as products in the other order."""
    makers = find_makers(equations, outputs)
    changed: dict[int, list[Any]] = {}
    for equation in equations:
        is_transpose = equation.primitive.name == "transpose"
        product = makers.get(equation.invars[0]) if is_transpose else None
        if product is None or product.primitive.name != "dot_general":
            continue
        if equation.params["permutation"] == _swap_sides(product):
            left, right = product.invars
            sides = product.params["dimension_numbers"]
            numbers = tuple((two, one) for one, two in sides)
            changed[id(equation)] = []
            changed[id(product)] = [
                product.replace(
                    invars=[right, left],
                    outvars=equation.outvars,
                    params=product.params
                    | {"dimension_numbers": numbers, "out_sharding": None},
                )
            ]
    return replace_equations(equations, changed)


def _swap_sides(product: Equation) -> tuple[int, ...] | None:
    """Returns the order of a product's dimensions if its operands are swapped.

    Returns None if the operands cannot be swapped.
    """
    params = product.params
    # JAX adds a sharding without axes where a mesh is known.
    if any(getattr(params.get("out_sharding"), "spec", ())):
        return None
    if isinstance(params["precision"], tuple | list):
        if len(set(params["precision"])) > 1:
            return None
    elif not isinstance(params["precision"], lax.Precision | None):
        return None  # An algorithm may treat the operands differently.
    (contracted, _), (batch, _) = params["dimension_numbers"]
    rank = product.outvars[0].aval.ndim
    start = len(batch)
    left = product.invars[0].aval.ndim - len(contracted)
    return (*range(start), *range(left, rank), *range(start, left))


def replace_equations(
    equations: Sequence[Any], changed: Mapping[int, list[Any]]
) -> list[Any]:
    """Returns equations, some of which are replaced.

    Args:
      equations: The equations.
      changed: What replaces an equation, by its id.
    """
    parts = (changed.get(id(e), [e]) for e in equations)
    return list(itertools.chain.from_iterable(parts))


def expose_lookups(
    equations: Sequence[Any], outputs: Iterable[Any], tables: Iterable[Any]
) -> Sequence[Any]:
    """Returns equations in which lookups, and their gradients, can be found.

    Calls of `jnp.take`, and of its gradient, are replaced by their equations.
    If a gradient is cast to float32, the rows are cast instead.

    Args:
      equations: The equations.
      outputs: Variables that are read after the equations.
      tables: Variables that may be tables, and their gradients.
    """
    shapes = {v.aval.shape for v in tables}

    def expand(equation: Equation) -> list[Any]:
        values = *equation.invars, *equation.outvars
        is_take = equation.params.get("name") == _TAKE
        if is_take and any(v.aval.shape in shapes for v in values):
            return _inline(equation)
        return [equation]

    inlined = [inner for equation in equations for inner in expand(equation)]
    if not any(
        adds_rows(e) and e.outvars[0].aval.shape in shapes for e in inlined
    ):
        return inlined
    return _Widening(inlined, variables(outputs), _ADDED_ROWS).widen()


def _inline(call: JaxprEqn) -> list[Any]:
    """Returns the equations of a called function, with the caller's variables.

    Returns only the call if a result is not computed by an equation of its own.
    """
    closed = call.params["jaxpr"]
    inner = getattr(closed, "jaxpr", closed)
    computed = {id(v) for e in inner.eqns for v in e.outvars}
    results = set(map(id, inner.outvars))
    if inner.constvars or len(results & computed) < len(inner.outvars):
        return [call]
    return inline_program(inner, call.invars, call.outvars)


def adds_rows(equation: Equation) -> bool:
    """Returns whether an equation adds rows at ids to a table."""
    return equation.primitive.name in _ADDED_ROWS


def casts(equation: Equation) -> bool:
    """Returns whether an equation changes a dtype."""
    return equation.primitive.name == "convert_element_type"


class _Widening:
    """Moves casts of gradients to float32 before the sums over rows.

    Args:
      equations: The equations of a program.
      outputs: Its results.
      sums: The primitives of the sums.
    """

    def __init__(
        self,
        equations: Sequence[Any],
        outputs: Sequence[Var],
        sums: Collection[str],
    ) -> None:
        self._equations = equations
        self._sums = sums
        self._makers = find_makers(equations, outputs)
        self._changed: dict[int, list[Any]] = {}

    def widen(self) -> Sequence[Any]:
        """Returns the new equations."""
        for equation in self._equations:
            if _is_cast_of_gradient(equation) and self._is_sum(
                equation.invars[0]
            ):
                self._compute_wide(equation.invars[0], equation.outvars[0])
                self._changed[id(equation)] = []
        return replace_equations(self._equations, self._changed)

    def _is_sum(self, value: Any) -> bool:
        """Returns whether a value is a sum that is read once."""
        maker = self._makers.get(value) if isinstance(value, Var) else None
        if maker is None:
            return False
        name = maker.primitive.name
        if name in self._sums:
            return True
        return name in _MOVES and any(map(self._is_sum, maker.invars))

    def _compute_wide(self, value: Any, wide: Any) -> None:
        """Computes a sum as the variable `wide`, whose dtype is float32."""
        maker = self._makers[value]
        name, params = maker.primitive.name, maker.params
        before: list[Any] = []
        operands = list(maker.invars)
        if name == "dot_general":
            dtype = jnp.dtype("float32")
            params = params | {"preferred_element_type": dtype}
        else:
            if "update_jaxpr" in params:  # Of a scatter: one sum of two values.
                scalar = jax.ShapeDtypeStruct((), wide.aval.dtype)
                sum_of_two = jax.make_jaxpr(lax.add)(scalar, scalar)
                params = params | {"update_jaxpr": sum_of_two.jaxpr}
            operand: Any
            for k, operand in enumerate(operands):
                if operand.aval.dtype != value.aval.dtype:
                    continue  # The indices of a scatter.
                operands[k] = Var(operand.aval.update(dtype=wide.aval.dtype))
                # JAX sums over rows first, and over dimensions of size 1 later.
                is_inner = name in (*_MOVES, "reduce_sum")
                if is_inner and self._is_sum(operand):
                    self._compute_wide(operand, operands[k])
                else:
                    before.append(_cast(maker, operand, operands[k]))
        self._changed[id(maker)] = [
            *before,
            maker.replace(invars=operands, outvars=[wide], params=params),
        ]


def _is_cast_of_gradient(equation: Equation) -> bool:
    """Returns whether an equation casts a derivative to float32."""
    if not casts(equation):
        return False
    before = equation.invars[0].aval.dtype
    is_wide = equation.params["new_dtype"] == jnp.float32
    is_half = before in (jnp.bfloat16, jnp.float16)
    # Equations within a jitted function do not have the names outside of it.
    names = str(equation.source_info.name_stack)
    is_backward = "transpose(" in names or "jvp(" not in names
    return is_wide and is_half and is_backward


def _cast(like: Equation, operand: Any, wide: Any) -> Equation:
    """Returns an equation that casts an operand of `like` to float32."""
    dtype = wide.aval.dtype
    params = {"new_dtype": dtype, "weak_type": False, "sharding": None}
    return like.replace(
        primitive=lax.convert_element_type_p,
        invars=[operand],
        outvars=[wide],
        params=params,
        effects=frozenset(),
    )

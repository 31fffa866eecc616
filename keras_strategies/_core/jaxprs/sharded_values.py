"""Interprets a traced step on one replica, with sharded values.

For a sharded value, a replica stores only its shard. The value is gathered just
before an equation reads it. If the value is cast before it is read, the shard
is cast first and the result is gathered. If it is read in a rematerialized
function, it is gathered inside that function, so that the backward pass gathers
it again instead of storing the gathered value. The sum of a gradient is
reduce-scattered where the gradient is computed.

References:
  - Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models (2020): https://arxiv.org/abs/1910.02054
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from keras_strategies._core.jaxprs.gather_order import Gathered, find_gathers
from keras_strategies._core.jaxprs.specs import Sharded
from keras_strategies._core.jaxprs.stages import (
    compute_equations,
    is_reference,
    variables,
    with_consts_as_inputs,
)
from keras_strategies._types import Array, Equation

_REMATERIALIZED = ("remat2", "remat", "checkpoint")
_CALLS = ("jit", "pjit", "closed_call", "core_call")


class Exchange(Protocol):
    """The collectives that gather and scatter sharded values."""

    def gather(self, shard: Array, spec: Sharded) -> Array:
        """Gathers a value from the replicas' shards.

        Returns:
          An array of the value's shape.
        """
        ...

    def scatter(self, value: Array, spec: Sharded) -> Array:
        """Returns this replica's shard of the sum of the replicas' values.

        Returns:
          An array whose size in dimension `spec.dim` is that of one shard.
        """
        ...

    def cut(self, value: Array, spec: Sharded) -> Array:
        """Returns this replica's shard of a replicated value.

        Returns:
          An array whose size in dimension `spec.dim` is that of one shard.
        """
        ...


class ShardedInterpreter:
    """An interpreter that computes a traced function's equations on a replica.

    It stores the full value, or this replica's shard, of each variable.

    Args:
      jaxpr: The function.
      exchange: The collectives.
    """

    def __init__(self, jaxpr: Jaxpr, exchange: Exchange) -> None:
        self._jaxpr = jaxpr
        self._exchange = exchange
        self._full: dict[Var, Any] = {}
        self._shards: dict[Var, tuple[Any, Sharded]] = {}
        self._sums: dict[Var, Any] = {}

    def set_replicated(self, variable: Var, value: Array) -> None:
        """Sets the full value of a replicated variable."""
        self._full[variable] = value

    def set_shard(self, variable: Var, shard: Array, spec: Sharded) -> None:
        """Sets this replica's shard of the value of a sharded variable."""
        self._shards[variable] = shard, spec

    def is_sharded(self, variable: Var | Literal) -> bool:
        """Returns whether only this replica's shard of a value is available."""
        return (
            not isinstance(variable, Literal)
            and variable in self._shards
            and variable not in self._full
        )

    def full(self, variable: Var | Literal) -> Array:
        """Returns the full value of a variable; gathers it if it is sharded.

        Returns:
          An array of the variable's shape.
        """
        if isinstance(variable, Literal):
            return variable.val
        if self.is_sharded(variable):
            shard, spec = self._shards[variable]
            self._full[variable] = self._exchange.gather(shard, spec)
        return self._full[variable]

    def shard(self, variable: Var | Literal, spec: Sharded) -> Array:
        """Returns this replica's shard of a value.

        Returns:
          An array whose size in dimension `spec.dim` is that of one shard.
        """
        if not isinstance(variable, Literal) and variable in self._shards:
            shard, shard_spec = self._shards[variable]
            if shard_spec.dim == spec.dim:
                return shard
        return self._exchange.cut(jnp.asarray(self.full(variable)), spec)

    def sum(self, variable: Var | Literal, spec: Sharded) -> Array:
        """Returns this replica's shard of the sum of the replicas' values.

        Returns:
          An array whose size in dimension `spec.dim` is that of one shard.
        """
        if not isinstance(variable, Literal) and variable in self._sums:
            return self._sums[variable]
        return self._exchange.scatter(jnp.asarray(self.full(variable)), spec)

    def compute(
        self,
        equations: Sequence[Any],
        outputs: Iterable[Any],
        scattered: dict[Var, Sharded],
    ) -> None:
        """Computes equations in their order and stores their results.

        Args:
          equations: The equations. The values that they read must be set, or be
            results of earlier equations.
          outputs: Variables that are read after this call. A variable that is
            read twice appears twice.
          scattered: The specs of those outputs that are read only with `sum`.
        """
        read = [v for e in equations for v in e.invars]
        uses = Counter(variables([*read, *outputs]))
        places = _find_scattered(equations, scattered, uses)
        gathers = find_gathers(
            equations,
            {v for v in self._shards if v not in self._full},
            casts=_casts,
            gathers_again=_is_rematerialized,
        )
        following = iter(gathers.values())
        # Values that will be gathered next, but whose gathers do not depend on
        # an equation yet.
        free = [*next(following, ())]
        pending: list[Any] = []
        for place, equation in enumerate(equations):
            if place in gathers:
                # While this equation is computed, the values that the next
                # equation reads are gathered.
                self._flush(pending, uses)
                free += next(following, ())
                free = [] if self._tie(equation, free) else free
            if self._casts(equation):
                self._cast(equation)
                continue
            is_entered = self._is_entered(equation, places)
            is_sum = _adds(equation) and equation.outvars[0] in places
            reads_shards = any(map(self.is_sharded, equation.invars))
            if is_entered or is_sum or reads_shards:
                self._flush(pending, uses)
            if is_entered:
                self._enter(equation, places)
            elif is_sum:
                self._add(equation, places)
            else:
                pending.append(equation)
        self._flush(pending, uses)

    def _flush(self, equations: list[Any], uses: Counter[Var]) -> None:
        """Computes pending equations on full values and empties the list."""
        if not equations:
            return
        outputs = [v for e in equations for v in e.outvars if uses[v]]
        results = compute_equations(self._jaxpr, equations, outputs, self.full)
        self._full.update(zip(outputs, results, strict=True))
        equations.clear()

    def _tie(self, equation: JaxprEqn, gathered: list[Gathered]) -> bool:
        """Makes gathers of values depend on the operands of an equation.

        This keeps the compiler from gathering the values before the equation's
        other operands are computed.

        Args:
          equation: The equation.
          gathered: The values to gather. Their shards are tied to the
            equation's other operands.

        Returns:
          True if the values were tied, or if `gathered` is empty. False if the
          equation has no other operands to which they can be tied.
        """
        read = variables(equation.invars)
        others = [
            v
            for v in dict.fromkeys(read)
            if v in self._full and v not in self._shards and _is_plain(v)
        ]
        shards = [
            next(v for v in origins if v in self._shards)
            for origins in gathered
        ]
        shards = list(dict.fromkeys(shards))
        if not others or not shards:
            return not shards
        tied, parts = jax.lax.optimization_barrier(
            (
                [self._full[v] for v in others],
                [self._shards[v][0] for v in shards],
            )
        )
        self._full.update(zip(others, tied, strict=True))
        for variable, part in zip(shards, parts, strict=True):
            self.set_shard(variable, part, self._shards[variable][1])
        return True

    def _casts(self, equation: JaxprEqn) -> bool:
        return _casts(equation) and self.is_sharded(equation.invars[0])

    def _cast(self, equation: Equation) -> None:
        shard, spec = self._shards[equation.invars[0]]
        cast = jax.lax.convert_element_type(shard, equation.params["new_dtype"])
        self.set_shard(equation.outvars[0], cast, spec)

    def _add(self, equation: Equation, places: dict[Var, Sharded]) -> None:
        """Computes a sum of two values as the sum of their scattered shards."""
        (total,) = equation.outvars
        a, b = (self.sum(v, places[total]) for v in equation.invars)
        self._sums[total] = a + b

    def _is_entered(
        self, equation: JaxprEqn, places: dict[Var, Sharded]
    ) -> bool:
        """Returns whether the function that an equation calls uses shards.

        This is the case if an operand is passed to the function as a shard, or
        if the sum of one of its results is scattered inside the function.
        """
        if not _is_call(equation):
            return False
        return any(
            self._enters_sharded(equation, v) for v in equation.invars
        ) or any(v in places for v in equation.outvars)

    def _enters_sharded(
        self, equation: JaxprEqn, variable: Var | Literal
    ) -> bool:
        """Returns whether a called function receives an operand as a shard.

        A rematerialized function gathers the operand itself, even if the
        gathered value is already available, so that the backward pass can
        gather it again.
        """
        if isinstance(variable, Literal) or variable not in self._shards:
            return False
        return _is_rematerialized(equation) or self.is_sharded(variable)

    def _enter(self, equation: Equation, places: dict[Var, Sharded]) -> None:
        """Computes a called function, some of whose operands are shards."""
        entering = []
        for variable in equation.invars:
            if self._enters_sharded(equation, variable):
                entering.append(self._shards[variable])
            else:
                entering.append((self.full(variable), None))
        specs = [spec for _, spec in entering]
        out_specs = [places.get(v) for v in equation.outvars]

        def inner(*operands: Array) -> list[Any]:
            return self._call(equation, operands, specs, out_specs)

        operands = [value for value, _ in entering]
        if not _is_rematerialized(equation):
            results = inner(*operands)
        else:
            traced = jax.make_jaxpr(inner)(*operands)
            jaxpr = with_consts_as_inputs(traced)
            params = equation.params | {"jaxpr": jaxpr}
            results = equation.primitive.bind(
                *traced.consts, *operands, **params
            )
        for variable, spec, result in zip(
            equation.outvars, out_specs, results, strict=True
        ):
            if spec is None:
                self._full[variable] = result
            else:
                self._sums[variable] = result

    def _call(
        self,
        equation: JaxprEqn,
        operands: Sequence[Any],
        specs: Sequence[Sharded | None],
        out_specs: Sequence[Sharded | None],
    ) -> list[Any]:
        jaxpr = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
        consts = getattr(jaxpr, "consts", ())
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        values = ShardedInterpreter(jaxpr, self._exchange)
        for variable, value in zip(jaxpr.constvars, consts, strict=True):
            values.set_replicated(variable, value)
        for variable, value, spec in zip(
            jaxpr.invars, operands, specs, strict=True
        ):
            if spec is None:
                values.set_replicated(variable, value)
            else:
                values.set_shard(variable, value, spec)
        scattered = {
            v: spec
            for v, spec in zip(jaxpr.outvars, out_specs, strict=True)
            if spec is not None and not isinstance(v, Literal)
        }
        values.compute(jaxpr.eqns, jaxpr.outvars, scattered)
        return [
            values.full(v) if spec is None else values.sum(v, spec)
            for v, spec in zip(jaxpr.outvars, out_specs, strict=True)
        ]


def _is_rematerialized(equation: JaxprEqn) -> bool:
    return equation.primitive.name in _REMATERIALIZED


def _is_call(equation: JaxprEqn) -> bool:
    """Returns whether an equation calls a function that can take shards."""
    return equation.primitive.name in (*_REMATERIALIZED, *_CALLS)


def _casts(equation: JaxprEqn) -> bool:
    return equation.primitive.name == "convert_element_type"


def _is_plain(variable: Var) -> bool:
    """Returns whether a value is neither a random key nor a reference."""
    array: Any = variable.aval
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.extended)
    return not is_key and not is_reference(variable)


def _adds(equation: JaxprEqn) -> bool:
    return equation.primitive.name == "add_any"


def _find_scattered(
    equations: Sequence[Any],
    scattered: dict[Var, Sharded],
    uses: Counter[Var],
) -> dict[Var, Sharded]:
    """Finds the variables whose sums are scattered where they are computed.

    These are results of called functions, and sums of such results. An example
    is the gradient of a weight that several rematerialized functions read.
    """
    makers = {v: e for e in equations for v in e.outvars}
    places: dict[Var, Sharded] = {}

    def sink(variable: Var | Literal, spec: Sharded) -> bool:
        if isinstance(variable, Literal) or uses[variable] != 1:
            return False
        maker = makers.get(variable)
        if maker is None:
            return False
        is_inner = _is_call(maker)
        if _adds(maker):
            # A list, not a generator, because `any` must not skip the second
            # operand.
            is_inner = any([sink(v, spec) for v in maker.invars])
        if is_inner:
            places[variable] = spec
        return is_inner

    for variable, spec in scattered.items():
        sink(variable, spec)
    return places

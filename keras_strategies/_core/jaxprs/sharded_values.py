"""A replica's values of a traced step, some of them divided over replicas.

A divided value is held as this replica's shard and gathered where an equation
reads it; in the dtype that it is cast to, if it is cast first; inside of a
rematerialized part, if it is read there, so that the backward pass gathers
again. A gradient's sum is scattered where the gradient is made.

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

from keras_strategies._core.jaxprs.gather_order import Gathered, gathers_of
from keras_strategies._core.jaxprs.specs import Sharded
from keras_strategies._core.jaxprs.stages import (
    computed,
    is_reference,
    variables,
    with_consts_as_inputs,
)
from keras_strategies._types import Array, Equation

_REMATERIALIZED = ("remat2", "remat", "checkpoint")
_CALLS = ("jit", "pjit", "closed_call", "core_call")


class Exchange(Protocol):
    """How replicas that divide values exchange what they hold of them."""

    def gather(self, shard: Array, spec: Sharded) -> Array:
        """The whole value, of this replica's shard.

        Returns:
          An array of the value's shape.
        """
        ...

    def scatter(self, value: Array, spec: Sharded) -> Array:
        """This replica's shard of the replicas' values, summed.

        Returns:
          An array whose dimension `spec.dim` is a replica's part.
        """
        ...

    def cut(self, whole: Array, spec: Sharded) -> Array:
        """This replica's shard of a value that all have.

        Returns:
          An array whose dimension `spec.dim` is a replica's part.
        """
        ...


class Values:
    """The values of a traced function's variables on one replica.

    Args:
      jaxpr: The function.
      exchange: Gathers and scatters.
    """

    def __init__(self, jaxpr: Jaxpr, exchange: Exchange) -> None:
        self._jaxpr = jaxpr
        self._exchange = exchange
        self._whole: dict[Var, Any] = {}
        self._shards: dict[Var, tuple[Any, Sharded]] = {}
        self._sums: dict[Var, Any] = {}

    def set_replicated(self, variable: Var, value: Array) -> None:
        """Sets a value that this replica holds whole."""
        self._whole[variable] = value

    def set_shard(self, variable: Var, shard: Array, spec: Sharded) -> None:
        """Sets a value by this replica's shard of it."""
        self._shards[variable] = shard, spec

    def is_sharded(self, variable: Var | Literal) -> bool:
        """Whether a value is known by its shard alone."""
        return (
            not isinstance(variable, Literal)
            and variable in self._shards
            and variable not in self._whole
        )

    def whole(self, variable: Var | Literal) -> Array:
        """A value, gathered if it is divided.

        Returns:
          An array of the variable's shape.
        """
        if isinstance(variable, Literal):
            return variable.val
        if self.is_sharded(variable):
            shard, spec = self._shards[variable]
            self._whole[variable] = self._exchange.gather(shard, spec)
        return self._whole[variable]

    def shard(self, variable: Var | Literal, spec: Sharded) -> Array:
        """This replica's shard of a value.

        Returns:
          An array whose dimension `spec.dim` is a replica's part.
        """
        if not isinstance(variable, Literal) and variable in self._shards:
            shard, held = self._shards[variable]
            if held.dim == spec.dim:
                return shard
        return self._exchange.cut(jnp.asarray(self.whole(variable)), spec)

    def sum(self, variable: Var | Literal, spec: Sharded) -> Array:
        """This replica's shard of the replicas' values, summed.

        Returns:
          An array whose dimension `spec.dim` is a replica's part.
        """
        if not isinstance(variable, Literal) and variable in self._sums:
            return self._sums[variable]
        return self._exchange.scatter(jnp.asarray(self.whole(variable)), spec)

    def compute(
        self,
        equations: Sequence[Any],
        outputs: Iterable[Any],
        scattered: dict[Var, Sharded],
    ) -> None:
        """Computes equations, in their order.

        Args:
          equations: They read values that are set.
          outputs: Variables that are read afterwards, once for each time.
          scattered: How those of them are divided that are read by `sum`,
            and no other way.
        """
        read = [v for e in equations for v in e.invars]
        uses = Counter(variables([*read, *outputs]))
        places = _sunk(equations, scattered, uses)
        gathers = gathers_of(
            equations,
            {v for v in self._shards if v not in self._whole},
            casts=_casts,
            gathers_again=_is_rematerialized,
        )
        following = iter(gathers.values())
        # What may still be gathered at any time.
        free = [*next(following, ())]
        pending: list[Any] = []
        for place, equation in enumerate(equations):
            if place in gathers:
                self._flush(pending, uses)
                free += next(following, ())
                if self._tie(equation, free):
                    free = []
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
        """Computes equations on whole values, and empties their list."""
        if not equations:
            return
        made = [v for e in equations for v in e.outvars if uses[v]]
        results = computed(self._jaxpr, equations, made, self.whole)
        self._whole.update(zip(made, results, strict=True))
        equations.clear()

    def _tie(self, equation: JaxprEqn, gathered: list[Gathered]) -> bool:
        """Has values gathered no sooner than an equation can be computed.

        Returns:
          Whether it could be done: the equation reads something else.
        """
        read = variables(equation.invars)
        others = [
            v
            for v in dict.fromkeys(read)
            if v in self._whole and v not in self._shards and _is_plain(v)
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
                [self._whole[v] for v in others],
                [self._shards[v][0] for v in shards],
            )
        )
        self._whole.update(zip(others, tied, strict=True))
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
        """Adds two values' shards of sums."""
        (made,) = equation.outvars
        a, b = (self.sum(v, places[made]) for v in equation.invars)
        self._sums[made] = a + b

    def _is_entered(
        self, equation: JaxprEqn, places: dict[Var, Sharded]
    ) -> bool:
        """Whether an equation is a function to be computed on shards."""
        if not _is_called(equation):
            return False
        return any(
            self._enters_sharded(equation, v) for v in equation.invars
        ) or any(v in places for v in equation.outvars)

    def _enters_sharded(
        self, equation: JaxprEqn, variable: Var | Literal
    ) -> bool:
        """Whether a function is given the shard of an operand.

        One that is rematerialized gathers it again.
        """
        if isinstance(variable, Literal) or variable not in self._shards:
            return False
        return _is_rematerialized(equation) or self.is_sharded(variable)

    def _enter(self, equation: Equation, places: dict[Var, Sharded]) -> None:
        """Computes the function that an equation calls, on shards."""
        given = []
        for variable in equation.invars:
            if self._enters_sharded(equation, variable):
                given.append(self._shards[variable])
            else:
                given.append((self.whole(variable), None))
        specs = [spec for _, spec in given]
        wanted = [places.get(v) for v in equation.outvars]

        def inner(*operands: Array) -> list[Any]:
            return self._called(equation, operands, specs, wanted)

        operands = [value for value, _ in given]
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
            equation.outvars, wanted, results, strict=True
        ):
            if spec is None:
                self._whole[variable] = result
            else:
                self._sums[variable] = result

    def _called(
        self,
        equation: JaxprEqn,
        operands: Sequence[Any],
        specs: Sequence[Sharded | None],
        wanted: Sequence[Sharded | None],
    ) -> list[Any]:
        jaxpr = equation.params.get("jaxpr") or equation.params["call_jaxpr"]
        consts = getattr(jaxpr, "consts", ())
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        values = Values(jaxpr, self._exchange)
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
            for v, spec in zip(jaxpr.outvars, wanted, strict=True)
            if spec is not None and not isinstance(v, Literal)
        }
        values.compute(jaxpr.eqns, jaxpr.outvars, scattered)
        return [
            values.whole(v) if spec is None else values.sum(v, spec)
            for v, spec in zip(jaxpr.outvars, wanted, strict=True)
        ]


def _is_rematerialized(equation: JaxprEqn) -> bool:
    return equation.primitive.name in _REMATERIALIZED


def _is_called(equation: JaxprEqn) -> bool:
    """Whether an equation is a function that can be computed on shards."""
    return equation.primitive.name in (*_REMATERIALIZED, *_CALLS)


def _casts(equation: JaxprEqn) -> bool:
    return equation.primitive.name == "convert_element_type"


def _is_plain(variable: Var) -> bool:
    """Whether a value is an array of numbers: no random key, no reference."""
    array: Any = variable.aval
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.extended)
    return not is_key and not is_reference(variable)


def _adds(equation: JaxprEqn) -> bool:
    return equation.primitive.name == "add_any"


def _sunk(
    equations: Sequence[Any],
    scattered: dict[Var, Sharded],
    uses: Counter[Var],
) -> dict[Var, Sharded]:
    """The variables whose sums are scattered where they are made.

    Those are results of functions, and sums of such: a weight that several
    rematerialized parts read.
    """
    makers = {v: e for e in equations for v in e.outvars}
    places: dict[Var, Sharded] = {}

    def sink(variable: Var | Literal, spec: Sharded) -> bool:
        if isinstance(variable, Literal) or uses[variable] != 1:
            return False
        maker = makers.get(variable)
        if maker is None:
            return False
        is_inner = _is_called(maker)
        if _adds(maker):
            # Not short-circuited: all that can be, are.
            is_inner = any([sink(v, spec) for v in maker.invars])
        if is_inner:
            places[variable] = spec
        return is_inner

    for variable, spec in scattered.items():
        sink(variable, spec)
    return places

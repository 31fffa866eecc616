"""Interprets a traced step on one replica, with sharded values.

For a sharded value, a replica stores only its shard. The value is gathered just
before an equation reads it. If the value is cast before it is read, the shard
is cast first and the result is gathered. If it is read in a rematerialized
function, it is gathered inside that function, so that the backward pass gathers
it again instead of storing the gathered value. A loop (`jax.lax.scan`) over the
first dimension of a value gathers one slice at a time, in its body. The sum of
a gradient is reduce-scattered where the gradient is computed.

References:
  - Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models (2020): https://arxiv.org/abs/1910.02054
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from keras_strategies._types import Array, Equation
from keras_strategies.passes.lookups import Lookups
from keras_strategies.passes.sharded_calls import (
    Gathered,
    compute_call,
    find_gathers,
    find_lookups,
    find_scattered,
    is_call,
    is_loop,
    is_plain,
    is_rematerialized,
    keeps_shards,
    names,
    reads_slices,
    sums_shards,
)
from keras_strategies.passes.specs import (
    Exchange,
    Sharded,
    find_split,
    join_blocks,
    joins,
    slice_spec,
    split_blocks,
    splits,
    stack_values,
    stacked_spec,
    stacks,
    unstack_values,
    unstacks,
)
from keras_strategies.passes.stages import (
    compute_equations,
    variables,
)
from keras_strategies.passes.weight_gradients import (
    adds_rows,
    expose_lookups,
)


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
        self._lookups = Lookups([], exchange, self.full)

    def set(self, variable: Var, value: Array, spec: Sharded | None) -> None:
        """Sets this replica's shard of a value; without a spec, all of it."""
        if spec is None:
            self._full[variable] = value
        else:
            self._shards[variable] = value, spec

    def is_sharded(self, variable: Var | Literal) -> bool:
        """Returns whether only this replica's shard of a value is available."""
        is_shard = self._find_shard(variable) is not None
        return is_shard and variable not in self._full

    def _find_shard(self, variable: Var | Literal) -> Any:
        """Returns this replica's shard of a value and its spec, or None."""
        is_literal = isinstance(variable, Literal)
        return None if is_literal else self._shards.get(variable)

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
        elif variable in self._lookups and variable not in self._full:
            self._full[variable] = self._lookups.join(variable)
        return self._full[variable]

    def shard(self, variable: Var | Literal, spec: Sharded) -> Array:
        """Returns this replica's shard of a value.

        Returns:
          An array whose size in dimension `spec.dim` is that of one shard.
        """
        found = self._find_shard(variable)
        if found is not None and found[1].dim == spec.dim:
            return found[0]
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
        specs = {v: spec for v, (_, spec) in self._shards.items()}
        equations = expose_lookups(equations, outputs, [*specs, *scattered])
        read = [v for e in equations for v in e.invars]
        uses = Counter(variables([*read, *outputs]))
        lookups = find_lookups(equations, specs)
        self._lookups = Lookups(equations, self._exchange, self.full)
        places = find_scattered(equations, scattered, uses)
        sharded = self._shards.keys() - self._full.keys()
        gathers = find_gathers(equations, sharded, lookups.keys())
        following = iter(gathers.values())
        # Values that will be gathered next, but whose gathers do not depend on
        # an equation yet.
        free = [*next(following, ())]
        pending: list[Any] = []
        for place, equation in enumerate(equations):
            if place in gathers:
                # While this equation is computed, the values that the next
                # equation reads are gathered. They are not gathered before a
                # loop, because they would stay gathered in all its turns.
                self._flush(pending, uses)
                free += next(following, ())
                if not is_loop(equation):
                    free = [] if self._tie(equation, free) else free
            if self._pass_on(equation):
                continue
            reads_shards = any(map(self.is_sharded, equation.invars))
            is_sum = sums_shards(equation) and equation.outvars[0] in places
            is_lookup = not lookups.keys().isdisjoint(equation.outvars)
            is_entered = not is_sum and self._is_entered(equation, places)
            if is_entered or is_sum or reads_shards:
                self._flush(pending, uses)
            if is_entered:
                self._enter(equation, places)
            elif is_sum:
                self._sum(equation, places)
            elif is_lookup and reads_shards:
                table, dim = lookups[equation.outvars[0]]
                shard = self._exchange.join_cores(*self._shards[table])
                self._lookups.look_up(equation, shard, dim)
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
            if v in self._full and v not in self._shards and is_plain(v)
        ]
        shards = [
            next(v for v in origins if v in self._shards)
            for origins in gathered
        ]
        shards = list(dict.fromkeys(shards))
        if not others or not shards:
            return not shards
        values = [self._full[v] for v in others]
        parts = [self._shards[v][0] for v in shards]
        values, parts = jax.lax.optimization_barrier((values, parts))
        self._full.update(zip(others, values, strict=True))
        for variable, part in zip(shards, parts, strict=True):
            self.set(variable, part, self._shards[variable][1])
        return True

    def _pass_on(self, equation: Equation) -> bool:
        """Computes a cast, name, stack or split of shards, if it can."""
        if self._lookups.cast(equation):
            return True
        is_sharded = all(map(self.is_sharded, equation.invars))
        if not keeps_shards(equation) or not is_sharded:
            return False
        held = [self._shards[v] for v in equation.invars]
        shards, specs = zip(*held, strict=True)
        if len(set(specs)) > 1:
            return False
        shard, spec, params = shards[0], specs[0], equation.params
        if stacks(equation):
            shard, spec = stack_values(shards), stacked_spec(spec)
        elif splits(equation):
            if (found := find_split(equation, spec)) is None:
                return False
            shard, spec = split_blocks(shard, *found), stacked_spec(spec)
        elif names(equation):
            shard = checkpoint_name(shard, params["name"])
        else:
            shard = jax.lax.convert_element_type(shard, params["new_dtype"])
        self.set(equation.outvars[0], shard, spec)
        return True

    def _sum(self, equation: Equation, places: dict[Var, Sharded]) -> None:
        """Computes or names a sum, or its slices, from scattered shards."""
        spec = places[equation.outvars[0]]
        if unstacks(equation):
            stacked = self.sum(equation.invars[0], stacked_spec(spec))
            sums = unstack_values(stacked)
        elif joins(equation):
            blocks = self.sum(equation.invars[0], stacked_spec(spec))
            found: Any = find_split(equation, spec)
            sums = [join_blocks(blocks, *found)]
        elif adds_rows(equation):
            sums = [self._lookups.sum(equation, spec)]
        else:
            first, *others = (self.sum(v, spec) for v in equation.invars)
            sums = [sum(others, first)]
        self._sums.update(zip(equation.outvars, sums, strict=True))

    def _is_entered(
        self, equation: JaxprEqn, places: dict[Var, Sharded]
    ) -> bool:
        """Returns whether the function that an equation calls uses shards.

        This is the case if an operand is passed to the function as a shard, or
        if the sum of one of its results is scattered inside the function.
        """
        if not is_call(equation) and not is_loop(equation):
            return False
        count = len(equation.invars)
        is_shard = any(self._enters_sharded(equation, k) for k in range(count))
        return is_shard or not places.keys().isdisjoint(equation.outvars)

    def _enters_sharded(self, equation: JaxprEqn, position: int) -> bool:
        """Returns whether a called function receives an operand as a shard.

        A rematerialized function or a loop gathers the operand itself, even if
        the gathered value is already available, so that the backward pass can
        gather it again.
        """
        variable = equation.invars[position]
        found = self._find_shard(variable)
        if found is None:
            return False
        if is_loop(equation):
            return reads_slices(equation, position, found[1])
        return is_rematerialized(equation) or self.is_sharded(variable)

    def _enter(self, equation: Equation, places: dict[Var, Sharded]) -> None:
        """Computes a called function, some of whose operands are shards."""
        entering: list[tuple[Any, Sharded | None]] = [
            self._shards[v]
            if self._enters_sharded(equation, k)
            else (self.full(v), None)
            for k, v in enumerate(equation.invars)
        ]
        out_specs = [places.get(v) for v in equation.outvars]
        inner_specs = [[spec for _, spec in entering], out_specs]
        if is_loop(equation):
            self._exchange.note_loop()
            inner_specs = [
                [None if spec is None else slice_spec(spec) for spec in specs]
                for specs in inner_specs
            ]

        def inner(*operands: Array) -> list[Any]:
            return self._call(equation, operands, *inner_specs)

        results = compute_call(equation, [v for v, _ in entering], inner)
        for variable, spec, result in zip(
            equation.outvars, out_specs, results, strict=True
        ):
            (self._full if spec is None else self._sums)[variable] = result

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
            values.set(variable, value, None)
        for each in zip(jaxpr.invars, operands, specs, strict=True):
            values.set(*each)
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

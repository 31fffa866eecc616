"""Maps a function over replicas whose variables are sharded over them.

The function is traced as if all values were replicated. The traced program is
then rearranged without changing its results: sharded values are gathered just
before they are read, gradients are reduce-scattered where they are computed,
and the program is cut at the optimizers' updates. Each update is computed
outside of the map, between two mapped sections.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import PartitionSpec

from keras_strategies._types import Array, Tree
from keras_strategies.passes.constrained_operations import constrain_function
from keras_strategies.passes.marked_updates import (
    MAX,
    Update,
    collect_updates,
)
from keras_strategies.passes.sharded_values import ShardedInterpreter
from keras_strategies.passes.specs import Placed, Sharded, Spec
from keras_strategies.passes.stages import (
    get_shape,
    has_effects,
    has_references,
    needed_equations,
    variables,
)
from keras_strategies.spmd.buffers import choose_buffering, sum_arrays
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.replica_map import (
    add_dim,
    all_max,
    replica_map,
    replicated_spec,
    split_spec,
)
from keras_strategies.spmd.shard_exchange import ShardExchange


def sharded_map(
    fn: Callable[..., Any],
    mesh: ReplicaMesh,
    *,
    in_specs: Tree,
    out_specs: Tree,
) -> Callable[..., Any]:
    """Maps `fn` over the replicas, with arguments that may be `Sharded`.

    Args:
      fn: The function that each replica computes. `Sharded` arguments are
        passed to it as full, replicated arrays.
      mesh: The replicas.
      in_specs: The specs of the arguments, as a nest of the same structure or a
        prefix of it.
      out_specs: The same for the results. Results that are `Sharded` must be
        equal on all replicas.

    Returns:
      The mapped function; it takes and returns global arrays.
    """
    if not any(isinstance(s, Sharded) for s in jax.tree.leaves(in_specs)):
        # No argument is sharded over replicas. Arrays that are sharded only
        # over a replica's cores need no gathering: a mapped function sees their
        # full values.
        manual = jax.tree.map(_manual, (in_specs, out_specs), is_leaf=_is_spec)
        return replica_map(fn, mesh, in_specs=manual[0], out_specs=manual[1])

    def call_mapped(*args: Any) -> Tree:
        inputs, structure = jax.tree.flatten(args)
        specs = _flat(in_specs, args)
        results: list[Any] = []

        def flat(*leaves: Array) -> list[Any]:
            outputs = fn(*jax.tree.unflatten(structure, leaves))
            flat_outputs, result = jax.tree.flatten(outputs)
            results[:] = [result, _flat(out_specs, outputs)]
            return flat_outputs

        whole = replicated_spec()
        manual = tuple(whole if isinstance(s, Placed) else s for s in specs)
        replicated = replica_map(
            flat, mesh, in_specs=manual, out_specs=whole, is_rearranged=True
        )
        with collect_updates() as updates:
            traced = jax.make_jaxpr(replicated)(*map(get_shape, inputs))
        step = _SectionedStep(traced, updates, mesh, specs, inputs)
        return jax.tree.unflatten(results[0], step.compute(results[1]))

    return call_mapped


def _flat(specs: Tree, values: Tree) -> list[Any]:
    return jax.tree.leaves(
        jax.tree.broadcast(specs, values, is_leaf=_is_spec), is_leaf=_is_spec
    )


def _is_spec(leaf: object) -> bool:
    return isinstance(leaf, Spec)


class _Result(enum.Enum):
    """The form in which a mapped section of a step returns a variable."""

    VALUE = "value"
    """The value itself, which is equal on all replicas or split over them."""
    PER_REPLICA = "per replica"
    """Each replica's own value, stacked along a new first dimension."""
    SUM = "sum"
    """The sum over the replicas."""
    MAX = "max"
    """The maximum over the replicas."""


@dataclasses.dataclass(frozen=True)
class _Want:
    """The form and spec in which a mapped section has to return a variable.

    Attributes:
      how: Whether to return the value, each replica's value, or a reduction.
      spec: The spec of the result.
    """

    how: _Result
    spec: Spec


class _SectionedStep:
    """A traced step, cut at its optimizer updates into mapped sections.

    Args:
      traced: The jaxpr of the mapped step.
      updates: The marked updates, by name.
      mesh: The replicas.
      specs: The spec of each input.
      inputs: The inputs of the step, as global arrays.
    """

    def __init__(
        self,
        traced: ClosedJaxpr,
        updates: dict[str, Update],
        mesh: ReplicaMesh,
        specs: Sequence[Spec],
        inputs: Sequence[Any],
    ) -> None:
        (equation,) = traced.jaxpr.eqns
        self._mesh = mesh
        self._per_replica = _Want(_Result.PER_REPLICA, split_spec(mesh))
        self._jaxpr: Jaxpr = equation.params["jaxpr"]
        self._updates = {} if has_references(self._jaxpr) else updates
        # Arrays outside of the mapped sections: the step's inputs and the
        # results of the updates.
        self._global: dict[Var, Any] = {}
        self._specs: dict[Var, Spec] = {}
        outer = dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
        known: dict[Var, Spec] = dict.fromkeys(outer, replicated_spec())
        outer |= zip(traced.jaxpr.invars, inputs, strict=True)
        known |= zip(traced.jaxpr.invars, specs, strict=True)
        for inner, operand in zip(
            self._jaxpr.invars, equation.invars, strict=True
        ):
            if isinstance(operand, Literal):
                self._global[inner] = jnp.asarray(operand.val)
                self._specs[inner] = replicated_spec()
            else:
                self._global[inner] = outer[operand]
                self._specs[inner] = known[operand]
        self._section_by_var: dict[Var, int] = {}
        # For each mapped section, its equations, and the updates after it.
        self._sections: list[tuple[list[Any], list[Any]]] = [([], [])]
        self._divide()
        # Results that sections have already returned. The keys are those of the
        # sections' plans (see `_plans`).
        self._returned: dict[Any, Any] = {}

    def _divide(self) -> None:
        """Assigns each equation to the earliest possible mapped section."""
        last_action = 0
        for equation in self._jaxpr.eqns:
            place = max(map(self._place, equation.invars), default=0)
            if has_effects(equation):
                # Equations with side effects must stay in their order.
                place = last_action = max(place, last_action)
            update = self._updates.get(equation.params.get("name", ""))
            if update is None:
                self._sections[place][0].append(equation)
            else:
                self._sections[place][1].append((equation, update))
                if place + 1 == len(self._sections):
                    self._sections.append(([], []))
                self._specs |= zip(equation.outvars, update.values, strict=True)
                # The results of an update are available from the next section
                # on.
                place += 1
            self._section_by_var |= dict.fromkeys(equation.outvars, place)

    def _place(self, variable: Var | Literal) -> int:
        if isinstance(variable, Literal):
            return 0
        return self._section_by_var.get(variable, 0)

    def compute(self, specs: Sequence[Spec]) -> list[Any]:
        """Computes the step and returns its results as a flat list.

        Args:
          specs: The spec of each result.
        """
        outputs = [
            (v, _Want(_Result.VALUE, spec))
            for v, spec in zip(self._jaxpr.outvars, specs, strict=True)
        ]
        plans = self._plans(outputs)
        for k, plan in enumerate(plans):
            equations, updates = self._sections[k]
            if plan or any(map(has_effects, equations)):
                self._compute_section(k, plan)
            for update in updates:
                self._apply(*update)
        return [self._value(v, want) for v, want in outputs]

    def _plans(self, outputs: Iterable[Any]) -> list[dict[Any, Any]]:
        """Finds the variables that each mapped section has to return.

        Works backwards from the step's outputs. A section returns the variables
        that are read by the step's outputs, by the updates after the section,
        or by later sections. Arrays that already exist outside of the sections
        (the inputs and the updates' results) are not returned.
        """
        plans: list[dict[Any, Any]] = [{} for _ in self._sections]

        def want(variable: Var | Literal, want: _Want) -> None:
            if not self._is_global(variable, want):
                plan = plans[self._place(variable)]
                plan[id(variable), want] = variable, want

        for output in outputs:
            want(*output)
        for k in range(len(plans) - 1, -1, -1):
            for update in self._sections[k][1]:
                for operand in _operands(*update):
                    want(*operand)
            for variable in self._find_inputs(k, plans[k]):
                if variable not in self._specs:
                    want(variable, self._per_replica)
        return plans

    def _is_global(self, variable: Var | Literal, want: _Want) -> bool:
        return (
            want.how is _Result.VALUE
            and not isinstance(variable, Literal)
            and self._specs.get(variable) == want.spec
        )

    def _value(self, variable: Any, want: _Want) -> Array:
        if self._is_global(variable, want):
            return self._global[variable]
        return self._returned[id(variable), want]

    def _equations(self, k: int, plan: dict[Any, Any]) -> list[Any]:
        """Returns the equations that a section's results or effects require."""
        outputs = [v for v, _ in plan.values()]
        return needed_equations(self._sections[k][0], outputs, has_effects)

    def _find_inputs(self, k: int, plan: dict[Any, Any]) -> list[Var]:
        """Returns the variables that a section reads but does not compute.

        These are inputs of the step, and results of earlier sections or
        updates.
        """
        equations = self._equations(k, plan)
        computed = {v for e in equations for v in e.outvars}
        read = [v for e in equations for v in e.invars]
        read += [v for v, _ in plan.values()]
        return [v for v in dict.fromkeys(variables(read)) if v not in computed]

    def _compute_section(self, k: int, plan: dict[Any, Any]) -> None:
        equations, inputs = self._equations(k, plan), self._find_inputs(k, plan)
        sources = [
            _Want(_Result.VALUE, self._specs[v])
            if v in self._specs
            else self._per_replica
            for v in inputs
        ]
        wants = list(plan.values())

        def section(*arrays: Array) -> list[Any]:
            values = ShardedInterpreter(self._jaxpr, ShardExchange(self._mesh))
            for variable, value, source in zip(
                inputs, arrays, sources, strict=True
            ):
                spec = source.spec if isinstance(source.spec, Sharded) else None
                value = value if source.how is _Result.VALUE else value[0]
                values.set(variable, value, spec)
            scattered = {
                v: want.spec
                for v, want in wants
                if want.how is _Result.SUM and isinstance(want.spec, Sharded)
            }
            values.compute(equations, [v for v, _ in wants], scattered)
            return self._results(values, wants)

        mapped = replica_map(
            section,
            self._mesh,
            in_specs=tuple(_manual(source.spec) for source in sources),
            out_specs=[_manual(want.spec) for _, want in wants],
        )
        results = mapped(*map(self._value, inputs, sources))
        if self._mesh.platform == "gpu":
            results = jax.lax.optimization_barrier(results)
        self._returned.update(zip(plan, results, strict=True))

    def _results(
        self, values: ShardedInterpreter, wants: list[Any]
    ) -> list[Any]:
        results: list[Any] = []
        summed, axis = [], self._mesh.all_replicas
        for variable, want in wants:
            is_sharded = isinstance(want.spec, Sharded)
            if want.how is _Result.SUM and not is_sharded:
                summed.append(variable)
                results.append(None)
            elif want.how is _Result.SUM:
                results.append(values.sum(variable, want.spec))
            elif want.how is _Result.MAX:
                results.append(all_max(values.full(variable), axis))
            elif want.how is _Result.PER_REPLICA:
                results.append(add_dim(values.full(variable), self._mesh))
            elif is_sharded:
                results.append(values.shard(variable, want.spec))
            else:
                results.append(values.full(variable))
        terms = [jnp.asarray(values.full(variable)) for variable in summed]
        buffering = choose_buffering(self._mesh)
        sums = iter(sum_arrays(terms, axis=axis, buffering=buffering))
        return [next(sums) if r is None else r for r in results]

    def _apply(self, equation: JaxprEqn, update: Update) -> None:
        """Computes an optimizer update on global arrays, outside of the map."""
        operands = []
        for variable, want in _operands(equation, update):
            value = self._value(variable, want)
            if want.how is _Result.SUM and update.divisor != 1:
                value = value / update.divisor
            operands.append(self._constrain(value, want.spec))
        mesh = self._mesh.mesh
        compute = constrain_function(update, mesh.axis_names, mesh)
        results = zip(compute(operands), update.values, strict=True)
        values = [self._constrain(value, spec) for value, spec in results]
        self._global |= zip(equation.outvars, values, strict=True)

    def _constrain(self, value: Array, spec: Spec) -> Array:
        is_placed = isinstance(spec, Placed)
        sharding = spec.sharding if is_placed else self._mesh.whole
        return jax.lax.with_sharding_constraint(value, sharding)


def _operands(equation: JaxprEqn, update: Update) -> list[tuple[Any, _Want]]:
    """Returns an update's operands as pairs (variable, `_Want`)."""
    wants = [_Want(_Result.VALUE, replicated_spec())] * update.num_captured
    for reduction in update.gradients:
        if reduction == MAX:
            wants.append(_Want(_Result.MAX, replicated_spec()))
        else:
            wants.append(_Want(_Result.SUM, reduction))
    wants += [_Want(_Result.VALUE, spec) for spec in update.values]
    return list(zip(equation.invars, wants, strict=True))


def _manual(spec: Spec) -> PartitionSpec:
    return spec.spec if isinstance(spec, Placed) else spec

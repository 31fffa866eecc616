"""Calls a function on replicas that have different numbers of rows.

All replicas run one program, which has a branch for each number of rows; a
branch runs on exactly its rows. `passes/replay.py` explains collectives
in branches.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from keras_strategies._types import Array, Tree
from keras_strategies.passes import collective_cut, stages
from keras_strategies.passes import replay as replay_lib
from keras_strategies.passes.specs import Axis
from keras_strategies.passes.value_numbers import ValueNumbers
from keras_strategies.spmd.replica_map import replica_id
from keras_strategies.spmd.values import pad_to
from keras_strategies.step.ragged import variants as variants_lib
from keras_strategies.step.ragged.variants import Variant
from keras_strategies.tape.expansion import expand_tapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class BranchResult:
    """The result of the function in one branch, and what its trace showed.

    Attributes:
      outputs: The results that are arrays.
      new: The variables' values after the call.
      start: The values from which the variables' changes are computed.
      structure: The structure of the results, and what else is needed to
        rebuild them, such as results that are not arrays.
      is_changed: For each variable, whether the call wrote it.
      is_equal: For each variable, whether its new value is equal on all
        replicas.
      rules: For each variable, the merge rule if it belongs to a metric;
        otherwise None.
      is_unaggregated: For each variable, whether the replicas must write the
        same value, because the variable has no aggregation.
      is_alike: For each new value, whether all replicas compute it with the
        same code from values that are equal on all replicas.
    """

    outputs: list[Any]
    new: list[Any]
    start: list[Any]
    structure: Any
    is_changed: list[bool]
    is_equal: list[bool]
    rules: list[str | None]
    is_unaggregated: list[bool]
    is_alike: list[bool] = dataclasses.field(default_factory=list)


def call_ragged(
    call: Callable[[list[Any], list[Any]], BranchResult],
    rows: Sequence[Variant],
    is_ragged: list[bool],
    axis: Axis,
    state: list[Any],
    leaves: list[Any],
    are_local: list[bool],
    check: Callable[[Jaxpr, int], None] = lambda jaxpr, num_results: None,
) -> tuple[BranchResult, list[BranchResult], list[list[tuple[int, ...]]]]:
    """Calls a function on each replica's rows, whose number may differ.

    Collectives must be outside of branches, so the function is computed in
    stages. A stage ends before a collective that needs the result of one that
    follows the stage. Each output is computed in the earliest stage, and again
    in a later stage that needs it.
    Code that is the same in all variants (an optimizer's update) is outside of
    the branches, so that the compiler cannot round it differently.

    Args:
      call: The function, called with the state and the arguments.
      rows: Each replica's variant: the row counts of its uneven arguments.
      is_ragged: Whether each argument is uneven.
      axis: The replica axis.
      state: The values of variables.
      leaves: The arguments. Uneven ones are padded: (1, rows, ...).
      are_local: For each value of the state, and then for each argument,
        whether it may differ between the replicas.
      check: Checks the program of a variant with rows, given the number of
        its last inputs that are results of collectives.

    Returns:
      The result, with outputs padded to one shape; the result in each variant's
      trace; and the true shapes of each replica's outputs.

    Raises:
      ValueError: if the replicas' functions do not call the same collectives
        or return the same structure.
    """
    variants = variants_lib.find_variants(rows)
    places = [variants.index(variant) for variant in rows]
    index = jnp.array(places)[replica_id(axis)]

    def trace(variant: Variant, reduces: list[replay_lib.Reduce]) -> _Trace:
        return _Trace(call, variant, is_ragged, (state, leaves), reduces)

    traces = _trace_to_the_end(trace, variants, places)
    collectives = _cut_traces(traces)
    staged = _Stages(traces, are_local)
    for traced in [t for t in traces if not t.is_empty]:
        check(traced.jaxpr.jaxpr, staged.num_results)
    known: list[list[Any]] = []
    for place, collective in enumerate(collectives):
        if any(operand is None for operand in staged.operands(place)):
            staged.compute(index, (state, leaves, known))
        operands = staged.operands(place)
        known.append(collective_cut.reduce(collective, operands))
    staged.compute(index, (state, leaves, known))
    shapes = [[leaf.shape for leaf in trace.shapes[1]] for trace in traces]
    branches = [trace.called for trace in traces]
    return staged.results(), branches, [shapes[place] for place in places]


def _trace_to_the_end(
    trace: Callable[[Variant, list[replay_lib.Reduce]], "_Trace"],
    variants: list[Variant],
    places: list[int],
) -> list["_Trace"]:
    """Traces all variants repeatedly, until every collective is known.

    The shape of a collective's result may depend on the operands in all
    variants, so each trace ends at the first unknown collective.

    Args:
      trace: Traces a variant with the known collectives.
      variants: The distinct variants.
      places: For each replica, the index of its variant in `variants`.
    """
    reduces: list[replay_lib.Reduce] = []
    while True:
        traces = [trace(variant, reduces) for variant in variants]
        _check_alike(traces)
        reached = [t.reached for t in traces if t.reached is not None]
        if not reached:
            return traces
        operands = [r.shapes for r in reached]
        reduces.append(_adapt_shapes(reached[0].reduce, operands, places))


class _Trace:
    """A variant's trace, complete or up to an unknown collective.

    Args:
      call: The function; see `call_ragged`.
      variant: The numbers of rows.
      is_ragged: Whether each argument is uneven.
      inputs: The values of variables, and the arguments.
      known: The collectives that earlier traces of all variants reached.

    Attributes:
      reached: The unknown collective where the trace ended, or None.
      called: The result, if the trace did not end there.
      jaxpr: The program. Its inputs are the state, the arguments and, once the
        program is cut, the collectives' results. Its outputs are then the
        collectives' operands, and `outputs`, `new` and `start` of the
        `BranchResult`.
      shapes: The shapes of the program's outputs, in their structure.
    """

    def __init__(
        self,
        call: Callable[[list[Any], list[Any]], BranchResult],
        variant: Variant,
        is_ragged: list[bool],
        inputs: tuple[list[Any], list[Any]],
        known: list[replay_lib.Reduce],
    ) -> None:
        self.shapes: Any
        self.reached: replay_lib.Reached | None = None
        self.called: Any = None
        self.cut: Any = None
        self.is_empty = not any(variant)

        def trace(state: list[Any], leaves: list[Any]) -> tuple[Any, ...]:
            rows = variants_lib.cut_to_rows(variant, is_ragged, leaves)
            replay = replay_lib.Replay(known)
            try:
                with replay_lib.replay_scope(replay):
                    called = call(state, rows)
                replay.check_not_swallowed()
            except replay_lib.Reached as reached:
                self.reached = reached
                return [], [], [], []
            self.called = called
            return [], called.outputs, called.new, called.start

        traced = jax.make_jaxpr(trace, return_shape=True)(*inputs)
        self.jaxpr, self.shapes = expand_tapes(traced[0]), traced[1]

    def cut_at_collectives(self) -> list[Any]:
        """Turns collectives' results into inputs; returns the collectives."""
        self._use(collective_cut.cut_at_collectives(self.jaxpr))
        return self.cut.collectives

    def meet_as(self, other: "_Trace") -> list[Any]:
        """Adds the collectives of `other` that a variant without rows lacks."""
        if self.is_empty and len(self.cut.collectives) < len(
            other.cut.collectives
        ):
            cut = collective_cut.add_collectives(self.cut, other.cut)
            if cut is not None:
                self._use(cut)
        return self.cut.collectives

    def _use(self, cut: collective_cut.Cut) -> None:
        self.cut, self.jaxpr = cut, cut.jaxpr
        self.shapes = (cut.operands, *self.shapes[1:])


def _cut_traces(traces: list[_Trace]) -> list[Any]:
    """Cuts the variants' programs at their common collectives."""
    last = max(traces, key=lambda trace: len(trace.cut_at_collectives()))
    collectives = [trace.meet_as(last) for trace in traces]
    kinds = [
        ([e.primitive.name for e in found], trace.cut.operands)
        for found, trace in zip(collectives, traces, strict=True)
    ]
    if any(kind != kinds[0] for kind in kinds):
        _refuse()
    return collectives[0]


class _Stages:
    """The variants' computations, divided into stages at the collectives.

    Args:
      traces: The variants' complete traces.
      are_local: See `call_ragged`.
    """

    def __init__(self, traces: list[_Trace], are_local: list[bool]) -> None:
        self._traces = traces
        self._expected = traces[0].cut.results
        self._inputs = [0] * len(are_local)
        for stage, results in enumerate(self._expected, 1):
            self._inputs += [stage] * len(results)
        per_trace = [
            stages.find_output_stages(t.jaxpr.jaxpr, self._inputs)
            for t in traces
        ]
        self._stages = list(map(max, zip(*per_trace, strict=True)))
        if any(stages.has_answers(t.jaxpr.jaxpr) for t in traces):
            # Python callbacks are called again in each stage. So all outputs
            # except operands use the calls of one stage, the last one.
            last = [len(self._expected)] * len(self._stages)
            operands = jax.tree.leaves(traces[0].shapes[0])
            last[: len(operands)] = self._stages[: len(operands)]
            self._stages = last
        numbers = ValueNumbers()
        per_trace = [numbers.number_outputs(trace.jaxpr) for trace in traces]
        columns = zip(*per_trace, strict=True)
        self._are_common = [len(set(column)) == 1 for column in columns]
        self.num_results = len(self._inputs) - len(are_local)
        are_local = are_local + [False] * self.num_results
        differ = stages.find_differing_outputs(traces[0].jaxpr.jaxpr, are_local)
        self._are_alike = [
            is_common and not differs
            for is_common, differs in zip(self._are_common, differ, strict=True)
        ]
        # For each output, a shape that fits all variants.
        self._shapes = _find_largest(
            [jax.tree.leaves(t.shapes) for t in traces]
        )
        self._values: dict[int, Any] = {}
        self._next = 0

    def compute(self, index: Array, inputs: tuple[Any, Any, list[Any]]) -> None:
        """Computes the next stage.

        Args:
          index: This replica's variant, a traced integer.
          inputs: The values of variables, the arguments, and the results of the
            collectives so far.
        """
        new = range(self._next, len(inputs[2]) + 1)
        self._next = new.stop
        now = [k for k, stage in enumerate(self._stages) if stage in new]
        common = [k for k in now if self._are_common[k]]
        others = [k for k in now if not self._are_common[k]]
        shared = stages.select_outputs(self._traces[0].jaxpr, common)
        values = self._make_branch(shared, common)(*inputs)
        self._values.update(zip(common, values, strict=True))
        parts = []
        for trace in self._traces:
            acting = stages.find_effects(trace.jaxpr.jaxpr, self._inputs, new)
            parts.append(stages.select_outputs(trace.jaxpr, others, acting))
        if not any(part.jaxpr.eqns or others for part in parts):
            return
        branches = [self._make_branch(part, others) for part in parts]
        values = jax.lax.switch(index, branches, *inputs)
        self._values.update(zip(others, values, strict=True))

    def _make_branch(
        self, part: ClosedJaxpr, places: list[int]
    ) -> Callable[..., list[Any]]:
        def branch(state: Tree, leaves: Tree, known: Tree) -> list[Any]:
            # This stage does not use the results of later collectives.
            unknown = jax.tree.map(
                lambda shape: jnp.zeros(shape.shape, shape.dtype),
                self._expected[len(known) :],
            )
            inputs = jax.tree.leaves((state, leaves, known, unknown))
            return [
                _pad(value, self._shapes[k])
                for k, value in zip(
                    places, jaxpr_as_fun(part)(*inputs), strict=True
                )
            ]

        return branch

    def operands(self, collective: int) -> list[Any]:
        """Returns this replica's operands of a collective, padded, or None."""
        return self._unflatten(self._values)[0][collective]

    def results(self) -> BranchResult:
        """Returns the result that all stages computed."""
        _, outputs, new, start = self._unflatten(self._values)
        alike = self._unflatten(dict(enumerate(self._are_alike)))[2]
        values = {"outputs": outputs, "new": new, "start": start}
        first = self._traces[0].called
        return dataclasses.replace(first, **values, is_alike=alike)

    def _unflatten(self, values: dict[int, Any]) -> Tree:
        structure = jax.tree.structure(self._traces[0].shapes)
        every = [values.get(k) for k in range(len(self._stages))]
        return jax.tree.unflatten(structure, every)


def _find_largest(
    columns: Sequence[list[jax.ShapeDtypeStruct]],
) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes to which all variants' arrays can be padded."""
    return [
        jax.ShapeDtypeStruct(
            tuple(map(max, zip(*[s.shape for s in column], strict=True))),
            column[0].dtype,
        )
        for column in zip(*columns, strict=True)
    ]


def _adapt_shapes(
    reduce: replay_lib.Reduce,
    operands: list[list[jax.ShapeDtypeStruct]],
    places: list[int],
) -> replay_lib.Reduce:
    """Adapts a collective to operands whose shapes differ by variant.

    Raises:
      ValueError: if the collective needs equal shapes.
    """
    shapes = [[leaf.shape for leaf in variant] for variant in operands]
    if all(s == shapes[0] for s in shapes):
        return reduce
    if isinstance(reduce, replay_lib.Concatenation):
        sizes = reduce.find_sizes([shapes[k][0] for k in places])
        return replay_lib.ragged_concatenation(reduce.axis, reduce.dim, sizes)
    raise ValueError(
        "A value given to a collective must have the same shape on all "
        f"replicas. Received: shapes {shapes}, because the replicas have "
        "different numbers of rows. Reduce over the rows first, or drop "
        "incomplete batches (`drop_remainder=True`)."
    )


def _pad(array: Array, to: jax.ShapeDtypeStruct) -> jax.Array:
    # The value of a literal may be a Python number.
    array = jnp.asarray(array, to.dtype)
    return array if array.shape == to.shape else pad_to(array, to.shape)


def _check_alike(traces: list[_Trace]) -> None:
    kinds = set()
    for trace in traces:
        reached = trace.reached
        shapes = trace.shapes[1] if reached is None else reached.shapes
        ranks = [(len(s.shape), s.dtype) for s in jax.tree.leaves(shapes)]
        kinds.add((reached is None, *ranks))
    if len(kinds) > 1:
        _refuse()


def _refuse() -> NoReturn:
    raise ValueError(
        "All replicas must call the same collectives in the same order, "
        "and return results of the same structure. This function's collectives "
        "or results depend on the number of rows. Make them "
        "the same, or drop incomplete batches (`drop_remainder=True`)."
    )

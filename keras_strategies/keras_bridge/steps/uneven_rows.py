"""A replica function whose replicas hold different numbers of rows.

One program: a switch over the different numbers, each branch on exactly its
rows; see `_core/jaxprs/replay.py` for the collectives in it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from keras_strategies._core.jaxprs import collective_cut, stages
from keras_strategies._core.jaxprs import replay as replay_lib
from keras_strategies._core.jaxprs.replay import Reduce
from keras_strategies._core.jaxprs.specs import Axis
from keras_strategies._core.jaxprs.value_numbers import ValueNumbers
from keras_strategies._core.replica_map import replica_id
from keras_strategies._core.values import padded
from keras_strategies._types import Array, Tree
from keras_strategies.keras_bridge.steps.variants import (
    Variant,
    variants_of,
    with_rows,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Called:
    """What one branch computed.

    Attributes:
      outputs: The results that are arrays.
      new: The variables' values after it.
      start: What the change of each is counted from.
      note: Anything that is known when the branch is traced.
      is_alike: Whether each new value was computed by the code that all
        replicas run, from values that are equal on all.
    """

    outputs: list[Any]
    new: list[Any]
    start: list[Any]
    note: Any
    is_alike: list[bool] = dataclasses.field(default_factory=list)


def call_unevenly(
    call: Callable[[list[Any], list[Any]], Called],
    rows: Sequence[Variant],
    is_uneven: list[bool],
    axis: Axis,
    state: list[Any],
    leaves: list[Any],
    are_own: list[bool],
) -> tuple[Called, list[Any], list[list[tuple[int, ...]]]]:
    """Calls a function on each replica's own rows.

    A stage is what can be computed from the results of so many collectives,
    and each output is computed in the first stage that it can be; what a later
    one needs besides is computed again. What all variants compute by the same
    code (an optimizer's update, from reduced gradients) is computed outside of
    the branches, so that the compiler cannot round it in different ways.

    Args:
      call: The function, of the state and the arguments.
      rows: Each replica's numbers of rows, of the uneven arguments.
      is_uneven: Which arguments are.
      axis: The replica axis.
      state: The values of variables.
      leaves: The arguments; uneven ones padded, (1, rows, ...).
      are_own: Whether each value of the state, and then each argument, may
        differ between the replicas.

    Returns:
      What was computed, outputs padded to one shape; the notes of all
      variants; and the true shapes of each replica's outputs.

    Raises:
      ValueError: the replicas' functions do not call the same collectives
        or return the same structure.
    """
    variants = variants_of(rows)
    places = [variants.index(of_replica) for of_replica in rows]
    index = jnp.array(places)[replica_id(axis)]

    def trace(variant: Variant, reduces: list[Reduce]) -> _Trace:
        return _Trace(call, variant, is_uneven, (state, leaves), reduces)

    traces = _traced_to_the_end(trace, variants, places)
    collectives = _cut(traces)
    staged = _Stages(traces, (state, leaves), are_own)
    known: list[list[Any]] = []
    for collective in [*collectives, None]:
        staged.compute(index, (state, leaves, known))
        if collective is not None:
            operands = staged.operands(len(known))
            known.append(collective_cut.reduce(collective, operands))
    called = staged.results()
    shapes = [[leaf.shape for leaf in trace.shapes[1]] for trace in traces]
    notes = [trace.called.note for trace in traces]
    return called, notes, [shapes[place] for place in places]


def _traced_to_the_end(
    trace: Callable[[Variant, list[Reduce]], "_Trace"],
    variants: list[Variant],
    places: list[int],
) -> list["_Trace"]:
    """Traces the variants until they reach no collective that is not known.

    Args:
      trace: Traces one, of the collectives that all have reached before.
      variants: The different numbers of rows.
      places: Each replica's variant, by its place.
    """
    reduces: list[Reduce] = []
    while True:
        traces = [trace(variant, reduces) for variant in variants]
        _check_alike(traces)
        reached = [t.reached for t in traces if t.reached is not None]
        if not reached:
            return traces
        operands = [r.shapes for r in reached]
        reduces.append(_of_shapes(reached[0].reduce, operands, places))


class _Trace:
    """A variant's trace, to its end or to a collective that is not known.

    Args:
      call: The function; see `call_unevenly`.
      variant: The numbers of rows.
      is_uneven: Which arguments are uneven.
      inputs: The values of variables, and the arguments.
      known: The collectives that all variants have reached before.

    Attributes:
      reached: The collective that it ended at, or None.
      called: What was computed, if it did not.
      jaxpr: The program: of the state and the arguments, and once it is cut
        of the collectives' results; its outputs are the collectives' operands
        then, and the results' arrays, the new values and those that changes
        are counted from.
      shapes: The outputs' shapes, in the same structure.
    """

    def __init__(
        self,
        call: Callable[[list[Any], list[Any]], Called],
        variant: Variant,
        is_uneven: list[bool],
        inputs: tuple[list[Any], list[Any]],
        known: list[Reduce],
    ) -> None:
        self.shapes: Any
        self.reached: replay_lib.Reached | None = None
        self.called: Any = None
        self.cut: Any = None
        self.is_empty = not any(variant)

        def traced(state: list[Any], leaves: list[Any]) -> tuple[Any, ...]:
            own = with_rows(variant, is_uneven, leaves)
            replay = replay_lib.Replay(known)
            try:
                with replay_lib.replay_scope(replay):
                    called = call(state, own)
                replay.check_not_swallowed()
            except replay_lib.Reached as reached:
                self.reached = reached
                return [], [], [], []
            self.called = called
            return [], called.outputs, called.new, called.start

        tracing = jax.make_jaxpr(traced, return_shape=True)
        self.jaxpr, self.shapes = tracing(*inputs)

    def cut_at_collectives(self) -> list[Any]:
        """Makes the collectives' results inputs; returns the collectives."""
        self._use(collective_cut.cut_at_collectives(self.jaxpr))
        return self.cut.collectives

    def meet_as(self, other: "_Trace") -> list[Any]:
        """Meets at another's collectives, too, where this one has no rows."""
        if self.is_empty and len(self.cut.collectives) < len(
            other.cut.collectives
        ):
            found = collective_cut.meeting_as(self.cut, other.cut)
            if found is not None:
                self._use(found)
        return self.cut.collectives

    def _use(self, cut: collective_cut.Cut) -> None:
        self.cut, self.jaxpr = cut, cut.jaxpr
        self.shapes = (cut.operands, *self.shapes[1:])


def _cut(traces: list[_Trace]) -> list[Any]:
    """Cuts the variants' programs at the collectives that all of them have."""
    most = max(traces, key=lambda trace: len(trace.cut_at_collectives()))
    first, *others = [trace.meet_as(most) for trace in traces]
    operands = [trace.cut.operands for trace in traces]
    is_alike = all(
        [e.primitive.name for e in other] == [e.primitive.name for e in first]
        for other in others
    )
    if not is_alike or any(shapes != operands[0] for shapes in operands):
        _refuse()
    return first


class _Stages:
    """What the variants compute, in stages.

    Args:
      traces: The variants' whole traces.
      inputs: Their inputs.
      are_own: See `call_unevenly`.
    """

    def __init__(
        self,
        traces: list[_Trace],
        inputs: tuple[list[Any], list[Any]],
        are_own: list[bool],
    ) -> None:
        self._traces = traces
        state, leaves = inputs
        self._expected = traces[0].cut.results
        self._inputs = [0] * len(jax.tree.leaves((state, leaves)))
        for stage, results in enumerate(self._expected, 1):
            self._inputs += [stage] * len(results)
        of_each = [
            stages.outputs_waiting(t.jaxpr.jaxpr, self._inputs) for t in traces
        ]
        self._stages = list(map(max, zip(*of_each, strict=True)))
        if any(stages.has_answers(t.jaxpr.jaxpr) for t in traces):
            # Asked again in each stage: one answer in all outputs.
            last = [len(self._expected)] * len(self._stages)
            operands = jax.tree.leaves(traces[0].shapes[0])
            last[: len(operands)] = self._stages[: len(operands)]
            self._stages = last
        numbers = ValueNumbers()
        of_each = [numbers.of_outputs(trace.jaxpr) for trace in traces]
        columns = zip(*of_each, strict=True)
        self._are_common = [len(set(column)) == 1 for column in columns]
        own = are_own + [False] * (len(self._inputs) - len(are_own))
        differ = stages.outputs_differing(traces[0].jaxpr.jaxpr, own)
        self._are_alike = [
            is_common and not differs
            for is_common, differs in zip(self._are_common, differ, strict=True)
        ]
        # Of the outputs, by place; one shape of all variants.
        self._shapes = _largest([jax.tree.leaves(t.shapes) for t in traces])
        self._values: dict[int, Any] = {}

    def compute(self, index: Array, given: tuple[Any, Any, list[Any]]) -> None:
        """Computes the next stage.

        Args:
          index: This replica's variant, a traced integer.
          given: The values of variables, the arguments, and the results of
            the collectives so far.
        """
        stage = len(given[2])
        now = [k for k, s in enumerate(self._stages) if s == stage]
        common = [k for k in now if self._are_common[k]]
        others = [k for k in now if not self._are_common[k]]
        shared = stages.part(self._traces[0].jaxpr, common)
        values = self._branch(shared, common)(*given)
        self._values.update(zip(common, values, strict=True))
        parts = []
        for trace in self._traces:
            acting = stages.acting(trace.jaxpr.jaxpr, self._inputs, stage)
            parts.append(stages.part(trace.jaxpr, others, acting))
        if not any(part.jaxpr.eqns or others for part in parts):
            return
        branches = [self._branch(part, others) for part in parts]
        values = jax.lax.switch(index, branches, *given)
        self._values.update(zip(others, values, strict=True))

    def _branch(
        self, part: ClosedJaxpr, places: list[int]
    ) -> Callable[..., list[Any]]:
        def branch(state: Tree, leaves: Tree, known: Tree) -> list[Any]:
            # What is wanted does not depend on the others.
            unknown = jax.tree.map(
                lambda shape: jnp.zeros(shape.shape, shape.dtype),
                self._expected[len(known) :],
            )
            given = jax.tree.leaves((state, leaves, known, unknown))
            return [
                _padded(value, self._shapes[k])
                for k, value in zip(
                    places, jaxpr_as_fun(part)(*given), strict=True
                )
            ]

        return branch

    def operands(self, collective: int) -> list[Any]:
        """This replica's arrays for a collective, padded to one shape."""
        return self._structured(self._values)[0][collective]

    def results(self) -> Called:
        """Returns what was computed in all stages, without a note."""
        _, outputs, new, start = self._structured(self._values)
        are_alike = self._structured(dict(enumerate(self._are_alike)))
        return Called(
            outputs=outputs,
            new=new,
            start=start,
            note=None,
            is_alike=are_alike[2],
        )

    def _structured(self, values: dict[int, Any]) -> Tree:
        structure = jax.tree.structure(self._traces[0].shapes)
        every = [values.get(k) for k in range(len(self._stages))]
        return jax.tree.unflatten(structure, every)


def _largest(
    columns: Sequence[list[jax.ShapeDtypeStruct]],
) -> list[jax.ShapeDtypeStruct]:
    """The shapes into which each variant's arrays can be padded."""
    return [
        jax.ShapeDtypeStruct(
            tuple(map(max, zip(*[s.shape for s in column], strict=True))),
            column[0].dtype,
        )
        for column in zip(*columns, strict=True)
    ]


def _of_shapes(
    reduce: Reduce,
    operands: list[list[jax.ShapeDtypeStruct]],
    places: list[int],
) -> Reduce:
    """A collective for operands of each variant's shapes.

    Raises:
      ValueError: it takes operands of one shape, and they differ.
    """
    shapes = [[leaf.shape for leaf in variant] for variant in operands]
    if all(s == shapes[0] for s in shapes):
        return reduce
    if isinstance(reduce, replay_lib.Concatenation):
        whole = reduce.of_shapes([shapes[k][0] for k in places])
        return replay_lib.uneven_concatenation(
            whole.axis, whole.dim, whole.sizes or ()
        )
    raise ValueError(
        "A collective's value must have one shape on all replicas. "
        f"Received: shapes {shapes} in a step or a function "
        "with an uneven batch. Reduce over the rows first, or make "
        "the batch even (`drop_remainder`)."
    )


def _padded(array: Array, most: jax.ShapeDtypeStruct) -> jax.Array:
    # A number's type is one of Python's where it is a literal.
    array = jnp.asarray(array, most.dtype)
    return array if array.shape == most.shape else padded(array, most.shape)


def _check_alike(traces: list[_Trace]) -> None:
    kinds = {trace.reached is None for trace in traces}
    ranks = {
        tuple(
            (len(leaf.shape), leaf.dtype)
            for leaf in (
                trace.reached.shapes
                if trace.reached is not None
                else jax.tree.leaves(trace.shapes[1])
            )
        )
        for trace in traces
    }
    if len(kinds) > 1 or len(ranks) > 1:
        _refuse()


def _refuse() -> NoReturn:
    raise ValueError(
        "All replicas must call the same collectives in the same order, "
        "and return results of one structure. Received: a function that does "
        "something else for another number of rows. Make the batch even "
        "(`drop_remainder`), or treat all alike."
    )

"""A user's function as one compiled program over the replicas.

The variables it reads and writes are found by one abstract trace; the written
ones are donated and come back merged. Its results are one array over all
replicas each.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

from keras_strategies._core.dispatch import dispatch
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.replica_map import (
    all_max,
    all_min,
    replica_id,
    replica_map,
    split_spec,
    whole_spec,
)
from keras_strategies._core.step_context import StepContext, step_scope
from keras_strategies._core.values import STACKED, PerReplica
from keras_strategies.keras_bridge import state as state_lib
from keras_strategies.keras_bridge.creation import deferred
from keras_strategies.keras_bridge.lifting import (
    LiftingScope,
    scopes_ask_outwards,
)
from keras_strategies.keras_bridge.run_results import (
    Constant,
    Note,
    constant_of,
)
from keras_strategies.keras_bridge.trace_hooks import trace_hooks
from keras_strategies.keras_bridge.uneven import Called, call_unevenly

ReplicaScope = Callable[[StepContext], contextlib.AbstractContextManager[Any]]


class RunProgram:
    """One function for one structure, shapes and dtypes of arguments.

    Args:
      fn: `fn(leaves) -> results`: the user's function of the arguments that
        are arrays, one component each.
      is_split: For each of them, whether it is split over the replicas (else
        every replica gets it whole).
      rows: For each of them None, or each replica's number of rows, where
        they differ: the array is padded to the most.
      mesh: The replicas.
      replica_scope: Makes a replica context of a step for a block.
    """

    def __init__(
        self,
        fn: Callable[[list[Any]], Any],
        is_split: list[bool],
        rows: list[tuple[int, ...] | None],
        *,
        mesh: ReplicaMesh,
        replica_scope: ReplicaScope,
    ) -> None:
        self._fn = fn
        self._mesh = mesh
        self._replica_scope = replica_scope
        self._specs = [
            split_spec(mesh) if split else whole_spec() for split in is_split
        ]
        self._is_uneven = [counts is not None for counts in rows]
        # Each replica's numbers of rows, of all uneven arguments.
        self._variant_of = list(
            zip(*[counts for counts in rows if counts is not None], strict=True)
        )
        self._unchecked: list[int] = []
        self._same: list[Any] | None = None
        self._shapes: list[list[tuple[int, ...]]] | None = None
        self._lifted: list[keras.Variable] = []
        self._written: list[int] = []
        self._structure: Any = None
        self._trainable: list[bool] = []
        self._read: list[int] = []
        self._constants: list[Any] = []
        self._program: Any = None
        self.num_traces = 0

    def prepare(self, leaves: list[Any]) -> None:
        """Finds the variables and builds the program; runs nothing.

        To be called in the strategy's scope: the function may create
        variables.
        """
        scope = LiftingScope()
        step = self._step()

        def abstract(*components: Any) -> Any:
            own = self._rows_of(self._variant_of[:1], list(components))
            with self._tracing(step):
                self._fn(own)
            return jnp.zeros((1,))

        mapped = replica_map(
            abstract,
            self._mesh,
            in_specs=tuple(self._specs),
            out_specs=split_spec(self._mesh),
        )
        with deferred(), scope:
            jax.eval_shape(mapped, *leaves)
        self._lifted = list(scope.variables.values())
        self._trainable = [v.trainable for v in self._lifted]
        self._written = [
            i for i, v in enumerate(self._lifted) if id(v) in scope.written
        ]
        read = [i for i in range(len(self._lifted)) if i not in self._written]
        self._read = read
        program = replica_map(
            self._body,
            self._mesh,
            in_specs=(whole_spec(), whole_spec(), self._specs),
            out_specs=(split_spec(self._mesh), whole_spec()),
        )
        self._program = jax.jit(program, donate_argnums=0)

    @property
    def is_current(self) -> bool:
        """Whether the variables are as they were when it was traced."""
        return self._trainable == [v.trainable for v in self._lifted]

    @property
    def lifted(self) -> list[keras.Variable]:
        """The variables that the function reads or writes."""
        return self._lifted

    def __call__(self, leaves: list[Any], last: state_lib.Made) -> Any:
        """Runs the function once on every replica.

        Args:
          leaves: The arguments that are arrays.
          last: By the id of a variable, the array that a program returned
            for it last; brought up to date.
        """
        written = [self._lifted[i] for i in self._written]
        read = [self._lifted[i] for i in self._read]
        taken = [v._value for v in written]
        shared = [v._value for v in read]
        made = {
            id(value): last[id(v)]
            for v, value in zip(written, taken, strict=True)
            if id(v) in last
        }
        state_lib.own(taken, written, (), made, self._mesh.whole, donate=True)
        state_lib.own(shared, read, (), made, self._mesh.whole, donate=False)
        self._check_last()
        (arrays, is_same), new = dispatch(
            self._mesh, self._program, taken, shared, leaves
        )
        for variable, value in zip(written, new, strict=True):
            variable._value = value
            last[id(variable)] = weakref.ref(value)
        is_first, self._same = self._same is None, is_same
        if is_first:
            # Later ones are checked at the next call: no one waits for them.
            self._check_last()
        return self._results(arrays)

    def _check_last(self) -> None:
        """Raises ValueError if replicas wrote a variable differently."""
        for k, same in zip(self._unchecked, self._same or (), strict=False):
            if bool(np.asarray(same)[0]):
                continue
            variable = self._lifted[(*self._written, *self._read)[k]]
            self._same = []
            raise ValueError(
                "The replicas wrote different values to a variable that has "
                "no aggregation, and their copies may not differ. Received: "
                f"{variable.path!r} with aggregation='none' (it now holds "
                "a mean of them, or replica 0's integer). Create it with "
                'aggregation="sum", "mean" or "only_first_replica".'
            )

    def _results(self, arrays: list[Any]) -> Any:
        wrapped = map(self._wrapped, range(len(arrays)), arrays)
        leaves = [
            constant.value if isinstance(constant, Constant) else next(wrapped)
            for constant in self._constants
        ]
        return jax.tree.unflatten(self._structure, leaves)

    def _wrapped(self, position: int, array: Any) -> Any:
        if self._mesh.num_replicas == 1:
            return array[0]
        value = PerReplica.of(array, STACKED)
        if self._shapes is None:
            return value
        shapes = [of_replica[position] for of_replica in self._shapes]
        if len(set(shapes)) == 1:
            return value
        return PerReplica(
            [
                part[tuple(map(slice, shape))]
                for part, shape in zip(value.values, shapes, strict=True)
            ]
        )

    def _step(self) -> StepContext:
        return StepContext(
            mesh=self._mesh, rows=1, is_whole=True, is_local=True
        )

    @contextlib.contextmanager
    def _tracing(self, step: StepContext) -> Iterator[None]:
        with (
            trace_hooks(),
            scopes_ask_outwards(),
            step_scope(step),
            self._replica_scope(step),
        ):
            yield

    def _body(
        self, written: list[Any], read: list[Any], leaves: list[Any]
    ) -> Any:
        self.num_traces += 1
        step = self._step()
        variables, old = self._ordered(written, read)
        folded = state_lib.fold_seeds(variables, old, step)
        if not self._variant_of:
            called = self._call(variables, folded, leaves)
            notes = [called.note]
        else:
            called, notes = self._call_unevenly(variables, folded, leaves)
        self._structure, self._constants = notes[0].structure
        new = list(called.new)
        start = list(called.start)
        for k, variable in enumerate(variables):
            if not any(note.is_changed[k] for note in notes):
                new[k], start[k] = folded[k], old[k]
            elif notes[0].rules[k] is None:
                start[k] = old[k]
            if all(note.is_equal[k] for note in notes):
                step.equal[id(new[k])] = new[k]
            if notes[0].rules[k] is not None:
                step.metric_rules[id(variable)] = notes[0].rules[k]
        self._unchecked = [
            k
            for k in range(len(variables))
            if any(note.is_unaggregated[k] for note in notes)
        ]
        is_same = [self._is_same(new[k]) for k in self._unchecked]
        merged = self._merged(step, variables, start, folded, new)
        outputs = [output[None] for output in called.outputs]
        return (outputs, [same[None] for same in is_same]), merged

    def _is_same(self, value: Any) -> Any:
        """Whether all replicas have one value; NaN equals itself."""
        axis = self._mesh.axis
        is_nan = value != value
        number = jnp.where(is_nan, jnp.zeros_like(value), value)
        number = number.astype("int32") if number.dtype == bool else number
        highest, lowest = all_max(number, axis), all_min(number, axis)
        nans = is_nan.astype("int32")
        same_nans = all_max(nans, axis) == all_min(nans, axis)
        return jnp.all((highest == lowest) & same_nans)

    def _call(
        self,
        variables: list[keras.Variable],
        folded: list[Any],
        leaves: list[Any],
    ) -> Called:
        """The function on one replica's arguments."""
        step = self._step()
        step.before = {
            id(v): value for v, value in zip(variables, folded, strict=True)
        }
        scope = keras.StatelessScope(
            state_mapping=list(zip(variables, folded, strict=True)),
            initialize_variables=False,
        )
        with self._tracing(step), scope:
            results = self._fn(leaves)
        new = [scope.get_current_value(v) for v in variables]
        results, structure = jax.tree.flatten(
            results, is_leaf=lambda leaf: leaf is None
        )
        constants = [constant_of(leaf) for leaf in results]
        start = [step.before[id(v)] for v in variables]
        return Called(
            outputs=[
                jnp.asarray(leaf)
                for leaf, constant in zip(results, constants, strict=True)
                if constant is None
            ],
            new=new,
            start=start,
            note=Note(
                structure=(structure, constants),
                is_changed=[
                    n is not f or s is not f
                    for n, f, s in zip(new, folded, start, strict=True)
                ],
                is_equal=[id(n) in step.equal for n in new],
                rules=[step.metric_rules.get(id(v)) for v in variables],
                is_unaggregated=[id(v) in step.unaggregated for v in variables],
            ),
        )

    def _call_unevenly(
        self,
        variables: list[keras.Variable],
        folded: list[Any],
        leaves: list[Any],
    ) -> tuple[Called, list[Any]]:
        variants = sorted(set(self._variant_of), reverse=True)
        table = jnp.array([variants.index(v) for v in self._variant_of])
        called, notes, shapes = call_unevenly(
            lambda state, own: self._call(variables, state, own),
            variants,
            self._is_uneven,
            table[replica_id(self._mesh.axis)],
            folded,
            leaves,
        )
        self._shapes = [shapes[variants.index(v)] for v in self._variant_of]
        return called, notes

    def _rows_of(self, variants: list[Any], leaves: list[Any]) -> list[Any]:
        """The arguments with the rows of one variant, if there is one."""
        if not variants:
            return leaves
        rows = iter(variants[0])
        return [
            leaf[:, : next(rows)] if uneven else leaf
            for leaf, uneven in zip(leaves, self._is_uneven, strict=True)
        ]

    def _ordered(
        self, written: list[Any], read: list[Any]
    ) -> tuple[list[keras.Variable], list[Any]]:
        order = (*self._written, *self._read)
        return [self._lifted[i] for i in order], [*written, *read]

    def _merged(
        self,
        step: StepContext,
        variables: list[keras.Variable],
        start: list[Any],
        folded: list[Any],
        new: list[Any],
    ) -> list[Any]:
        """The written variables' values, those of all replicas."""
        plan = state_lib.Merge(step=step)
        finishers = [
            state_lib.plan_merge(
                plan,
                [v],
                [s],
                [f],
                [n],
                are_metrics=id(v) in step.metric_rules,
            )
            for v, s, f, n in zip(variables, start, folded, new, strict=True)
        ]
        sums = plan.sums()
        merged = [finish(sums)[0] for finish in finishers]
        return merged[: len(self._written)]

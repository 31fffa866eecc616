"""The train, test and predict functions that `fit` and similar methods call."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies._types import Batch, Tree
from keras_strategies.fit.inputs import feed
from keras_strategies.keras_bridge import keras_names
from keras_strategies.keras_bridge.ported_code import explain_error
from keras_strategies.keras_bridge.step_context import ReplicaScope
from keras_strategies.names.phases import EVALUATE, INPUT, Phase
from keras_strategies.spmd.batches import (
    Execution,
    Segment,
    cut_padding,
    unstack_steps,
)
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.step.in_place_step import (
    find_other_variables,
    make_stateless,
    write_others,
)
from keras_strategies.step.model_call import ModelCall
from keras_strategies.step.model_program import WRITTEN
from keras_strategies.step.predict_program import PredictProgram
from keras_strategies.step.state.array_groups import (
    find_layout,
    find_model_holders,
    get_arrays,
    refuse_changed,
    regroup,
    wrap_groups,
)
from keras_strategies.step.state.layout import OPTIMIZER, PLAIN, Layout
from keras_strategies.step.train_program import StepProgram
from keras_strategies.variables import model_variables
from keras_strategies.variables.host_memory import to_device

StepFunction = Callable[[Any, Iterator[Any]], tuple[Any, Any]]
Program = Callable[[Any, Segment], Iterator[tuple[Any, Any]]]

_OF_MODEL = ("trainable_variables", "non_trainable_variables")
_GROUPS = {
    "train": (*_OF_MODEL, "optimizer_variables", "metrics_variables"),
    "test": (*_OF_MODEL, "metrics_variables"),
    "predict": _OF_MODEL,
}
"""For each kind of step, the groups of variables that form its state."""

PROGRAMS: dict[str, Any] = {
    "train": StepProgram,
    "test": StepProgram,
    "predict": PredictProgram,
}
"""For each kind of step, the class of its programs."""


@dataclasses.dataclass(kw_only=True)
class Trained:
    """Counts of a model's train steps and rows so far.

    Attributes:
      steps: The number of train steps.
      rows: The number of rows in these steps, over all processes and without
        padding.
    """

    steps: int = 0
    rows: int = 0

    def add(self, execution: Execution) -> None:
        """Adds the steps and rows of one call of a train function."""
        for segment in execution.segments:
            self.steps += segment.steps
            self.rows += segment.steps * segment.rows


class StepFunctionCache:
    """The step functions of one model, created when they are first used.

    Args:
      model: A compiled or plain Keras model.
      mesh: The mesh of the replicas.
      keeps_outputs: Whether `predict` returns its outputs in this process.
      replica_scope: Makes the context manager of a step's replica context.

    Attributes:
      trained: The counts of train steps and rows.
      places: For each kind of step, the place in its feed after the last
        execution.
      are_read_together: Whether the processes read variables only together, so
        that train steps may store them in another form.
    """

    def __init__(
        self,
        model: keras.Model,
        mesh: ReplicaMesh,
        *,
        keeps_outputs: bool,
        replica_scope: ReplicaScope,
    ) -> None:
        self.replica_scope = replica_scope
        self.trained = Trained()
        self.model = model
        self._keeps_outputs = keeps_outputs
        self.mesh = mesh
        self.are_read_together = False
        self._keys: dict[str, Any] = {}
        self._made: dict[str, dict[bool, StepFunction]] = {}
        # The state that the last step of each kind returned. If the next step
        # receives this same state, no check is needed.
        self._last: dict[str, Any] = {}
        # The arrays that steps returned in earlier calls of `fit` and similar
        # methods.
        self._arrays: model_variables.Owned = {}
        self.places: dict[str, tuple[int, int] | None] = {}
        model_variables.note_devices(mesh)
        model_variables.models_in_loops.add(model)

    def makers(self) -> dict[str, Callable[..., StepFunction]]:
        """Returns replacements for methods such as `make_train_function`."""
        return {
            f"make_{kind}_function": functools.partial(self._make, kind)
            for kind in _GROUPS
        }

    def forget(self, kind: str) -> None:
        """Drops references to the last step's arrays; called when `fit` ends.

        Args:
          kind: `"train"`, `"test"` or `"predict"`.
        """
        last = get_arrays(self._last.pop(kind, ()))
        self._arrays = model_variables.update_owned(self._arrays, last)

    def reset(self) -> None:
        """Discards all step functions, so that they are compiled again."""
        self._last.clear()
        self._keys.clear()
        for kind in _GROUPS:
            setattr(self.model, f"{kind}_function", None)

    def _make(self, kind: str, force: bool = False) -> StepFunction:
        """Makes a kind's step function if needed, and sets it on the model."""
        model = self.model
        name = f"{kind}_function"
        variables = step_variables(model, kind)
        # A layer's `trainable` determines to which groups its variables belong.
        key = (
            tuple(tuple(map(id, group)) for group in variables),
            model.run_eagerly,
            model.jit_compile,
        )
        is_known = self._keys.get(kind) == key
        if getattr(model, name) is None or not is_known or force:
            self._keys[kind], self._made[kind] = key, {}
        made = self._made[kind]
        layout = PLAIN
        if kind == "train" and self.are_read_together:
            layout = find_layout(model, variables, self.mesh)
        is_other = layout is not PLAIN
        if is_other not in made:
            made[is_other] = self._make_function(kind, variables, layout)
        setattr(model, name, made[is_other])
        return made[is_other]

    def _make_function(
        self,
        kind: str,
        variables: tuple[Any, ...],
        layout: Layout,
    ) -> StepFunction:
        model, mesh, groups = self.model, self.mesh, _GROUPS[kind]
        program = self._make_program(kind, variables, layout)
        donated = () if model.run_eagerly else WRITTEN[kind]
        flags = [(v, v.trainable) for v in (*variables[0], *variables[1])]
        others = find_other_variables(model, kind)

        def function(
            state: Sequence[Any], iterator: Iterator[Any]
        ) -> tuple[Any, Any]:
            outputs: Any = None
            done: list[Any] = []
            changed = [v for v, flag in flags if v.trainable is not flag]
            try:
                if changed:
                    now = step_variables(model, kind)
                    state = regroup(state, variables, now)
                    refuse_changed(changed[0])
                with Phase(INPUT if kind == "train" else EVALUATE) as phase:
                    execution = phase.result = _read_execution(
                        iterator, mesh, model.steps_per_execution
                    )
                args = kind, state, variables, others, donated
                state = self._take_ownership(*args)
                for segment in execution.segments:
                    for new in program(state, segment):
                        outputs, state = new
                    done.append(outputs)
                self.places[kind] = execution.place
            except BaseException as error:
                # Keras has taken the values out of the variables and would
                # lose them. Its `jax_state_sync` reads them from here.
                write_others(state, variables, others)
                kept = wrap_groups(state, layout)
                model._jax_state = dict(zip(groups, kept, strict=True))
                model._jax_state_synced = False
                explain_error(error, f"{kind}_step")
                raise
            if kind == "train":
                self.trained.add(execution)
            write_others(state, variables, others)
            state = wrap_groups(state, layout)
            self._last[kind] = state
            outputs = done[-1] if done else execution.logs
            if kind == "predict" and len(done) > 1:
                outputs = _concatenate(done)
            if kind == "predict" and not self._keeps_outputs:
                outputs = jax.tree.map(lambda a: np.asarray(a)[:0], outputs)
            return outputs, state

        return function

    def _take_ownership(
        self,
        kind: str,
        state: Sequence[Any],
        variables: tuple[Any, ...],
        others: Sequence[keras.Variable],
        donated: Container[int],
    ) -> Sequence[Any]:
        """Returns a state whose arrays a program can donate.

        An array to be donated is replaced by a copy, in the lists of `state`,
        if anything else refers to it. Keras does not know of `others`, so
        these are read each time.
        """
        last = self._last.pop(kind, None)
        unchecked: Sequence[int] = range(len(state))
        if state is last:
            state = tuple(list(group.arrays) for group in last)
            if not others:
                return state
            unchecked = [OPTIMIZER]
        if others:
            own = len(variables[OPTIMIZER]) - len(others)
            state[OPTIMIZER][own:] = [v._value for v in others]
        owned = None if model_variables.has_rivals(self.mesh) else self._arrays
        holders = find_model_holders(self.model, _GROUPS[kind], last)
        for g in unchecked:
            model_variables.take_ownership(
                state[g],
                variables[g],
                [holder[g] for holder in holders],
                owned,
                self.mesh,
                donate=g in donated,
            )
        return state

    def _make_program(
        self,
        kind: str,
        variables: tuple[Any, ...],
        layout: Layout,
    ) -> Program:
        model, mesh = self.model, self.mesh
        if model.run_eagerly:
            return self._make_eager(kind, variables)
        # With the default, `jit_compile="auto"`, Keras sets False because of
        # layers such as RandomZoom. The user cannot change these.
        can_jit = (layer.supports_jit for layer in model._flatten_layers())
        if not model.jit_compile and all(can_jit):
            warnings.warn(
                "`jit_compile=False` has no effect on distributed steps, "
                "because they are always compiled. Use `run_eagerly=True` to "
                "debug.",
                UserWarning,
                stacklevel=2,
            )
        scope = self.replica_scope
        return PROGRAMS[kind](model, mesh, kind, variables, scope, layout)

    def _make_eager(self, kind: str, variables: tuple[Any, ...]) -> Program:
        step, mesh = make_stateless(self.model, kind, variables), self.mesh
        model_call = ModelCall(
            step, mesh, self.replica_scope, is_predict=kind == "predict"
        )

        def run(
            state: Sequence[Any], segment: Segment
        ) -> Iterator[tuple[Any, Any]]:
            data = cut_padding(_replicate(segment.data, mesh), segment.shape)
            state = list(map(to_device, state, variables))
            steps, done = segment.steps, []
            for batch in [data] if steps == 1 else unstack_steps(data, steps):
                outputs, state = model_call.on_global_batch(
                    state, batch, "`run_eagerly=True`"
                )
                done.append(outputs)
            outputs = _concatenate(done) if kind == "predict" else done[-1]
            yield outputs, state

        return run


def step_variables(
    model: keras.Model, kind: str
) -> tuple[list[keras.Variable], ...]:
    """Returns the groups of variables that form the state of a step."""

    def group(name: str) -> list[keras.Variable]:
        if name != "optimizer_variables":
            return list(getattr(model, name))
        own = list(model.optimizer.variables) if model.optimizer else []
        return [*own, *find_other_variables(model, kind)]

    return tuple(map(group, _GROUPS[kind]))


def _read_execution(
    iterator: Iterator[Any], mesh: ReplicaMesh, num_steps: int
) -> Execution:
    """Reads the next execution from a feed, or builds it from batches.

    Args:
      iterator: An iterator of a feed; or, if a patch of `keras.Model.fit` or a
        method of the model's class calls Keras's `fit` with other data, an
        iterator of batches.
      mesh: The mesh of the replicas.
      num_steps: The number of batches in an execution.
    """
    data = next(iterator)
    if isinstance(data, tuple) and data and isinstance(data[0], Execution):
        data = data[0]
    if isinstance(data, Execution):
        return data
    batches = keras_names.take_execution(iterator, data, num_steps)
    placed = [feed.place_batch(batch, mesh) for batch in batches]
    segments = tuple(part for each in placed for part in each.segments)
    return dataclasses.replace(placed[0], segments=segments)


def _replicate(data: Batch, mesh: ReplicaMesh) -> Batch:
    """Replicates arrays on every device."""
    if mesh.num_processes == 1:
        return jax.device_put(data, mesh.whole)
    return jax.jit(lambda value: value, out_shardings=mesh.whole)(data)


def _concatenate(outputs: list[Any]) -> Tree:
    return jax.tree.map(
        lambda *parts: np.concatenate([np.asarray(p) for p in parts]), *outputs
    )

"""The train, test and predict functions that Keras's loops call."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies._core.batches import (
    Execution,
    Segment,
    true_rows,
    unstacked,
)
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._types import Batch, Tree
from keras_strategies.keras_bridge import keras_names
from keras_strategies.keras_bridge.inputs import feed
from keras_strategies.keras_bridge.step_context import ReplicaScope
from keras_strategies.keras_bridge.steps.mapped_program import (
    global_batch_trace,
    needing_no_replica,
)
from keras_strategies.keras_bridge.steps.predict_program import PredictProgram
from keras_strategies.keras_bridge.steps.train_program import StepProgram
from keras_strategies.keras_bridge.variables import deferred_creation, ownership

StepFunction = Callable[[Any, Iterator[Any]], tuple[Any, Any]]
Program = Callable[[Any, Segment], Iterator[tuple[Any, Any]]]

_OF_MODEL = ("trainable_variables", "non_trainable_variables")
_GROUPS = {
    "train": (*_OF_MODEL, "optimizer_variables", "metrics_variables"),
    "test": (*_OF_MODEL, "metrics_variables"),
    "predict": _OF_MODEL,
}
"""Which groups of variables are the state of a kind of step."""

_DONATED = {"train": (0, 1, 2, 3), "test": (2,), "predict": ()}


@dataclasses.dataclass(kw_only=True)
class Trained:
    """What train steps have done with a model so far.

    Attributes:
      steps: Number of train steps.
      rows: Number of rows that they trained on, of all processes and without
        padding.
    """

    steps: int = 0
    rows: int = 0

    def add(self, execution: Execution) -> None:
        """Counts what one call of a train function has done."""
        for segment in execution.segments:
            self.steps += segment.steps
            self.rows += segment.steps * segment.rows


class Values(Sequence[Any]):
    """A group's arrays as Keras's loop holds them.

    Keras stores the state on the model after every step and would wrap each
    entry of a list to track it, which costs more than a small step.
    """

    def __init__(self, arrays: Sequence[Any]) -> None:
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays)

    def __getitem__(self, index: Any) -> Any:
        return self._arrays[index]


class Functions:
    """Makes and keeps one model's step functions.

    Args:
      model: A compiled or plain Keras model.
      mesh: The replicas.
      keeps_outputs: Whether this process returns what `predict` computes.
      replica_scope: Makes a step's replica context current for a block.

    Attributes:
      trained: What the train functions have done.
      places: The place in its feed of the last execution of each kind.
    """

    def __init__(
        self,
        model: keras.Model,
        mesh: ReplicaMesh,
        *,
        keeps_outputs: bool = True,
        replica_scope: ReplicaScope | None = None,
    ) -> None:
        self.replica_scope = replica_scope
        self.trained = Trained()
        self.model = model
        self._keeps_outputs = keeps_outputs
        self.mesh = mesh
        self._keys: dict[str, Any] = {}
        # What the last step of each kind returned: passed back unchanged, it
        # needs no check.
        self._last: dict[str, Any] = {}
        # What the loops before returned, weakly and by id.
        self._made: ownership.Made = {}
        self.places: dict[str, tuple[int, int] | None] = {}
        ownership.note_devices(mesh)
        deferred_creation.models_in_loops.add(model)

    def makers(self) -> dict[str, Callable[..., StepFunction]]:
        """Returns what replaces a model's `make_train_function` and so on."""
        return {
            f"make_{kind}_function": functools.partial(self._make, kind)
            for kind in _GROUPS
        }

    def forget(self, kind: str) -> None:
        """Lets go of the last step's arrays, at the end of a loop.

        Args:
          kind: `"train"`, `"test"` or `"predict"`.
        """
        last = self._last.pop(kind, None)
        if last is not None:
            self._made = ownership.still_held(self._made, last)

    def reset(self) -> None:
        """Forgets all functions; the next use compiles anew."""
        self._last.clear()
        self._keys.clear()
        for kind in _GROUPS:
            setattr(self.model, f"{kind}_function", None)

    def _make(self, kind: str, force: bool = False) -> StepFunction:
        """Sets the model's function of a kind, and returns it."""
        model = self.model
        name = f"{kind}_function"
        variables = step_variables(model, kind)
        # `trainable` may have been flipped: then the groups are others.
        key = (
            tuple(tuple(map(id, group)) for group in variables),
            model.run_eagerly,
            model.jit_compile,
        )
        is_known = self._keys.get(kind) == key
        if getattr(model, name) is None or not is_known or force:
            self._keys[kind] = key
            setattr(model, name, self._function(kind, variables))
        return getattr(model, name)

    def _function(self, kind: str, variables: tuple[Any, ...]) -> StepFunction:
        model, mesh, groups = self.model, self.mesh, _GROUPS[kind]
        program = self._program(kind, variables)
        donated = () if model.run_eagerly else _DONATED[kind]

        def function(
            state: Sequence[Any], iterator: Iterator[Any]
        ) -> tuple[Any, Any]:
            outputs: Any = None
            done: list[Any] = []
            try:
                execution = _execution(
                    iterator, mesh, model.steps_per_execution
                )
                state = self._owned(kind, state, variables, donated)
                for segment in execution.segments:
                    for new in program(state, segment):
                        outputs, state = new
                    done.append(outputs)
                self.places[kind] = execution.place
            except BaseException:
                # Keras took the values out of the variables and would lose
                # them; this is where its `jax_state_sync` looks for them.
                model._jax_state = dict(zip(groups, state, strict=True))
                model._jax_state_synced = False
                raise
            if kind == "train":
                self.trained.add(execution)
            state = tuple(map(Values, state))
            self._last[kind] = state
            outputs = done[-1] if done else execution.logs
            if kind == "predict" and len(done) > 1:
                outputs = _concatenated(done)
            if kind == "predict" and not self._keeps_outputs:
                outputs = jax.tree.map(lambda a: np.asarray(a)[:0], outputs)
            return outputs, state

        return function

    def _owned(
        self,
        kind: str,
        state: Sequence[Any],
        variables: tuple[Any, ...],
        donated: Container[int],
    ) -> Sequence[Any]:
        """Returns a state whose donated arrays nothing else holds.

        The others are copied, in the lists of `state`.
        """
        last = self._last.pop(kind, None)
        if state is last:
            return tuple(map(list, state))
        made = None if ownership.has_rivals(self.mesh) else self._made
        holders = _holders(self.model, _GROUPS[kind], last)
        for g, group in enumerate(state):
            ownership.own(
                group,
                variables[g],
                [holder[g] for holder in holders],
                made,
                self.mesh,
                donate=g in donated,
            )
        return state

    def _program(self, kind: str, variables: tuple[Any, ...]) -> Program:
        model, mesh = self.model, self.mesh
        if model.run_eagerly:
            return self._eager(kind)
        if not model.jit_compile:
            warnings.warn(
                "`jit_compile=False` has no effect on distributed steps: "
                "they are always compiled. Use `run_eagerly=True` to debug.",
                UserWarning,
                stacklevel=2,
            )
        scope = self.replica_scope
        return make_program(model, mesh, kind, variables, scope)

    def _eager(self, kind: str) -> Program:
        step = getattr(self.model, f"{kind}_step")
        mesh = self.mesh

        def run(
            state: Sequence[Any], segment: Segment
        ) -> Iterator[tuple[Any, Any]]:
            data = true_rows(_on_all(segment.data, mesh), segment.shape)
            steps, done = segment.steps, []
            for batch in [data] if steps == 1 else unstacked(data, steps):
                with (
                    needing_no_replica("`run_eagerly=True`"),
                    global_batch_trace(mesh, self.replica_scope, step),
                ):
                    outputs, new = step(state, batch)
                state = (state[0], new) if kind == "predict" else new
                done.append(outputs)
            outputs = _concatenated(done) if kind == "predict" else done[-1]
            yield outputs, state

        return run


def make_program(
    model: keras.Model,
    mesh: ReplicaMesh,
    kind: str = "train",
    variables: tuple[list[keras.Variable], ...] | None = None,
    replica_scope: ReplicaScope | None = None,
) -> PredictProgram | StepProgram:
    """The compiled program of a built model's train, test or predict step."""
    if variables is None:
        variables = step_variables(model, kind)
    step = getattr(model, f"{kind}_step")
    return (PredictProgram if kind == "predict" else StepProgram)(
        step,
        f"{kind}_step",
        variables,
        written=_DONATED[kind],
        mesh=mesh,
        is_global=_has_fixed_batch(model),
        replica_scope=replica_scope,
    )


def _has_fixed_batch(model: keras.Model) -> bool:
    """Whether the model's state is a batch's: that of a stateful RNN."""
    layers = model._flatten_layers()
    return any(getattr(layer, "stateful", False) for layer in layers)


def step_variables(
    model: keras.Model, kind: str
) -> tuple[list[keras.Variable], ...]:
    """The groups of variables that a kind of step takes."""

    def group(name: str) -> list[keras.Variable]:
        if name != "optimizer_variables":
            return list(getattr(model, name))
        return list(model.optimizer.variables) if model.optimizer else []

    return tuple(map(group, _GROUPS[kind]))


def _holders(
    model: keras.Model, groups: tuple[str, ...], last: Sequence[Any] | None
) -> list[Any]:
    """State that hold the last step's arrays: ours and Keras's."""
    holders = [] if last is None else [last]
    kept = getattr(model, "_jax_state", None)
    if kept and all(name in kept for name in groups):
        kept = [kept[name] for name in groups]
        if last is None or kept[0] is not last[0]:
            holders.append(kept)
    return holders


def _execution(
    iterator: Iterator[Any], mesh: ReplicaMesh, num_steps: int
) -> Execution:
    """What is computed next: a feed's execution, or batches that are not ours.

    Args:
      iterator: Of a feed; or of batches, where a model's class calls Keras's
        loop with data of its own.
      mesh: The replicas.
      num_steps: How many batches an execution has.
    """
    data = next(iterator)
    if isinstance(data, tuple) and data and isinstance(data[0], Execution):
        data = data[0]
    if isinstance(data, Execution):
        return data
    batches = keras_names.batches_of_execution(iterator, data, num_steps)
    placed = [feed.place_batch(batch, mesh) for batch in batches]
    segments = tuple(part for each in placed for part in each.segments)
    return dataclasses.replace(placed[0], segments=segments)


def _on_all(data: Batch, mesh: ReplicaMesh) -> Batch:
    """The arrays whole on every device."""
    if mesh.num_processes == 1:
        return jax.device_put(data, mesh.whole)
    return jax.jit(lambda value: value, out_shardings=mesh.whole)(data)


def _concatenated(outputs: list[Any]) -> Tree:
    return jax.tree.map(
        lambda *parts: np.concatenate([np.asarray(p) for p in parts]), *outputs
    )

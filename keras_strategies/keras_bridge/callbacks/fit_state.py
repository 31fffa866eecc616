"""The state of a running fit that a checkpoint callback saves and restores.

Its steps and epochs are counted here as the list of callbacks (`resumable_fit`)
tells them.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np

from keras_strategies._types import Array, Logs
from keras_strategies.cluster.exchange.message_forms import (
    Either,
    fault_of,
    is_count,
)
from keras_strategies.cluster.exchange.rounds import Rounds
from keras_strategies.keras_bridge.callbacks import callback_states
from keras_strategies.keras_bridge.hooks.seeds import is_seed
from keras_strategies.keras_bridge.steps.step_functions import Functions

State = dict[str, Any]

_POSITION = {"epoch": is_count, "step": is_count, "seed": int | str | None}
_POSITIONS = Either((None, {"position": _POSITION}, {"positions": [_POSITION]}))
# The form of `FitState.state`, in a file too.
_STATE = {
    "epoch": is_count,
    "step": is_count,
    "num_steps": is_count,
    "is_stopped": bool,
    "logs": Either((None, dict)),
    "sizes?": dict,
    "feed": _POSITIONS,
    "validation": _POSITIONS,
    "callbacks": dict,
}


def groups_of(
    model: keras.Model, variables: Iterable[keras.Variable]
) -> dict[str, list[keras.Variable]]:
    """Returns variables by what they are for, in their order.

    Args:
      model: Their model.
      variables: Some of the model, its optimizers and metrics.
    """
    metrics = {id(v) for v in model.metrics_variables}
    own = {id(v) for v in model.variables}
    groups: dict[str, list[keras.Variable]] = {
        name: [] for name in ("weights", "seeds", "optimizer", "metrics")
    }
    for variable in variables:
        if is_seed(variable):
            name = "seeds"
        elif id(variable) in metrics:
            name = "metrics"
        else:
            name = "weights" if id(variable) in own else "optimizer"
        groups[name].append(variable)
    return groups


class FitState:
    """The state of a fit, as a checkpoint callback saves and restores it.

    Args:
      variables: All variables of the model, its optimizers and metrics.
      functions: The model's step functions.
      feed: The training data.
      call: The arguments of fit, by name; of those left out None.

    Attributes:
      model: The model.
      mesh: The replicas.
      variables: All variables of the model, its optimizers and metrics.
      epoch: The epoch under way, or that is next.
      step: How many of its steps are done.
      steps_per_epoch: How many an epoch has, if known.
      num_steps: How many are done since the first fit began.
      is_over: Whether nothing was left to do when it began.
      was_stopped: Whether that was so because a callback had ended training.
      verbose: As given to fit.
      feed: The training data.
      other_batches: What the data of a fit that went on in the middle of an
        epoch had and have, where these are other batches.
      logs: What the last step or epoch returned.
      given: What it resumes with, until it has.
      callbacks: Those of fit, without the checkpoint callback.
      settle: Waits for callbacks that run in other threads.
    """

    def __init__(
        self,
        *,
        variables: Sequence[keras.Variable],
        functions: Functions,
        feed: Any,
        call: Any,
    ) -> None:
        self.model = functions.model
        self.mesh = functions.mesh
        self.variables = variables
        self._functions = functions
        self.feed = feed
        self._validation = call["validation_data"]
        self._epochs = call["epochs"] or 1
        self.steps_per_epoch = call["steps_per_epoch"] or feed.num_batches
        self.verbose = call["verbose"]
        self.epoch = call["initial_epoch"] or 0
        self.step = 0
        self.num_steps = 0
        self._sizes = feed.sizes
        self.other_batches: str | None = None
        self.is_over = self.was_stopped = False
        self.callbacks: list[Any] = []
        self.settle: Callable[[], None] = lambda: None
        self._seen = functions.trained.steps
        self.logs: Any = None
        self.given: State | None = None

    # What is saved.

    def groups(self) -> dict[str, list[keras.Variable]]:
        """Every variable, by what it is for."""
        return groups_of(self.model, self.variables)

    def sync(self) -> None:
        """Gives the variables the values that the steps have computed."""
        self.model.jax_state_sync()

    def state(self, *, is_epoch_over: bool) -> State:
        """What else there is to keep. Collective.

        Nests of what JSON can hold and numpy arrays; the same in all
        processes, but for the callbacks', which are the chief's.
        """
        self.settle()
        return {
            "epoch": self.epoch,
            "step": self.step,
            "num_steps": self.num_steps,
            "is_stopped": bool(self.model.stop_training),
            "logs": numbers(self.logs),
            "sizes": self._sizes,
            "feed": self._positions(self.feed, is_epoch_over),
            "validation": self._positions(self._validation, True),
            "callbacks": callback_states.states_of(self.callbacks),
        }

    def _positions(
        self, feed: Any, is_epoch_over: bool
    ) -> dict[str, Any] | None:
        """Where a feed is; of data that are each process's own, of all."""
        if feed is None:
            return None
        place = self._functions.places.get("train")
        if feed is self._validation:
            # Keras makes an iterator for each validation.
            position = feed.next_position(None)
        elif is_epoch_over or place is None:
            position = feed.next_position(place)
        else:
            position = feed.position_at(place)
        if not feed.is_process_local or self.mesh.num_processes == 1:
            return {"position": position}
        about = "their positions in the data"
        with Rounds(self.mesh.processes, "keeping a position", about) as rounds:
            return {"positions": rounds.exchange(position, _POSITION)}

    # Resuming.

    def resume(self, state: State) -> None:
        """Resumes where another loop was; before it begins.

        Args:
          state: What `state` of that one returned. The variables have their
            values already.

        Raises:
          ValueError: the data are each process's own, of another number of
            processes; or it is no such state.
        """
        fault = fault_of(state, _STATE)
        if fault is not None:
            raise ValueError(
                "A fit resumes from the state that another one saved. "
                f"Received: one of which {fault}. Use an earlier checkpoint."
            )
        self.given = state
        self.epoch, self.step = state["epoch"], state["step"]
        self.num_steps = state["num_steps"]
        self.logs = state["logs"]
        self.was_stopped = state["is_stopped"]
        self.is_over = self.was_stopped or self.epoch >= self._epochs
        position = self._position_of(self.feed, state["feed"])
        if position is not None:
            self.feed.resume(position, self.step, self.logs)
            if self.step or self.feed.position["step"]:
                self.other_batches = _differing(
                    state.get("sizes", {}),
                    self._sizes,
                    is_other_kind=self.feed.is_other_kind,
                )
        position = self._position_of(self._validation, state["validation"])
        if position is not None:
            self._validation.resume(position)

    def _position_of(
        self, feed: Any, saved: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        if feed is None or saved is None:
            return None
        if "position" in saved and not (
            feed.is_process_local and self.mesh.num_processes > 1
        ):
            return saved["position"]
        positions = saved.get("positions", [saved.get("position")])
        count = self.mesh.num_processes
        if len(positions) != count or not feed.is_process_local:
            raise ValueError(
                "Where rows are each process's own, a fit resumes with as "
                "many processes as it had. Received: positions of "
                f"{len(positions)} processes, now {count}. "
                "Start as many, or give all processes the same data."
            )
        return positions[self.mesh.process_index]

    @property
    def first_epoch(self) -> int:
        """The epoch that fit begins with."""
        return max(self._epochs, self.epoch) if self.is_over else self.epoch

    @property
    def is_last_step(self) -> bool:
        """Whether the epoch's end follows, if that is known."""
        steps = self.steps_per_epoch
        return steps is not None and self.step >= steps

    @property
    def is_last_epoch(self) -> bool:
        """Whether the end follows the epoch that was done last."""
        return self.model.stop_training or self.epoch >= self._epochs

    # As the list of callbacks calls it.

    def begin_training(self) -> None:
        """Gives the callbacks their states, after they have begun."""
        if self.given is None:
            return
        callback_states.set_states(self.callbacks, self.given["callbacks"])
        if self.is_over:
            self.model.stop_training = self.was_stopped

    def begin_epoch(self, epoch: int) -> bool:
        """An epoch begins; returns whether its beginning was done before."""
        given, self.given = self.given, None
        self._seen = self._functions.trained.steps
        if given is not None and self.step:
            callback_states.set_states(self.callbacks, given["callbacks"])
            return True
        self.epoch, self.step = epoch, 0
        return False

    def count(self, logs: Logs | None) -> bool:
        """Counts what was computed; returns whether it was anything."""
        seen = self._functions.trained.steps
        new, self._seen = seen - self._seen, seen
        self.step += new
        self.num_steps += new
        if new:
            self.logs = logs
        return new > 0

    def end_epoch(self, logs: Logs | None) -> None:
        """An epoch is done."""
        self.epoch += 1
        self.step = 0
        self.logs = logs


def _differing(
    had: dict[str, Any], have: dict[str, Any], *, is_other_kind: bool
) -> str | None:
    """What is said of other batches, where it is known of both."""
    differing = ["another kind or order"] if is_other_kind else []
    differing += [
        f"{had[name]} {name}, now {count}"
        for name, count in have.items()
        if None not in (count, had.get(name)) and had[name] != count
    ]
    return "; ".join(differing) or None


def numbers(logs: Logs | None) -> dict[str, Any] | None:
    """Logs as numbers of Python: fetched from the devices."""
    if logs is None:
        return None

    def number(value: Array) -> object:
        array = np.asarray(value)
        return array.item() if array.ndim == 0 else array.tolist()

    return keras.tree.map_structure(number, dict(logs))

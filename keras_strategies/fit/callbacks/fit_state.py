"""The state of a running fit that a checkpoint callback saves and restores.

The state includes counts of steps and epochs. The list of callbacks in
`resumable_fit` calls methods of `FitState` when steps and epochs begin and end.
"""

from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np

from keras_strategies._types import Logs
from keras_strategies.cluster.exchange.message_forms import (
    Either,
    has_form,
    is_count,
)
from keras_strategies.cluster.exchange.rounds import Rounds
from keras_strategies.fit.callbacks import callback_states
from keras_strategies.hooks.seeds import is_seed
from keras_strategies.step.step_functions import StepFunctionCache
from keras_strategies.variables.model_variables import all_variables

State = dict[str, Any]

_POSITION = {"epoch": is_count, "step": is_count, "seed": int | str | None}
_POSITIONS = Either((None, {"position": _POSITION}, {"positions": [_POSITION]}))
# The form of the result of `FitState.state`, also when it is read from a file.
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


def group_variables(
    model: keras.Model, variables: Iterable[keras.Variable]
) -> dict[str, list[keras.Variable]]:
    """Groups variables by their purpose.

    Args:
      model: The model.
      variables: Variables of the model, its optimizers and its metrics.

    Returns:
      A dict with the groups "weights", "seeds", "optimizer" and "metrics".
      Within a group the variables keep their order.
    """
    metrics = {id(v) for v in model.metrics_variables}
    weights = {id(v) for v in model.variables}
    groups: dict[str, list[keras.Variable]] = {
        name: [] for name in ("weights", "seeds", "optimizer", "metrics")
    }
    for variable in variables:
        if is_seed(variable):
            name = "seeds"
        elif id(variable) in metrics:
            name = "metrics"
        else:
            name = "weights" if id(variable) in weights else "optimizer"
        groups[name].append(variable)
    return groups


class FitState:
    """The state of a fit that a checkpoint callback saves and restores.

    Args:
      functions: The model's step functions.
      feed: The training data.
      call: The call of `fit`: `call[name]` is the argument `name`, or None if
        it was not given.

    Attributes:
      model: The model.
      mesh: The mesh of the replicas.
      variables: All variables of the model, its optimizers and metrics.
      epoch: The index of the current epoch or, between epochs, of the next.
      step: The number of completed steps in that epoch.
      steps_per_epoch: The number of steps in an epoch, or None if unknown.
      num_steps: The number of steps since the beginning of the first fit.
      is_over: Whether the fit had nothing left to do when it began, because
        the saved fit had run all epochs or was stopped.
      was_stopped: Whether a callback had stopped the training of the saved
        fit.
      verbose: The `verbose` of fit.
      feed: The training data.
      other_batches: A description of how the batches differ from those of the
        saved fit. None if they do not differ, or if the fit was saved between
        epochs.
      logs: The logs of the last step or epoch.
      saved: The state to resume from, or None once it is restored.
      callbacks: The callbacks of fit, without the checkpoint callback.
      directory: The directory of the checkpoints, or None if it is unknown.
      settle: A function that waits for callbacks that run in other threads.
    """

    def __init__(
        self,
        *,
        functions: StepFunctionCache,
        feed: Any,
        call: Any,
    ) -> None:
        self.model = functions.model
        self.mesh = functions.mesh
        self.variables = all_variables(self.model)
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
        self.saved: State | None = None
        self.directory: str | None = None

    # Saving.

    def groups(self) -> dict[str, list[keras.Variable]]:
        """Returns all variables, grouped by their purpose."""
        return group_variables(self.model, self.variables)

    def state(self, *, is_epoch_over: bool) -> State:
        """Returns everything to save except the variables. Collective.

        The state consists of JSON values and NumPy arrays. It is the same in
        all processes, except that only the chief includes the states of
        callbacks that run only on the chief.
        """
        self.settle()
        return {
            "epoch": self.epoch,
            "step": self.step,
            "num_steps": self.num_steps,
            "is_stopped": bool(self.model.stop_training),
            "logs": fetch_logs(self.logs),
            "sizes": self._sizes,
            "feed": self._collect_positions(self.feed, is_epoch_over),
            "validation": self._collect_positions(self._validation, True),
            "callbacks": callback_states.collect_states(self.callbacks),
        }

    def _collect_positions(
        self, feed: Any, is_epoch_over: bool
    ) -> dict[str, Any] | None:
        """Returns a feed's position, in a dict.

        If the data are process-local, each process has a different position,
        and the result contains the positions of all processes.
        """
        if feed is None:
            return None
        place = self._functions.places.get("train")
        if feed is self._validation:
            # Keras makes a new iterator for each validation.
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
        """Resumes from the state of another fit, before this fit begins.

        Args:
          state: The result of the method `state` of the other fit. The
            variables must be restored already.

        Raises:
          ValueError: if `state` does not have the form of a saved state, or if
            it contains the positions of process-local data for another number
            of processes.
        """
        if not has_form(state, _STATE):
            raise ValueError(
                "A fit can only resume from a state that another fit saved. "
                f"Received: an invalid state of type {type(state).__name__}. "
                "Use an earlier checkpoint."
            )
        self.saved = state
        self.epoch, self.step = state["epoch"], state["step"]
        self.num_steps = state["num_steps"]
        self.logs = state["logs"]
        self.was_stopped = state["is_stopped"]
        self.is_over = self.was_stopped or self.epoch >= self._epochs
        position = self._find_position(self.feed, state["feed"])
        if position is not None:
            self.feed.resume(position, self.step, self.logs)
            if self.step or self.feed.yielded.step:
                self.other_batches = _describe_differences(
                    state.get("sizes", {}),
                    self._sizes,
                    is_other_kind=self.feed.is_other_kind,
                )
        position = self._find_position(self._validation, state["validation"])
        if position is not None:
            self._validation.resume(position)

    def _find_position(
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
                "A fit on process-local rows must resume with the same number "
                "of processes. Received: a state with the positions of "
                f"{len(positions)} processes, for {count} processes. Start "
                f"{len(positions)} processes, or pass the same data in all "
                "processes."
            )
        return positions[self.mesh.process_index]

    @property
    def first_epoch(self) -> int:
        """The `initial_epoch` for fit; past the last epoch if none is left."""
        return max(self._epochs, self.epoch) if self.is_over else self.epoch

    @property
    def is_last_step(self) -> bool:
        """Whether no steps of the epoch are left; False if unknown."""
        steps = self.steps_per_epoch
        return steps is not None and self.step >= steps

    @property
    def is_last_epoch(self) -> bool:
        """Whether no epochs are left after the last finished epoch."""
        return self.model.stop_training or self.epoch >= self._epochs

    # The methods below are called by the list of callbacks.

    def begin_training(self, saved: State) -> None:
        """Restores the callbacks' states from the state to resume from.

        This is called after the callbacks' `on_train_begin`, which resets the
        states.
        """
        callback_states.set_states(self.callbacks, saved["callbacks"])
        if self.is_over:
            self.model.stop_training = self.was_stopped

    def begin_epoch(self, epoch: int) -> bool:
        """Begins an epoch; returns whether the saved fit was in this epoch."""
        saved, self.saved = self.saved, None
        self._seen = self._functions.trained.steps
        if saved is not None and self.step:
            callback_states.set_states(self.callbacks, saved["callbacks"])
            return True
        self.epoch, self.step = epoch, 0
        return False

    def count(self, logs: Logs | None) -> bool:
        """Counts steps since the last count; returns whether any were run."""
        seen = self._functions.trained.steps
        new, self._seen = seen - self._seen, seen
        self.step += new
        self.num_steps += new
        if new:
            self.logs = logs
        return new > 0

    def end_epoch(self, logs: Logs | None) -> None:
        """Advances the counts to the next epoch."""
        self.epoch += 1
        self.step = 0
        self.logs = logs


def _describe_differences(
    had: dict[str, Any], have: dict[str, Any], *, is_other_kind: bool
) -> str | None:
    """Describes how two fits' data differ in size; None if they do not."""
    differing = ["another kind or order"] if is_other_kind else []
    differing += [
        f"{had[name]} {name}, now {count}"
        for name, count in have.items()
        if None not in (count, had.get(name)) and had[name] != count
    ]
    return "; ".join(differing) or None


def fetch_logs(logs: Logs | None) -> dict[str, Any] | None:
    """Fetches logs from the devices, and converts them to Python values."""
    if logs is None:
        return None
    return keras.tree.map_structure(
        lambda v: np.asarray(v).tolist(), dict(logs)
    )

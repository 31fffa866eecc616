"""A fit that is kept as it goes, and goes on where another one was.

Who keeps it (`Keeper`, a callback) is asked by fit before its loop begins,
and told after each step and epoch, when all other callbacks are done. The
loop is Keras's own: for the steps of its first epoch that were computed in
another process, the feed gives it executions of none, which no callback sees.
"""

import json
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.cluster.agreement import Agreement
from keras_strategies.keras_bridge import callback_states
from keras_strategies.keras_bridge.callback_lists import listens
from keras_strategies.keras_bridge.functions import Functions
from keras_strategies.keras_bridge.state import is_seed

State = dict[str, Any]

_LOOP = "_ks_loop"


class Keeper(keras.callbacks.Callback):
    """A callback that keeps what a fit needs to go on."""

    def begin(self, loop: "Loop") -> None:
        """Called before the loop; the model is built. Collective.

        May give the model and the loop the state of another one.
        """
        raise NotImplementedError

    def after_batch(self, loop: "Loop") -> None:
        """Called after a step, or the steps of one execution. Collective."""
        raise NotImplementedError

    def after_epoch(self, loop: "Loop", logs: dict[str, Any]) -> None:
        """Called after an epoch and its validation. Collective."""
        raise NotImplementedError

    def close(self, *, is_done: bool) -> None:
        """Called when the loop has ended, by an error if not `is_done`."""
        raise NotImplementedError

    def on_train_begin(self, logs: Any = None) -> None:
        """Refuses a fit that does not ask a keeper."""
        if not isinstance(getattr(self.model, _LOOP, None), Loop):
            raise RuntimeError(
                f"`{type(self).__name__}` keeps the fit of a model that a "
                "strategy distributes. Received: a model of none. Compile it "
                "in `with strategy.scope():`, on one device with "
                "`ks.OneDeviceStrategy()`."
            )


class Loop:
    """A fit, as a keeper sees it.

    Args:
      model: The model.
      mesh: The replicas.
      variables: All variables of the model, its optimizers and metrics.
      functions: Its step functions.
      feed: The training data.
      validation: The validation data, if any.
      call: The arguments of fit, by name.

    Attributes:
      epoch: The epoch under way, or that is next.
      step: How many of its steps are done.
      steps_per_epoch: How many an epoch has, if known.
      num_steps: How many are done since the first fit began.
      is_over: Whether nothing was left to do when it began.
      verbose: As given to fit.
      callbacks: Those of fit, without the keeper.
      settle: Waits for callbacks that run in other threads.
    """

    def __init__(
        self,
        *,
        model: keras.Model,
        mesh: ReplicaMesh,
        variables: list[keras.Variable],
        functions: Functions,
        feed: Any,
        validation: Any,
        call: Callable[[str], Any],
    ) -> None:
        self.model = model
        self.mesh = mesh
        self._variables = variables
        self._functions = functions
        self._feed = feed
        self._validation = validation
        self._epochs = call("epochs") or 1
        self.steps_per_epoch = call("steps_per_epoch") or feed.num_batches
        self.verbose = call("verbose")
        self.epoch = call("initial_epoch") or 0
        self.step = 0
        self.num_steps = 0
        self.is_over = False
        self.callbacks: list[Any] = []
        self.settle: Callable[[], None] = lambda: None
        self._seen = functions.num_steps["train"]
        self._logs: Any = None
        self._given: State | None = None

    # What is kept.

    def groups(self) -> dict[str, list[keras.Variable]]:
        """Every variable, by what it is for; in the order of the model."""
        model = self.model
        metrics = {id(v) for v in model.metrics_variables}
        own = {id(v) for v in model.variables}
        groups: dict[str, list[keras.Variable]] = {
            name: [] for name in ("weights", "seeds", "optimizer", "metrics")
        }
        for variable in self._variables:
            if is_seed(variable):
                name = "seeds"
            elif id(variable) in metrics:
                name = "metrics"
            else:
                name = "weights" if id(variable) in own else "optimizer"
            groups[name].append(variable)
        return groups

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
            "logs": _numbers(self._logs),
            "feed": self._positions("train", is_epoch_over),
            "validation": self._positions("test", True),
            "callbacks": callback_states.states_of(self.callbacks),
        }

    def _positions(self, kind: str, is_epoch_over: bool) -> Any:
        """Where a feed is; of data that are each process's own, of all."""
        feed = self._feed if kind == "train" else self._validation
        if feed is None:
            return None
        place = self._functions.places.get(kind)
        if is_epoch_over or place is None:
            position = feed.next_position(place)
        else:
            position = feed.position_at(place)
        if not feed.is_own or self.mesh.num_processes == 1:
            return {"position": position}
        agreement = Agreement(self.mesh.processes, "keeping a position")
        heard = agreement.exchange(json.dumps(position))
        agreement.end()
        return {"positions": [json.loads(text) for text in heard]}

    # Going on.

    def go_on(self, state: State) -> None:
        """Goes on where another loop was; before it begins.

        Args:
          state: What `state` of that one returned. The variables have their
            values already.

        Raises:
          ValueError: the data are each process's own, of another number of
            processes.
        """
        self._given = state
        self.epoch, self.step = state["epoch"], state["step"]
        self.num_steps = state["num_steps"]
        self._logs = state["logs"]
        self.is_over = state["is_stopped"] or self.epoch >= self._epochs
        position = self._position_of(self._feed, state["feed"])
        if position is not None:
            self._feed.go_on(position, self.step, self._logs)
        position = self._position_of(self._validation, state["validation"])
        if position is not None:
            self._validation.go_on(position)

    def _position_of(self, feed: Any, kept: Any) -> Any:
        if feed is None or kept is None:
            return None
        if "position" in kept and not (
            feed.is_own and self.mesh.num_processes > 1
        ):
            return kept["position"]
        positions = kept.get("positions", [kept.get("position")])
        if len(positions) != self.mesh.num_processes or not feed.is_own:
            raise ValueError(
                "Where rows are each process's own, a fit goes on with as "
                "many processes as it had. Received: positions of "
                f"{len(positions)} processes, now {self.mesh.num_processes}. "
                "Start as many, or give all processes the same data."
            )
        return positions[self.mesh.process_index]

    @property
    def first_epoch(self) -> int:
        """What fit is told to begin with."""
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

    # As the list of callbacks tells it.

    def begin_training(self) -> None:
        """Gives the callbacks their states, after they have begun."""
        if self._given is None:
            return
        callback_states.set_states(self.callbacks, self._given["callbacks"])
        if self.is_over:
            self.model.stop_training = self._given["is_stopped"]

    def begin_epoch(self, epoch: int) -> bool:
        """An epoch begins; returns whether its beginning was done before."""
        is_begun = self._given is not None and self.step > 0
        if is_begun:
            assert self._given is not None
            callback_states.set_states(self.callbacks, self._given["callbacks"])
        else:
            self.epoch, self.step = epoch, 0
        self._given = None
        self._seen = self._functions.num_steps["train"]
        return is_begun

    def count(self, logs: Any) -> bool:
        """Counts what was computed; returns whether it was anything."""
        seen = self._functions.num_steps["train"]
        new, self._seen = seen - self._seen, seen
        self.step += new
        self.num_steps += new
        if new:
            self._logs = logs
        return new > 0

    def end_epoch(self, logs: Any) -> None:
        """An epoch is done."""
        self.epoch += 1
        self.step = 0
        self._logs = logs

    def last_logs(self) -> Any:
        """What the last epoch returned, of a loop that is over already."""
        return self._logs


class KeptList(keras.callbacks.CallbackList):
    """A fit's callbacks, and the keeper after all of them.

    Args:
      loop: The loop.
      keeper: One of the callbacks.
      callbacks: As given to fit.
      verbose: As given to fit.
      **params: What callbacks are told of the fit.
    """

    def __init__(
        self,
        loop: Loop,
        keeper: Keeper,
        callbacks: Any,
        *,
        verbose: Any,
        **params: Any,
    ) -> None:
        self._loop = loop
        self._keeper = keeper
        self._is_first = True
        self._values = [(v, v.value) for v in loop._variables]
        others = [c for c in keras.tree.flatten(callbacks) if c is not keeper]
        self._is_quiet = verbose == 0 and not any(map(listens, others))
        super().__init__(
            callbacks,
            add_history=True,
            add_progbar=verbose != 0,
            model=loop.model,
            verbose=verbose,
            **params,
        )
        loop.callbacks = [c for c in self.callbacks if c is not keeper]
        loop.settle = self._flush_futures

    def _restore(self) -> None:
        """Sets variables again that callbacks, or Keras, have set."""
        for variable, value in self._values:
            if variable.value is not value:
                variable.assign(value)

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins; who goes on has what it had then."""
        loop = self._loop
        given = loop._given
        opened = (
            callback_states.go_on_writing(loop.callbacks, given["callbacks"])
            if given is not None
            else []
        )
        super().on_train_begin(logs)
        for callback, append in opened:
            callback.append = append
        if given is None:
            self._values = []
            return
        loop.begin_training()
        self._restore()
        if loop.step == 0:
            self._values = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins an epoch; of one that is begun already nothing changes."""
        super().on_epoch_begin(epoch, logs)
        if self._loop.begin_epoch(epoch):
            self._restore()
        self._values = []

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Begins a step, if it was not computed before."""
        loop = self._loop
        if self._is_first and loop.step:
            per = loop.model.steps_per_execution
            if batch < loop.step // per * per:
                return
        self._is_first = False
        super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Ends a step; the keeper is last."""
        if not self._loop.count(logs):
            return
        if not self._is_quiet:
            super().on_train_batch_end(batch, logs)
        self._keeper.after_batch(self._loop)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Ends an epoch; the keeper is last."""
        super().on_epoch_end(epoch, logs)
        self._loop.end_epoch(logs)
        self._keeper.after_epoch(self._loop, _numbers(logs) or {})

    def on_train_end(self, logs: Any = None) -> None:
        """Ends; also a loop that had nothing left to do."""
        super().on_train_end(logs or self._loop.last_logs())


def keep(loop: Loop, keeper: Keeper, call: Any) -> Any:
    """Runs a fit that a callback keeps.

    Args:
      loop: The loop.
      keeper: The callback.
      call: The call of fit, with `set` and `run`.

    Returns:
      What fit returns.
    """
    object.__setattr__(loop.model, _LOOP, loop)
    is_done = False
    try:
        keeper.begin(loop)
        callbacks = KeptList(
            loop,
            keeper,
            call["callbacks"],
            verbose=call["verbose"],
            epochs=call["epochs"],
            steps=loop.steps_per_epoch,
        )
        call.set(initial_epoch=loop.first_epoch, callbacks=callbacks)
        history = call.run()
        is_done = True
        return history
    finally:
        vars(loop.model).pop(_LOOP, None)
        keeper.close(is_done=is_done)


def loop_of(model: Any) -> Loop | None:
    """The fit of a model that a keeper keeps, while it is under way."""
    return vars(model).get(_LOOP)


def keeper_among(callbacks: Any) -> Keeper | None:
    """The keeper among the callbacks given to fit, if there is one.

    Raises:
      ValueError: there are two, or one beside `BackupAndRestore`.
    """
    given = keras.tree.flatten(callbacks) if callbacks else []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        given = callbacks.callbacks
    keepers = [c for c in given if isinstance(c, Keeper)]
    if not keepers:
        return None
    rivals = [
        type(c).__name__
        for c in given
        if isinstance(c, Keeper | keras.callbacks.BackupAndRestore)
    ]
    if len(rivals) > 1:
        raise ValueError(
            "One callback decides where a fit goes on. Received: "
            f"{', '.join(rivals)}. Leave all out but one."
        )
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise ValueError(
            f"`{type(keepers[0]).__name__}` comes after all other callbacks. "
            "Received: a `CallbackList`, which has an order of its own. Pass "
            "fit a list."
        )
    return keepers[0]


def _numbers(logs: Any) -> Any:
    """Logs as numbers of Python: fetched from the devices."""
    if logs is None:
        return None

    def number(value: Any) -> Any:
        array = np.asarray(value)
        return array.item() if array.ndim == 0 else array.tolist()

    return keras.tree.map_structure(number, dict(logs))

"""Counts the train steps of a model and measures the training speed."""

import math
import weakref

import keras

from keras_strategies.fit.binding import Binding, find_binding
from keras_strategies.step.step_functions import Trained
from keras_strategies.variables.model_variables import (
    count_optimizer_steps,
)

STEPS = "global_step/sec"
"""The tag of train steps per second, the same as in TensorFlow."""

ROWS = "examples/sec"
"""The tag of rows per second."""


class GlobalStep:
    """A counter of the train steps of a model that a strategy distributes.

    Args:
      start: The number of steps trained before counting starts. None to read
        the step count from the optimizer of the first model that is followed.
    """

    def __init__(self, start: int | None = None) -> None:
        self._start = start
        self._counts = Trained()
        self._base = 0
        self._model: weakref.ref[keras.Model] | None = None

    @property
    def value(self) -> int:
        """The number of completed train steps."""
        if self._start is None:
            return 0
        return self._start + self._counts.steps - self._base

    @property
    def rows(self) -> int:
        """A running count of rows trained on.

        Only differences between two counts are meaningful.
        """
        return self._counts.rows

    def set(self, step: int) -> None:
        """Sets the number of completed steps, to resume from it."""
        self._start, self._base = step, self._counts.steps

    def follow(self, model: keras.Model, name: str) -> Binding:
        """Counts the steps of the given model from now on.

        If a different model was followed before, `settle` determines the
        number of steps to start from.

        Args:
          model: The model.
          name: The name of the callback, for errors.

        Returns:
          The model's binding to its strategy.

        Raises:
          RuntimeError: if no strategy distributes the model.
        """
        binding = find_binding(model)
        if binding is None:
            raise RuntimeError(
                f"`{name}` can only follow a model that a strategy "
                f"distributes. Received: {model.name!r}, which was compiled "
                "outside a strategy's scope. Compile it in `with "
                "ks.MirroredStrategy().scope():`, which also works with one "
                "device."
            )
        if self._model is not None and self._model() is not model:
            self._start = None
        counts = binding.trained
        if counts is not self._counts:
            # The counter and the count to subtract from it change together, so
            # that `value` stays the same.
            step = self.value
            self._counts, self._base = counts, counts.steps
            if self._start is not None:
                self._start = step
        self._model = weakref.ref(model)
        return binding

    def settle(self, model: keras.Model) -> None:
        """Starts from the optimizer's step count, unless a start was given."""
        if self._start is None:
            self.set(count_optimizer_steps(model))


class Every:
    """A schedule that is due every n-th step and measures the training speed.

    The speed is measured from one due step to the next.

    Args:
      period: Number of steps between due steps; 0 if no step is ever due.

    Attributes:
      period: Number of steps between due steps; 0 if no step is ever due.
      due: The next step that is due; infinity if no further step is due.
    """

    def __init__(self, period: int) -> None:
        self.period = period
        self.due = math.inf
        self._done = 0
        self._mark: tuple[float, int, int] | None = None
        self._left_out = 0.0

    def begin(self, step: int, *, is_on: bool = True) -> None:
        """Starts the schedule: the first due step comes after `step`.

        Args:
          step: The last step that has already been handled.
          is_on: Whether steps become due; False switches the schedule off.
        """
        period = self.period if is_on else 0
        self._done = step
        self.due = (step // period + 1) * period if period else math.inf

    def is_due(self, step: int, *, is_last: bool = False) -> bool:
        """Returns whether the next due step has been reached.

        Args:
          step: The current step.
          is_last: Whether this is the last step. The last step is due too,
            unless it was already handled or the schedule is off.
        """
        return step >= self.due or (
            is_last and self.due < math.inf and step > self._done
        )

    def start(self, now: float, step: int, rows: int) -> None:
        """Starts measuring the speed.

        Args:
          now: The current time, in seconds.
          step: The number of steps completed.
          rows: The number of rows trained on.
        """
        self._mark, self._left_out = (now, step, rows), 0.0

    def leave_out(self, seconds: float) -> None:
        """Excludes from the speed a time that was not spent on training."""
        self._left_out += seconds

    def take(self, now: float, step: int, rows: int) -> dict[str, float]:
        """Marks a step as handled, and returns the speed since the last one.

        Args:
          now: The current time, in seconds.
          step: The current step.
          rows: The number of rows trained on.

        Returns:
          A dict with the steps per second (`STEPS`) and the rows per second
          (`ROWS`) since the previous measurement. It is empty if no step or no
          time has passed.
        """
        self.begin(step)
        before, left_out = self._mark, self._left_out
        self.start(now, step, rows)
        if before is None or step <= before[1] or now - before[0] <= left_out:
            return {}
        seconds = now - before[0] - left_out
        return {
            STEPS: (step - before[1]) / seconds,
            ROWS: (rows - before[2]) / seconds,
        }

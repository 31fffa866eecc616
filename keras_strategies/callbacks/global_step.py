"""The global step of a callback's model, and its speed."""

import math
import weakref

import keras

from keras_strategies.keras_bridge.loops.binding import find_binding
from keras_strategies.keras_bridge.steps.step_functions import Trained
from keras_strategies.keras_bridge.variables.optimizer_values import (
    count_optimizer_steps,
)

STEPS = "global_step/sec"
"""The tag of train steps a second, which is tf's."""

ROWS = "examples/sec"
"""The tag of rows a second."""


class GlobalStep:
    """The number of train steps of the model that it follows.

    For a model of a strategy, the steps that its train functions have run are
    counted; for a plain model, the batches that Keras numbers.

    Args:
      start: The number of earlier steps; None for the number that the first
        model's optimizer has counted.
    """

    def __init__(self, start: int | None = None) -> None:
        self._start = start
        self._numbered = self._counts = Trained()
        self._base = self._epoch_base = 0
        self._model: weakref.ref[keras.Model] | None = None

    @property
    def value(self) -> int:
        """The number of train steps done."""
        if self._start is None:
            return 0
        return self._start + self._counts.steps - self._base

    @property
    def is_numbered(self) -> bool:
        """Whether `note_batch` must be called for the model's batches."""
        return self._counts is self._numbered

    @property
    def rows(self) -> int | None:
        """The rows trained on since an arbitrary time; None if unknown."""
        return None if self.is_numbered else self._counts.rows

    def set(self, step: int) -> None:
        """Sets the number of steps, to resume from it."""
        self._start, self._base = step, self._counts.steps

    def follow(self, model: keras.Model) -> None:
        """Counts the steps of a model from now on.

        If another model was followed before, `settle` sets the start.
        """
        if self._model is not None and self._model() is not model:
            self._start, self._numbered = None, Trained()
        binding = find_binding(model)
        counts = self._numbered if binding is None else binding.trained
        if counts is not self._counts:
            # The base moves with the counter, so that `value` stays the same.
            step = self.value
            self._counts, self._base = counts, counts.steps
            if self._start is not None:
                self._start = step
        self._model = weakref.ref(model)

    def settle(self, model: keras.Model) -> None:
        """Starts from the optimizer's step count, if no start is known."""
        if self._start is None:
            self.set(count_optimizer_steps(model))

    def begin_epoch(self) -> None:
        """Notes that Keras numbers its batches from 0 again."""
        self._epoch_base = self._numbered.steps

    def note_batch(self, batch: int, steps: int | None) -> None:
        """Notes the progress within an epoch.

        Args:
          batch: Keras's number of the execution's last batch. It exceeds the
            epoch's steps if `steps_per_execution` does not divide them.
          steps: The number of steps of the epoch, if known.
        """
        done = min(batch + 1, steps or batch + 1)
        self._numbered.steps = self._epoch_base + done


class Every:
    """A schedule of every n-th step, which measures the speed between them.

    Args:
      period: Number of steps from one to the next; 0 for an empty schedule.

    Attributes:
      period: The argument.
      due: The next step of the schedule; infinite if it is empty or off.
    """

    def __init__(self, period: int) -> None:
        self.period = period
        self.due = math.inf
        self._done = 0
        self._mark: tuple[float, int, int | None] | None = None
        self._left_out = 0.0

    def begin(self, step: int, *, is_on: bool = True) -> None:
        """Starts the schedule after a step.

        Args:
          step: The last step that has been handled.
          is_on: Whether any step may become due.
        """
        period = self.period if is_on else 0
        self._done = step
        self.due = (step // period + 1) * period if period else math.inf

    def is_due(self, step: int, *, is_last: bool = False) -> bool:
        """Returns whether a step is the due one, or after it.

        Args:
          step: The step.
          is_last: Whether no step follows, which makes it due.
        """
        return step >= self.due or (
            is_last and self.due < math.inf and step > self._done
        )

    def start(self, now: float, step: int, rows: int | None) -> None:
        """Starts the measurement of the speed.

        Args:
          now: The present time, in seconds.
          step: The number of steps done.
          rows: The number of rows trained on, if known.
        """
        self._mark, self._left_out = (now, step, rows), 0.0

    def leave_out(self, seconds: float) -> None:
        """Excludes time that is not spent on training from the speed."""
        self._left_out += seconds

    def take(self, now: float, step: int, rows: int | None) -> dict[str, float]:
        """Notes that a step has been handled, and returns the speed.

        Args:
          now: The present time, in seconds.
          step: The step.
          rows: The number of rows trained on, if known.

        Returns:
          The speed since the previous one by tag: `STEPS`, and `ROWS` if the
          rows are known; empty if no step or no time has passed.
        """
        self.begin(step)
        before, left_out = self._mark, self._left_out
        self.start(now, step, rows)
        if before is None or step <= before[1] or now - before[0] <= left_out:
            return {}
        seconds = now - before[0] - left_out
        speed = {STEPS: (step - before[1]) / seconds}
        if rows is not None and before[2] is not None:
            speed[ROWS] = (rows - before[2]) / seconds
        return speed

"""The global step of a callback's model, and how fast it grows."""

import math
import weakref

import keras

from keras_strategies.keras_bridge.loops.binding import binding_of
from keras_strategies.keras_bridge.steps.step_functions import Trained
from keras_strategies.keras_bridge.variables.optimizer_values import (
    count_optimizer_steps,
)

STEPS = "global_step/sec"
"""The tag of train steps a second, which is tf's."""

ROWS = "examples/sec"
"""The tag of rows a second."""


class GlobalStep:
    """Counts the train steps of one model after the other.

    A strategy's model counts what its train functions have done. Of a plain
    one the batches that Keras numbers are counted.

    Args:
      start: The steps that were done before; None for those that the first
        model's optimizer has counted.
    """

    def __init__(self, start: int | None = None) -> None:
        self._start = start
        self._own = self._counts = Trained()
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
        return self._counts is self._own

    @property
    def rows(self) -> int | None:
        """The rows trained on since some moment; None if nobody knows."""
        return None if self.is_numbered else self._counts.rows

    def set(self, step: int) -> None:
        """Resumes from another step."""
        self._start, self._base = step, self._counts.steps

    def follow(self, model: keras.Model) -> None:
        """Takes up a model: one that is new here begins with its own steps."""
        if self._model is not None and self._model() is not model:
            self._start, self._own = None, Trained()
        binding = binding_of(model)
        counts = self._own if binding is None else binding.trained
        if counts is not self._counts:
            step = self.value
            self._counts, self._base = counts, counts.steps
            if self._start is not None:
                self._start = step
        self._model = weakref.ref(model)

    def settle(self, model: keras.Model) -> None:
        """Asks the model's optimizer where to start, if nobody has said."""
        if self._start is None:
            self.set(count_optimizer_steps(model))

    def begin_epoch(self) -> None:
        """Says that Keras numbers its batches anew."""
        self._epoch_base = self._own.steps

    def note_batch(self, batch: int, steps: int | None) -> None:
        """Says how far an epoch is.

        Args:
          batch: Keras's number of the execution's last batch. It goes beyond
            the end where `steps_per_execution` does not divide the steps.
          steps: The number of steps of the epoch, if known.
        """
        done = min(batch + 1, steps or batch + 1)
        self._own.steps = self._epoch_base + done


class Every:
    """Steps that a period divides, and how fast they come.

    Args:
      period: How many steps lie between them; 0 for none at all.

    Attributes:
      period: As given.
      due: The next of the steps; infinite if there is none.
    """

    def __init__(self, period: int) -> None:
        self.period = period
        self.due = math.inf
        self._done = 0
        self._mark: tuple[float, int, int | None] | None = None
        self._left_out = 0.0

    def begin(self, step: int, *, is_on: bool = True) -> None:
        """Starts from a step.

        Args:
          step: One that is done, and not asked for again.
          is_on: Whether any are wanted.
        """
        period = self.period if is_on else 0
        self._done = step
        self.due = (step // period + 1) * period if period else math.inf

    def is_due(self, step: int, *, is_last: bool = False) -> bool:
        """Whether a step is divided by the period, or is the first since.

        Args:
          step: The step.
          is_last: Whether no other follows, which makes it due.
        """
        return step >= self.due or (
            is_last and self.due < math.inf and step > self._done
        )

    def start(self, now: float, step: int, rows: int | None) -> None:
        """Lets time begin.

        Args:
          now: The present time, in seconds.
          step: The number of steps done.
          rows: The number of rows trained on, if known.
        """
        self._mark, self._left_out = (now, step, rows), 0.0

    def leave_out(self, seconds: float) -> None:
        """Takes off time in which nothing was trained."""
        self._left_out += seconds

    def take(self, now: float, step: int, rows: int | None) -> dict[str, float]:
        """Says that a step is dealt with.

        Args:
          now: The present time, in seconds.
          step: The step.
          rows: The number of rows trained on, if known.

        Returns:
          The speed since the step before it, if time has passed: `STEPS`, and
          `ROWS` if they are known.
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

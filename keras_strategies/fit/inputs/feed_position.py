"""The position of a feed in its data, and where epochs and passes end.

A pass reads all of the data once. By default, an epoch of `fit` is one pass.
With `steps_per_epoch`, a pass may last for several epochs.
"""

import dataclasses
from typing import NamedTuple


class Place(NamedTuple):
    """A place in the data, between two steps.

    Attributes:
      epoch: The index of the pass over the data.
      step: The number of steps of this pass that are before the place.
    """

    epoch: int
    step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedPosition:
    """The position of a feed in its data. Its methods return new positions.

    Attributes:
      next: The place where the next iterator will begin.
      yielded: The place after the last execution that was yielded.
      epoch_start: The place where the current epoch of `fit` began.
      is_reading: Whether an iterator is in the middle of its data.
    """

    next: Place
    yielded: Place
    epoch_start: Place
    is_reading: bool = False

    @classmethod
    def begin_at(cls, place: Place) -> "FeedPosition":
        """Returns the position of a feed whose reading begins at `place`."""
        return cls(next=place, yielded=place, epoch_start=place)

    def begin_pass(self, epoch: int) -> "FeedPosition":
        """Returns the position after an iterator has begun to read a pass.

        The next iterator will begin with the pass after this one.
        """
        after = Place(epoch + 1, 0)
        return dataclasses.replace(self, next=after, is_reading=True)

    def advance(self, epoch: int, step: int) -> "FeedPosition":
        """Returns the position after an execution has been yielded."""
        return dataclasses.replace(self, yielded=Place(epoch, step))

    def stop(self, at: Place | None = None) -> "FeedPosition":
        """Returns the position after an iterator has ended.

        Args:
          at: The place where the next iterator will begin; None for the place
            that was already set.
        """
        return dataclasses.replace(self, next=at or self.next, is_reading=False)

    def resume(self, at: Place) -> "FeedPosition":
        """Returns a position from which the next iterator begins at `at`.

        `at` is where another feed, such as that of an earlier fit, stopped.
        """
        return dataclasses.replace(self, next=at, yielded=at)

    def begin_epoch(self) -> "FeedPosition":
        """Returns the position at the beginning of an epoch of `fit`.

        The epoch begins at `next`, unless an iterator is in the middle of a
        pass.
        """
        if self.is_reading:
            return self
        return dataclasses.replace(self, epoch_start=self.next)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Division:
    """Keras's division of passes over the data into epochs of `fit`.

    Each pass begins with a new epoch. In all methods, `stop` is the number of
    batches of the pass that were already yielded.

    Attributes:
      num_batches: The number of batches in a pass, or None if unknown.
      steps_per_epoch: The argument of `fit`. None if each epoch is one pass.
      steps_per_execution: The maximum number of steps in an execution. The
        last execution of an epoch may have fewer.
    """

    num_batches: int | None
    steps_per_epoch: int | None
    steps_per_execution: int

    def ends_execution(self, stop: int) -> bool:
        """Returns whether an execution ends after `stop` batches."""
        steps = self.steps_per_epoch
        in_epoch = stop % steps if steps else stop
        return in_epoch % self.steps_per_execution == 0

    def ends_epoch(self, stop: int) -> bool:
        """Returns whether an epoch ends after `stop` batches.

        Always False without `steps_per_epoch`.
        """
        return bool(self.steps_per_epoch) and stop % self.steps_per_epoch == 0

    def is_over(self, stop: int) -> bool:
        """Returns whether Keras considers the pass to be over.

        Keras then makes a new iterator before it continues. It counts
        `steps_per_execution` steps for every execution, even for an execution
        with fewer steps, so it may skip the last batches of a pass.
        """
        if self.num_batches is None:
            return False
        epochs, rest = divmod(stop, self.steps_per_epoch or max(stop, 1))
        epoch_steps = self._round_up(self.steps_per_epoch or stop)
        seen = epochs * epoch_steps + self._round_up(rest)
        return seen >= self.num_batches

    @property
    def epochs_of_a_pass(self) -> int:
        """The number of epochs of `fit` in one pass; 1 if unknown."""
        if not (self.num_batches and self.steps_per_epoch):
            return 1
        return -(-self.num_batches // self._round_up(self.steps_per_epoch))

    def _round_up(self, steps: int) -> int:
        each = self.steps_per_execution
        return -(-steps // each) * each

"""The position of a feed in its data, and the division of passes by epochs."""

import dataclasses
from typing import NamedTuple


class Place(NamedTuple):
    """A place between two steps: a pass's index, and its steps before it."""

    epoch: int
    step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedPosition:
    """The position of a feed. Its methods return later positions.

    Attributes:
      next: The place where the next iterator begins.
      yielded: The place after the last execution that was yielded.
      epoch_start: The place where the loop's epoch began.
      is_reading: Whether an iterator is in the middle of its data.
    """

    next: Place
    yielded: Place
    epoch_start: Place
    is_reading: bool = False

    @classmethod
    def begin_at(cls, place: Place) -> "FeedPosition":
        """Returns the position of a feed that begins at a place."""
        return cls(next=place, yielded=place, epoch_start=place)

    def begin_pass(self, epoch: int) -> "FeedPosition":
        """Notes that an iterator reads a pass; the next begins after it."""
        after = Place(epoch + 1, 0)
        return dataclasses.replace(self, next=after, is_reading=True)

    def advance(self, epoch: int, step: int) -> "FeedPosition":
        """Notes the place after an execution that was yielded."""
        return dataclasses.replace(self, yielded=Place(epoch, step))

    def stop(self, at: Place | None = None) -> "FeedPosition":
        """Notes that the iterator ended; the next begins at `at`, if given."""
        return dataclasses.replace(self, next=at or self.next, is_reading=False)

    def resume(self, at: Place) -> "FeedPosition":
        """Makes the next iterator begin where another feed was."""
        return dataclasses.replace(self, next=at, yielded=at)

    def begin_epoch(self) -> "FeedPosition":
        """Notes that an epoch begins at `next`, unless it is being read."""
        if self.is_reading:
            return self
        return dataclasses.replace(self, epoch_start=self.next)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Division:
    """Keras's division of passes over the data into a loop's epochs.

    A pass begins where an epoch begins. In all methods `stop` is the number of
    its batches that were yielded.

    Attributes:
      num_batches: The number of batches in a pass, if known.
      steps_per_epoch: The argument of `fit`; None for a pass in each epoch.
      steps_per_execution: The most steps of an execution, which ends where
        the epoch does.
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
        """Returns whether an epoch of `steps_per_epoch` steps ends there."""
        return bool(self.steps_per_epoch) and stop % self.steps_per_epoch == 0

    def is_over(self, stop: int) -> bool:
        """Returns whether Keras makes a new iterator before it continues.

        Keras counts `steps_per_execution` steps for every execution, even if
        it had fewer, and so may leave out the last batches.
        """
        if self.num_batches is None:
            return False
        epochs, rest = divmod(stop, self.steps_per_epoch or max(stop, 1))
        of_epoch = self._round_up(self.steps_per_epoch or stop)
        seen = epochs * of_epoch + self._round_up(rest)
        return seen >= self.num_batches

    @property
    def epochs_of_a_pass(self) -> int:
        """The number of the loop's epochs in a pass; 1 if unknown."""
        if not (self.num_batches and self.steps_per_epoch):
            return 1
        return -(-self.num_batches // self._round_up(self.steps_per_epoch))

    def _round_up(self, steps: int) -> int:
        each = self.steps_per_execution
        return -(-steps // each) * each

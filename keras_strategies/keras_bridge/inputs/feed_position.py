"""The position of a feed in its data, and how a loop's epochs divide those."""

import dataclasses
from typing import NamedTuple


class Place(NamedTuple):
    """A place between two steps: a pass over the data, and steps of it."""

    epoch: int
    step: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedPosition:
    """Where a feed is.

    Attributes:
      next: Where the next iterator begins.
      given: After the execution that was given out last.
      begun: Where the loop's epoch began.
      is_reading: An iterator is in the middle of its data.
    """

    next: Place
    given: Place
    begun: Place
    is_reading: bool = False

    @classmethod
    def at(cls, place: Place) -> "FeedPosition":
        """The position of a feed that begins at a place."""
        return cls(next=place, given=place, begun=place)

    def reading(self, epoch: int) -> "FeedPosition":
        """An iterator reads a pass; the next one reads that after it."""
        after = Place(epoch + 1, 0)
        return dataclasses.replace(self, next=after, is_reading=True)

    def gave(self, epoch: int, step: int) -> "FeedPosition":
        """An execution was given out."""
        return dataclasses.replace(self, given=Place(epoch, step))

    def stopped(self, at: Place | None = None) -> "FeedPosition":
        """The iterator has ended; the next one begins where it says, if so."""
        return dataclasses.replace(self, next=at or self.next, is_reading=False)

    def resumed(self, at: Place) -> "FeedPosition":
        """The next iterator begins where another feed was."""
        return dataclasses.replace(self, next=at, given=at)

    def epoch_begun(self) -> "FeedPosition":
        """The loop begins an epoch; unless it is read already, at `next`."""
        if self.is_reading:
            return self
        return dataclasses.replace(self, begun=self.next)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Division:
    """How Keras divides passes over the data into a loop's epochs.

    A pass begins where an epoch begins. `stop` is how many of its batches were
    given out.

    Attributes:
      num_batches: Of a pass, if it is known.
      steps_per_epoch: As given to fit; None for a pass in each epoch.
      steps_per_execution: No execution reaches over an epoch's end.
    """

    num_batches: int | None
    steps_per_epoch: int | None
    steps_per_execution: int

    def ends_execution(self, stop: int) -> bool:
        """Whether the batches given out are an execution now."""
        steps = self.steps_per_epoch
        in_epoch = stop % steps if steps else stop
        return in_epoch % self.steps_per_execution == 0

    def ends_epoch(self, stop: int) -> bool:
        """Whether an epoch with a given number of steps has them."""
        return bool(self.steps_per_epoch) and stop % self.steps_per_epoch == 0

    def is_over(self, stop: int) -> bool:
        """Whether Keras makes a new iterator before it continues.

        It counts an execution as so many steps, also where it had fewer, and
        may so leave out the last batches.
        """
        if self.num_batches is None:
            return False
        epochs, rest = divmod(stop, self.steps_per_epoch or max(stop, 1))
        of_epoch = self._counted(self.steps_per_epoch or stop)
        seen = epochs * of_epoch + self._counted(rest)
        return seen >= self.num_batches

    @property
    def epochs_of_a_pass(self) -> int:
        """How many of the loop's epochs a pass lasts for; 1 if not known."""
        if not (self.num_batches and self.steps_per_epoch):
            return 1
        return -(-self.num_batches // self._counted(self.steps_per_epoch))

    def _counted(self, steps: int) -> int:
        each = self.steps_per_execution
        return -(-steps // each) * each

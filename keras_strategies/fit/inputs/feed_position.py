"""Places in the data of a feed, and where epochs and passes end.

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

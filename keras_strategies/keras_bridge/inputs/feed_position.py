"""The division of passes over the data into a loop's epochs."""

import dataclasses


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
        """Whether Keras makes a new iterator before it goes on.

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

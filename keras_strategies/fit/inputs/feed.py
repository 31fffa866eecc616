"""The data of fit, evaluate and predict, as executions on the devices.

An execution contains the batches of one program call: up to
`steps_per_execution` steps. If a `DataAdapter` is passed as `x`, Keras uses it
unchanged. `Feed` is such an adapter. Its source reads the user's data,
`data.steps` makes the batches of steps in which all processes take part, and a
thread moves the batches to the devices ahead of time.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterator
from typing import Any

from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from keras_strategies._types import Logs, Tree
from keras_strategies.data import batch_spec
from keras_strategies.data.steps import Steps
from keras_strategies.fit.inputs import keras_sources
from keras_strategies.fit.inputs.agree_source import check_same_values
from keras_strategies.fit.inputs.choose_source import (
    LoopData,
    make_loop_source,
)
from keras_strategies.fit.inputs.feed_position import Division, Place
from keras_strategies.spmd.batches import (
    Execution,
    HostBatch,
    global_batch,
    place,
)
from keras_strategies.spmd.mesh import ReplicaMesh


class Feed(DataAdapter):
    """A Keras data adapter that yields executions of up to K batches.

    Args:
      steps: The object that reads the user's data and makes batches for steps.
      steps_per_execution: K, the maximum number of batches in an execution.
      steps_per_epoch: The number of steps in an epoch, if the epochs end
        before the data do. An execution never extends beyond an epoch's end.

    Attributes:
      is_process_local: Whether the data, and therefore positions, are
        process-local.
      is_other_kind: Whether the feed was resumed with other data.
      yielded: The place after the last yielded execution.
    """

    def __init__(
        self,
        steps: Steps,
        *,
        steps_per_execution: int = 1,
        steps_per_epoch: int | None = None,
    ) -> None:
        source = steps.source
        if source.num_batches == 0:
            raise ValueError(_NO_ROWS)
        self._source, self._steps = source, steps
        self.is_process_local = source.is_process_local
        self._mesh = steps.mesh
        self._division = Division(
            # With process-local rows a pass ends when all processes have read
            # all of their data, and no process knows how many batches that is.
            num_batches=None if source.is_process_local else source.num_batches,
            steps_per_epoch=max(steps_per_epoch or 0, 0) or None,
            steps_per_execution=steps_per_execution,
        )
        if source.order is not None:
            source.order.set_epochs_per_pass(self._division.epochs_of_a_pass)
        # Where the next iterator will begin, the place after the last yielded
        # execution, and the place where the current epoch of `fit` began.
        self._next = self.yielded = self._epoch_start = Place(
            source.passes.next, 0
        )
        # Whether an iterator is in the middle of its data.
        self._is_reading = False
        # A resumed feed yields empty executions (`_done`) for the steps of the
        # epoch that an earlier fit has already computed.
        self._is_resumed = False
        self.is_other_kind = False
        self._done: list[Execution] = []

    def get_numpy_iterator(self) -> Iterator[Tree]:
        """Yields batches on the host with the shapes of global batches.

        Keras builds the model with these batches.
        """
        has_rows = False
        self._source.is_peeked = True
        for batch in self._steps.read_epoch(*self._next):
            if not has_rows:
                self._skip_order()
            has_rows = True
            yield batch_spec.resize_batch(batch.data, sum(batch.parts) or 1)
        if not has_rows:
            raise ValueError(_NO_ROWS)

    def _skip_order(self) -> None:
        """Skips the shuffle order of the iterator that builds the model."""
        if self._source.order is not None:
            self._source.order.skip()
        elif self._source.has_own_seeds:
            after = Place(self._next.epoch + 1, 0)
            self._source.passes.reach(after.epoch)
            self._next = self.yielded = self._epoch_start = after

    def get_jax_iterator(
        self, super_batch: object = None
    ) -> Iterator[Execution]:
        """Yields executions whose arrays are on the devices.

        Args:
          super_batch: Ignored. Keras 3.16 passes K and expects K stacked
            batches. An execution already contains the K batches.
        """
        del super_batch
        # This is a generator, so nothing happens before the first batch is
        # read: Keras also makes iterators from which it never reads.
        epoch, start = self._next
        self._source.is_peeked = False
        self._begin_pass(epoch)
        done, self._done = self._done, []
        yield from done
        # Each iteration of this loop reads one pass. Usually an iterator reads
        # one pass, but a resumed feed may have to continue with the next.
        while not self.is_pass_over:
            executions: Any = self._steps.prefetch(
                epoch,
                start,
                functools.partial(self._executions, epoch=epoch, start=start),
                is_pause=lambda item: self._division.ends_epoch(item[1]),
            )
            try:
                for execution, stop in executions:
                    self.yielded = Place(epoch, stop)
                    if is_last := self._continues_after(stop):
                        # Keras counts batches from where the fit was resumed,
                        # so it does not make an iterator for the next pass.
                        # Therefore this iterator also reads the next pass.
                        epoch, start = epoch + 1, 0
                        self._next, self._is_reading = Place(epoch, 0), False
                    yield execution
                    if is_last or self.is_pass_over:
                        break
                else:
                    is_last = False
            finally:
                self._is_reading = False
                executions.close()
            if not is_last:
                break
            self._begin_pass(epoch)
        self.yielded, self._is_reading = Place(epoch + 1, 0), False

    def _begin_pass(self, epoch: int) -> None:
        """Begins to read a pass; the next iterator begins with the one after.

        Args:
          epoch: The index of the pass.
        """
        self._next, self._is_reading = Place(epoch + 1, 0), True
        self._source.passes.reach(epoch + 1)

    def _continues_after(self, stop: int) -> bool:
        """Returns whether this iterator also reads the next pass.

        This is true at the end of a pass that lasts for several epochs of
        `fit`, if the fit was resumed in the middle of a pass.
        """
        return (
            self._is_resumed
            and self._division.ends_epoch(stop)
            and self._division.is_over(stop)
        )

    @property
    def is_pass_over(self) -> bool:
        """Whether a resumed feed has no more batches for this epoch.

        Keras does not know a resumed feed's number of batches, so it asks for
        a batch even then.
        """
        stop = self.yielded.step
        return (
            self._is_resumed
            and not self._division.ends_epoch(stop)
            and self._division.is_over(stop)
        )

    def next_position(self, place: tuple[int, int] | None) -> dict[str, Any]:
        """Returns the position where the next epoch of `fit` begins.

        Args:
          place: The place after the last computed execution, or None
            for the place where the next iterator begins.
        """
        if not (self._is_reading and self._division.steps_per_epoch and place):
            # Keras makes an iterator for each epoch.
            return self.position_at(self._next)
        if self._division.is_over(place[1]):
            place = (place[0] + 1, 0)
        return self.position_at(place)

    def position_at(self, place: tuple[int, int]) -> dict[str, Any]:
        """Returns a place in the data as a position that can be saved as JSON.

        "epoch" counts passes over the data. With `steps_per_epoch`, a pass may
        last for several epochs of `fit`. "step" is the number of steps of this
        pass. With process-local data, each process has a different position.

        Args:
          place: The place after the last computed execution. `yielded` may be
            later, because on accelerators Keras reads one execution ahead.
        """
        return {"epoch": place[0], "step": place[1], "seed": self._source.seed}

    def resume(
        self,
        position: dict[str, Any],
        done_steps: int = 0,
        logs: Logs | None = None,
    ) -> None:
        """Makes the next iterator continue where another feed stopped.

        The other feed may have been in another process. Unless the data are
        process-local, its job may have had another number of processes.

        Args:
          position: A position of the other feed, for the same data.
          done_steps: The number of steps of the first epoch that were computed
            before. Keras gets empty executions for these steps, so that its
            count of steps continues.
          logs: The logs that the last of these steps returned.
        """
        # If the seed does not fit these data, for example because they are not
        # shuffled, reading begins with a new shuffle order and a new pass.
        seed = position["seed"]
        self.is_other_kind = (seed is None) != (self._source.seed is None)
        try:
            self._source.restart(seed)
        except ValueError:
            self.is_other_kind = True
        start = 0 if self.is_other_kind and not done_steps else position["step"]
        self._next = self.yielded = Place(position["epoch"], start)
        num_begun = position["epoch"] + (start > 0)
        if self._source.order is not None and num_begun:
            # Draw the earlier shuffle orders, so that the random generator is
            # in the state in which the other feed left it, also for a later
            # fit.
            self._source.order.compute(num_begun - 1)
        # Keras counts the batches of a pass from an iterator's first batch,
        # but this iterator begins in the middle of a pass. So `num_batches`
        # hides the real number from Keras, and the feed itself ends epochs.
        self._is_resumed = self._division.steps_per_epoch is not None
        count = done_steps // self._division.steps_per_execution
        self._done = [Execution(segments=(), logs=logs)] * count

    def _executions(
        self, batches: Iterator[HostBatch], epoch: int, start: int
    ) -> Iterator[tuple[Execution, int]]:
        """Yields each execution with the number of the pass's steps so far."""
        group: list[HostBatch] = []
        stop = start
        for batch in batches:
            group.append(batch)
            stop += 1
            if self._division.ends_execution(stop):
                yield self._place(group, epoch, stop), stop
                group = []
        if group:
            yield self._place(group, epoch, stop), stop
        if not stop:
            raise ValueError(_NO_ROWS)

    def _place(
        self, group: list[HostBatch], epoch: int, stop: int
    ) -> Execution:
        execution = place(group, self._mesh)
        return dataclasses.replace(execution, place=(epoch, stop))

    @property
    def num_batches(self) -> int | None:
        """Number of batches in an epoch, if known."""
        return sys.maxsize if self._is_resumed else self._division.num_batches

    @property
    def sizes(self) -> dict[str, int | None]:
        """The sizes of the data by name, with None for unknown sizes.

        A position is valid only in data with the same sizes.
        """
        return {
            "rows a batch": self._source.batch_size or self._source.likely_size,
            "batches": self._division.num_batches,
            "rows": self._source.summary().num_rows,
        }

    def on_epoch_begin(self) -> None:
        """Begins an epoch of the source; Keras calls it before each epoch."""
        if not self._is_reading:
            self._epoch_start = self._next
        self._source.begin_epoch(*self._epoch_start)

    def on_epoch_end(self) -> None:
        """Ends an epoch of the source; Keras calls it after each epoch."""
        self._source.end_epoch()


def make_feed(
    mesh: ReplicaMesh,
    *,
    steps_per_execution: int = 1,
    name: str = "fit",
    facts: dict[str, Any] | None = None,
    **data: Any,
) -> Any:
    """Makes a feed for the data of fit, evaluate or predict. Collective.

    Args:
      mesh: The mesh of the replicas.
      steps_per_execution: The number of steps of an execution.
      name: `"fit"`, `"evaluate"` or `"predict"`, for messages.
      facts: Values by name that must be equal in all processes.
      **data: The attributes of `LoopData`.

    Returns:
      A `Feed`, or `x` itself if `x` already is a Keras adapter.
    """
    loop_data = LoopData(**data)
    if isinstance(loop_data.x, DataAdapter):
        return loop_data.x
    facts = (facts or {}) | {
        "steps_per_epoch": loop_data.steps_per_epoch,
        "steps_per_execution": steps_per_execution,
    }
    return Feed(
        Steps(
            source=make_loop_source(mesh, loop_data, name=name, facts=facts),
            mesh=mesh,
            name=name,
        ),
        steps_per_execution=steps_per_execution,
        steps_per_epoch=loop_data.steps_per_epoch,
    )


def place_batch(batch: Tree, mesh: ReplicaMesh) -> Execution:
    """Moves the batch of a `*_on_batch` call to the devices.

    Every process must pass the entire global batch.

    Raises:
      ValueError: if processes that share replicas pass different rows.
    """
    batch = keras_sources.to_host_batch(batch)
    if mesh.spans_processes:
        check_same_values(mesh, "a call with one batch", batch)
    return place([global_batch(batch, mesh)], mesh)


_NO_ROWS = (
    "Training, evaluation and prediction need at least one row, but the data "
    "has none. Check the dataset, its filters and its batch size."
)

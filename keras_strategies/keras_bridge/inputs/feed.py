"""The data of fit, evaluate and predict, as executions on the devices.

Keras passes a `DataAdapter` given as `x` through untouched: that is the door.
Behind it a source reads the user's data, `data.steps` makes steps of it that
all processes take, and a thread moves them to the devices ahead of time.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterator
from typing import Any

from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from keras_strategies._core.batches import (
    Execution,
    HostBatch,
    global_batch,
    place,
)
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._types import Logs, Tree
from keras_strategies.data import batch_spec
from keras_strategies.data.steps import Steps
from keras_strategies.keras_bridge.inputs import keras_sources
from keras_strategies.keras_bridge.inputs.agree_source import check_same_rows
from keras_strategies.keras_bridge.inputs.choose_source import source_of_loop
from keras_strategies.keras_bridge.inputs.feed_position import (
    Division,
    FeedPosition,
    Place,
)
from keras_strategies.keras_bridge.inputs.loop_data import (
    FeedAdapter,
    LoopData,
)


class Feed(FeedAdapter):
    """Reads host batches and yields executions of up to K of them.

    Args:
      steps: The steps of the user's data.
      steps_per_execution: K.
      steps_per_epoch: Where an epoch ends before the data does; no execution
        reaches over it.
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
        self._source = source
        self._steps = steps
        self._mesh = steps.mesh
        self._steps_per_execution = steps_per_execution
        self._steps_per_epoch = steps_per_epoch
        self._division = Division(
            # Where rows are process-local, nobody knows the longest.
            num_batches=None if source.is_process_local else source.num_batches,
            steps_per_epoch=max(steps_per_epoch or 0, 0) or None,
            steps_per_execution=steps_per_execution,
        )
        if source.order is not None:
            source.order.set_epochs_per_pass(self._division.epochs_of_a_pass)
        self._signature: Any = None
        self._first: Tree = None
        self._at = FeedPosition.at(Place(source.passes.next, 0))
        # For a resumed feed: what stands for the steps of the loop's epoch
        # that were computed before.
        self._is_resumed = False
        self.is_other_kind = False
        self._done: list[Execution] = []

    def get_numpy_iterator(self) -> Iterator[Tree]:
        """Host batches with the rows of all processes, to build a model on."""
        has_rows = False
        self._source.is_peeked = True
        for batch in self._steps.read_epoch(*self._at.next):
            if not has_rows and self._source.order is not None:
                # Keras draws an order for each of its iterators.
                self._source.order.skip()
            has_rows = True
            yield batch_spec.resize_batch(batch.data, sum(batch.parts) or 1)
        if not has_rows:
            raise ValueError(_NO_ROWS)

    def get_jax_iterator(
        self, super_batch: object = None
    ) -> Iterator[Execution]:
        """Executions whose arrays lie on the devices.

        Args:
          super_batch: K, of Keras 3.16, which would have K batches stacked: an
            execution holds them already.
        """
        del super_batch
        # Keras makes iterators that it never asks for anything.
        epoch, start = self._at.next
        self._at = self._at.reading(epoch)
        self._source.is_peeked = False
        self._source.passes.reach(epoch + 1)
        done, self._done = self._done, []
        yield from done
        while not self.is_pass_over:
            executions = self._executions_ahead(epoch, start)
            try:
                for execution, stop in executions:
                    self._at = self._at.gave(epoch, stop)
                    if is_last := self._continues_after(stop):
                        # Keras, which counts from where the loop went on, asks
                        # for no iterator of the next epoch: it is begun here.
                        epoch, start = epoch + 1, 0
                        self._at = self._at.stopped(Place(epoch, start))
                    yield execution
                    if is_last or self.is_pass_over:
                        break
                else:
                    is_last = False
            finally:
                self._at = self._at.stopped()
                executions.close()
            if not is_last:
                break
            self._at = self._at.reading(epoch)
            self._source.passes.reach(epoch + 1)
        self._at = self._at.stopped().gave(epoch + 1, 0)

    def _continues_after(self, stop: int) -> bool:
        """Whether the next epoch follows where this one ends, in one iterator.

        Where several epochs of the loop are one of the data, and the loop went
        on in the middle of one.
        """
        return (
            self._is_resumed
            and self._division.ends_epoch(stop)
            and self._division.is_over(stop)
        )

    @property
    def is_pass_over(self) -> bool:
        """Whether a resumed feed has nothing more for this epoch.

        Keras, which knows of no number of batches then, still asks for it.
        """
        stop = self._at.given.step
        return (
            self._is_resumed
            and not self._division.ends_epoch(stop)
            and self._division.is_over(stop)
        )

    @property
    def position(self) -> dict[str, Any]:
        """Where the loop is; what JSON can hold.

        An epoch here is one pass over the data: with `steps_per_epoch` it may
        last for several of the loop's. "step" is the number of its steps that
        were given out. Each process has its own position in data that are
        process-local.
        """
        epoch, step = self._at.given
        count = self._division.num_batches
        if count is not None and step >= count:
            epoch, step = epoch + 1, 0
        return self.position_at((epoch, step))

    def next_position(self, place: tuple[int, int] | None) -> dict[str, Any]:
        """As `position`, with a loop's epoch done: where its next one begins.

        Args:
          place: The last execution's that was computed, if there was one.
        """
        if not (self._at.is_reading and self._steps_per_epoch and place):
            # Keras makes an iterator for each epoch.
            return self.position_at(self._at.next)
        if self._division.is_over(place[1]):
            place = (place[0] + 1, 0)
        return self.position_at(place)

    def position_at(self, place: tuple[int, int]) -> dict[str, Any]:
        """As `position`, in the middle of a loop's epoch.

        Args:
          place: The last execution's that was computed. On accelerators
            Keras asks for one ahead.
        """
        return {"epoch": place[0], "step": place[1], "seed": self._source.seed}

    @property
    def is_process_local(self) -> bool:
        """Whether the data, and so a position, are this process's own."""
        return self._source.is_process_local

    def resume(
        self,
        position: dict[str, Any],
        done_steps: int = 0,
        logs: Logs | None = None,
    ) -> None:
        """Begins the next epoch that is read where another feed was.

        That one may have been in another process, and, unless the data are
        each process's own, in a job with another number of them.

        Args:
          position: What `position` of a feed of the same data was.
          done_steps: How many steps of the loop's first epoch were done
            before. The loop is given executions of none for them, so that it
            counts as the other one did.
          logs: What the last of them returned.
        """
        # Data of another kind begin an order and a pass of their own.
        seed = position["seed"]
        self.is_other_kind = (seed is None) != (self._source.seed is None)
        try:
            self._source.restart(seed)
        except ValueError:
            self.is_other_kind = True
        start = 0 if self.is_other_kind and not done_steps else position["step"]
        self._at = self._at.resumed(Place(position["epoch"], start))
        begun = position["epoch"] + (start > 0)
        if self._source.order is not None and begun:
            # A fit after this one finds the generator as its orders left it.
            self._source.order.compute(begun - 1)
        # Keras counts the batches of an epoch of the data from its iterator's
        # first: so it does not get their number, and the feed ends the epochs.
        self._is_resumed = self._steps_per_epoch is not None
        count = done_steps // self._steps_per_execution
        self._done = [Execution(segments=(), logs=logs)] * count

    def _executions_ahead(self, epoch: int, start: int) -> Any:
        return self._steps.prefetch(
            epoch,
            start,
            functools.partial(self._executions, epoch=epoch, start=start),
            num_bytes=lambda item: item[0].num_bytes,
            is_pause=lambda item: self._division.ends_epoch(item[1]),
        )

    def _executions(
        self, batches: Iterator[HostBatch], epoch: int, start: int
    ) -> Iterator[tuple[Execution, int]]:
        """Executions, and the number of steps after each."""
        group: list[HostBatch] = []
        stop = start
        for batch in batches:
            self._check_structure(stop, batch.data)
            group.append(batch)
            stop += 1
            if self._division.ends_execution(stop):
                yield self._placed(group, epoch, stop), stop
                group = []
        if group:
            yield self._placed(group, epoch, stop), stop
        if not stop:
            raise ValueError(_NO_ROWS)

    def _placed(
        self, group: list[HostBatch], epoch: int, stop: int
    ) -> Execution:
        execution = place(group, self._mesh)
        return dataclasses.replace(execution, place=(epoch, stop))

    def _check_structure(self, index: int, batch: Tree) -> None:
        signature = batch_spec.find_kind(batch)
        if self._signature is None:
            self._signature = signature
            self._first = batch_spec.describe(batch)
        elif signature != self._signature:
            raise ValueError(
                "All batches must have the same structure, ranks and dtypes. "
                f"Received: first batch {self._first}, batch {index} "
                f"{batch_spec.describe(batch)}. Make the dataset yield one "
                "structure."
            )

    @property
    def num_batches(self) -> int | None:
        """Number of batches in an epoch, if known."""
        return sys.maxsize if self._is_resumed else self._division.num_batches

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch, if known."""
        return self._source.batch_size

    @property
    def sizes(self) -> dict[str, int | None]:
        """What a position counts in, by its name; None where not known."""
        known = self._source.summary()
        return {
            "rows a batch": self.batch_size or known.first_rows,
            "batches": self._division.num_batches,
            "rows": known.num_rows,
        }

    def on_epoch_begin(self) -> None:
        """Called by Keras before each epoch."""
        self._at = self._at.epoch_begun()
        self._source.begin_epoch(*self._at.begun)

    def on_epoch_end(self) -> None:
        """Called by Keras after each epoch."""
        self._source.end_epoch()


def make_feed(
    mesh: ReplicaMesh,
    *,
    steps_per_execution: int = 1,
    name: str = "fit",
    facts: dict[str, Any] | None = None,
    **data: Any,
) -> Any:
    """The feed of what was given to fit, evaluate or predict. Collective.

    Args:
      mesh: The replicas.
      steps_per_execution: Steps of an execution.
      name: The loop, for messages.
      facts: Numbers that must be the same in every process.
      **data: The attributes of `LoopData`; an `x` that is a Keras adapter
        already (a feed) is returned as it is.

    Returns:
      A `Feed`, or the adapter that `x` is.
    """
    given = LoopData(**data)
    if isinstance(given.x, DataAdapter):
        return given.x
    facts = (facts or {}) | {
        "steps_per_epoch": given.steps_per_epoch,
        "steps_per_execution": steps_per_execution,
    }
    return Feed(
        Steps(
            source=source_of_loop(mesh, given, name=name, facts=facts),
            mesh=mesh,
            name=name,
        ),
        steps_per_execution=steps_per_execution,
        steps_per_epoch=given.steps_per_epoch,
    )


def place_batch(batch: Tree, mesh: ReplicaMesh) -> Execution:
    """Moves one batch of a `*_on_batch` call to the devices.

    Every process gives the rows of all.

    Raises:
      ValueError: processes that share replicas give other rows.
    """
    batch = keras_sources.host_batch(batch)
    if mesh.spans_processes:
        check_same_rows(mesh, batch)
    return place([global_batch(batch, mesh)], mesh)


_NO_ROWS = (
    "Training, evaluation and prediction need at least one row. Received: "
    "data without any. Check the dataset, its filters and its batch size."
)

"""Datasets for custom loops: global batches in, per-replica values out."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from keras_strategies._types import Tree
from keras_strategies.data.source import Source, all_rows
from keras_strategies.data.steps import Steps
from keras_strategies.names.phases import INPUT, Phase
from keras_strategies.passes import replay
from keras_strategies.passes.lockstep import Turn
from keras_strategies.passes.traces import is_tracing
from keras_strategies.spmd.batches import HostBatch, put_rows
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.spmd.rows import fill_replicas, rows_of_replicas
from keras_strategies.spmd.values import ROWS, STACKED, PerReplica


class DistributedDataset:
    """A dataset whose batches are sharded over the replicas.

    `Strategy.experimental_distribute_dataset` returns this object. It can be
    iterated repeatedly if the underlying data can be: each iteration is an
    epoch. It yields nested structures of `PerReplica` values, or of plain
    arrays if there is only one replica. With several processes, iteration is
    collective: all processes take the same number of steps. `fit`, `evaluate`
    and `predict` also accept this object.

    Args:
      source: The source of the batches.
      mesh: The mesh of the replicas.

    Attributes:
      source: The source of the batches.

    Example:
      ```python
      data = strategy.experimental_distribute_dataset(dataset)
      for epoch in range(2):
          for x, y in data:
              strategy.run(train_step, args=(x, y))
      ```
    """

    def __init__(self, source: Source, mesh: ReplicaMesh) -> None:
        self.source = source
        self._mesh = mesh

    def __iter__(self) -> "DistributedIterator":
        """Returns an iterator over the next epoch, from its first batch."""
        return self.iterator(self.source.passes.next)

    def iterator(self, epoch: int, start: int = 0) -> "DistributedIterator":
        """Returns an iterator that starts at a given epoch and step.

        Use it to resume after an interruption.

        Args:
          epoch: Number of the epoch, from 0.
          start: Number of steps to skip.
        """
        self.source.passes.reach(epoch + 1)
        steps = Steps(
            source=self.source,
            mesh=self._mesh,
            name="experimental_distribute_dataset",
            is_balanced=False,
        )
        return DistributedIterator(steps, epoch, start)

    @property
    def element_spec(self) -> Tree:
        """The shapes and dtypes of a batch; the number of rows is None."""
        return _read_spec(self.source)


class DistributedIterator:
    """An iterator over the batches of a `DistributedDataset`.

    Args:
      steps: The `Steps` object that reads the batches, one for each step.
      epoch: Number of the epoch to read, from 0.
      start: Number of steps to skip.

    Example:
      ```python
      iterator = iter(strategy.experimental_distribute_dataset(dataset))
      x, y = next(iterator)
      state = iterator.get_state()

      resumed = iter(strategy.experimental_distribute_dataset(dataset))
      resumed.set_state(state)
      assert resumed.get_state()["step"] == 1
      ```
    """

    def __init__(self, steps: Steps, epoch: int, start: int = 0) -> None:
        self._steps = steps
        self._place = (epoch, start)
        self._batches: Any = None

    @property
    def element_spec(self) -> Tree:
        """The shapes and dtypes of a batch; the number of rows is None."""
        return _read_spec(self._steps.source)

    def __iter__(self) -> "DistributedIterator":
        """Returns this iterator, at its current position."""
        return self

    def __next__(self) -> Tree:
        """Returns the next batch, sharded over the replicas.

        Raises:
          ValueError: if it is called inside a function that a strategy runs on
            the replicas or that JAX traces. Tracing would read only one batch,
            which all later calls would use again.
          StopIteration: if the epoch has ended.
        """
        _check_where()
        epoch, step = self._place
        if self._batches is None:
            self._batches = self._start(epoch, step)
        with Phase(INPUT) as phase:
            batch = phase.result = next(self._batches)
        self._place = (epoch, step + 1)
        return batch

    def _start(self, epoch: int, start: int) -> Iterator[Tree]:
        # The thread must not refer to `self`: otherwise `self` could not be
        # garbage-collected while the thread waits.
        steps = self._steps
        mesh, source = steps.mesh, steps.source

        def place_batches(batches: Iterator[HostBatch]) -> Iterator[Tree]:
            source.begin_epoch(epoch, start)
            try:
                for batch in batches:
                    yield shard_batch(batch, mesh)
            finally:
                source.end_epoch()

        return steps.prefetch(
            epoch, start, place_batches, is_pause=lambda batch: False
        )

    def get_state(self) -> dict[str, Any]:
        """Returns the position in the data as a JSON-serializable dict.

        Pass it to `set_state` of another iterator, also in another process, to
        resume from this position.
        """
        epoch, step = self._place
        seed = self._steps.source.seed
        return {"epoch": epoch, "step": step, "seed": seed}

    def set_state(self, state: dict[str, Any]) -> None:
        """Resumes from the position of another iterator.

        Args:
          state: The dict that `get_state` returned.

        Raises:
          ValueError: if `state` is not a dict from `get_state`, or its shuffle
            order does not fit this data.
        """
        if set(state) != {"epoch", "step", "seed"}:
            raise ValueError(
                "`state` must be a dict that `get_state` returned. "
                f"Received: {state!r}. Pass the result of "
                "`iterator.get_state()`."
            )
        self._batches = None
        try:
            self._steps.source.restart(state["seed"])
        except ValueError:
            raise ValueError(
                "`state` must come from an iterator over the same data, but "
                "its shuffle order is for different data. Distribute the "
                "dataset that it was saved from, or start from the beginning."
            ) from None
        self._place = (state["epoch"], state["step"])

    def get_next(self) -> Tree:
        """Returns the next batch; raises StopIteration at the end."""
        return next(self)

    def get_next_as_optional(self) -> "Optional":
        """Returns the next batch, or an empty `Optional` at the end."""
        try:
            return Optional(next(self), is_filled=True)
        except StopIteration:
            return Optional(None, is_filled=False)


def _read_spec(source: Source) -> Tree:
    part = next(source.read(0, 0, all_rows))
    return jax.tree.map(
        lambda leaf: ((None, *leaf.shape[1:]), leaf.dtype), part.data
    )


def _check_where() -> None:
    """Raises ValueError inside a function that is traced or run on replicas."""
    if isinstance(replay.current.side, Turn) or is_tracing():
        raise ValueError(
            "A distributed dataset must not be read in a function that runs on "
            "replicas or is compiled, which would use the same batch in every "
            "call. Read the batch first and pass it as an argument: "
            "`strategy.run(step, args=(next(iterator),))`."
        )


class Optional:
    """A batch, or nothing if the dataset has ended.

    Args:
      value: The batch; ignored if `is_filled` is False.
      is_filled: Whether there is a batch.
    """

    def __init__(self, value: Tree, *, is_filled: bool) -> None:
        self._value = value
        self._is_filled = is_filled

    def has_value(self) -> bool:
        """Returns whether there is a batch."""
        return self._is_filled

    def get_value(self) -> Tree:
        """Returns the batch.

        Raises:
          ValueError: if there is no batch because the dataset has ended.
        """
        if not self._is_filled:
            raise ValueError(
                "`get_value()` must be called on an `Optional` that has a "
                "value. This one is empty, because the dataset has ended. "
                "Check `has_value()` first."
            )
        return self._value


def shard_batch(batch: HostBatch, mesh: ReplicaMesh) -> Tree:
    """Puts a global batch on the devices, sharded over the replicas."""
    if mesh.num_replicas == 1:
        if mesh.cores_per_replica == 1:
            return jax.device_put(batch.data, mesh.devices[0])
        return jax.tree.map(lambda leaf: _on_all_cores(leaf, mesh), batch.data)
    counts = count_rows(batch, mesh)
    if len(set(counts)) > 1:
        shard = functools.partial(_shard_ragged, counts=counts, mesh=mesh)
        return jax.tree.map(shard, batch.data)
    block = sum(counts) // mesh.num_readers
    return jax.tree.map(
        lambda leaf: PerReplica.of(put_rows([leaf], block, mesh), ROWS),
        batch.data,
    )


def count_rows(batch: HostBatch, mesh: ReplicaMesh) -> tuple[int, ...]:
    """Returns the number of a batch's rows that each replica receives."""
    if batch.counts is not None:
        return batch.counts
    count = mesh.num_replicas
    if mesh.num_readers == 1:
        return rows_of_replicas(batch.rows, batch.batch_size, count)
    places = rows_of_replicas(batch.batch_size, batch.batch_size, count)
    share = mesh.replicas_per_process
    return tuple(
        n
        for p, rows in enumerate(batch.parts)
        for n in fill_replicas(places[p * share : (p + 1) * share], rows)
    )


def _on_all_cores(leaf: np.ndarray, mesh: ReplicaMesh) -> jax.Array:
    """Copies all rows of an array to every core of the only replica."""
    return jax.make_array_from_callback(
        leaf.shape, mesh.whole, lambda index: leaf[index]
    )


def _shard_ragged(
    leaf: np.ndarray, counts: tuple[int, ...], mesh: ReplicaMesh
) -> PerReplica:
    local = counts[mesh.local_replicas.start : mesh.local_replicas.stop]
    # All shards of a JAX array must have the same shape, so shorter shards are
    # padded to the length of the longest.
    pieces = np.split(leaf, np.cumsum(local)[:-1])
    maximum = max(counts)

    def make_entry(index: Any) -> np.ndarray:
        replica = index[0].indices(len(counts))[0]
        piece = pieces[replica - mesh.local_replicas.start]
        padded = np.zeros((1, maximum, *leaf.shape[1:]), leaf.dtype)
        padded[0, : len(piece)] = piece
        return padded

    shape = (len(counts), maximum, *leaf.shape[1:])
    return PerReplica.of(
        jax.make_array_from_callback(shape, mesh.split, make_entry),
        STACKED,
        shapes=tuple((count, *leaf.shape[1:]) for count in counts),
    )

"""Datasets for custom loops: global batches in, values per replica out."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from keras_strategies._core.batches import HostBatch
from keras_strategies._core.current_step import current_step
from keras_strategies._core.jaxprs.traces import is_tracing
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.rows import fill_replicas, rows_of_replicas
from keras_strategies._core.values import PADDED, ROWS, PerReplica
from keras_strategies._types import Tree
from keras_strategies.data.source import Source, all_rows
from keras_strategies.data.steps import Steps


class DistributedDataset:
    """A dataset whose batches are divided over the replicas.

    Made by `Strategy.experimental_distribute_dataset`. May be iterated again
    and again if what it reads may be: each iteration is an epoch. Iterating
    yields nests of `PerReplica` (of plain arrays, with one replica). On
    several processes it is collective: all take the same number of steps.
    `fit`, `evaluate` and `predict` take it, too.

    Args:
      source: Where the batches come from.
      mesh: The replicas.

    Attributes:
      source: Where the batches come from.

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
        """Starts the next epoch, at its first batch."""
        return self.iterator(self.source.passes.next)

    def iterator(self, epoch: int, start: int = 0) -> "DistributedIterator":
        """Starts anywhere, as after an interruption.

        Args:
          epoch: Number of the epoch, from 0.
          start: Number of steps to leave out.
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
        """The shapes and dtypes of a global batch, rows left open (None)."""
        return _spec_of(self.source)


class DistributedIterator:
    """Iterates over the batches of a `DistributedDataset`.

    Args:
      steps: The steps.
      epoch: Which epoch it reads.
      start: How many steps to leave out.

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
        """The shapes and dtypes of a global batch, rows left open (None)."""
        return _spec_of(self._steps.source)

    def __iter__(self) -> "DistributedIterator":
        """Resumes where it is."""
        return self

    def __next__(self) -> Tree:
        """The next batch, divided over the replicas.

        Raises:
          ValueError: it is called in a replica's function, or in one that JAX
            traces, where one batch would be read for all calls.
          StopIteration: the epoch has ended.
        """
        _check_where()
        epoch, step = self._place
        if self._batches is None:
            self._batches = self._started(epoch, step)
        batch = next(self._batches)
        self._place = (epoch, step + 1)
        return batch

    def _started(self, epoch: int, start: int) -> Iterator[Tree]:
        # Not this object: it could not be collected while the thread waits.
        steps = self._steps
        mesh, source = steps.mesh, steps.source

        def placed(batches: Iterator[HostBatch]) -> Iterator[Tree]:
            source.begin_epoch(epoch, start)
            try:
                for batch in batches:
                    yield divided(batch, mesh)
            finally:
                source.end_epoch()

        return steps.ahead(
            epoch,
            start,
            placed,
            num_bytes=lambda batch: sum(
                leaf.nbytes for leaf in jax.tree.leaves(batch)
            ),
            is_pause=lambda batch: False,
        )

    def get_state(self) -> dict[str, Any]:
        """Where it is; what JSON can hold.

        `set_state` of another iterator, in another process too, resumes from
        there.
        """
        epoch, step = self._place
        seed = self._steps.source.seed
        return {"epoch": epoch, "step": step, "seed": seed}

    def set_state(self, state: dict[str, Any]) -> None:
        """Resumes from where another one was.

        Args:
          state: What `get_state` returned.

        Raises:
          ValueError: not such a state, or one with an order that these data
            cannot have.
        """
        if set(state) != {"epoch", "step", "seed"}:
            raise ValueError(
                "The state of an iterator is what `get_state` returned. "
                f"Received: {state!r}. Pass that."
            )
        self._batches = None
        try:
            self._steps.source.restart(state["seed"])
        except ValueError:
            raise ValueError(
                "An iterator resumes where one over the same kind of data was. "
                "Received: a state with an order that other data have drawn. "
                "Distribute such data as it is of, or begin anew."
            ) from None
        self._place = (state["epoch"], state["step"])

    def get_next(self) -> Tree:
        """The next batch; raises StopIteration at the end, as `next` does."""
        return next(self)

    def get_next_as_optional(self) -> "Optional":
        """The next batch, or an empty `Optional` at the end."""
        try:
            return Optional(next(self), is_filled=True)
        except StopIteration:
            return Optional(None, is_filled=False)


def _spec_of(source: Source) -> Tree:
    part = next(source.read(0, 0, all_rows))
    return jax.tree.map(
        lambda leaf: ((None, *leaf.shape[1:]), leaf.dtype), part.data
    )


def _check_where() -> None:
    """Raises ValueError in a replica's function and in a traced one."""
    is_in_replica = current_step() is not None
    if not is_in_replica and not is_tracing():
        return
    where = "a replica's function" if is_in_replica else "one that JAX traces"
    raise ValueError(
        "The iterator of a distributed dataset is read outside of the "
        "functions that are run on replicas or compiled. Received: `next` in "
        f"{where}, where one batch would be read for all calls. Read it "
        "before, and pass the batch: `strategy.run(step, "
        "args=(next(iterator),))`."
    )


class Optional:
    """A batch, or none.

    Args:
      value: The batch.
      is_filled: Whether there is one.
    """

    def __init__(self, value: Tree, *, is_filled: bool) -> None:
        self._value = value
        self._is_filled = is_filled

    def has_value(self) -> bool:
        """Whether there is a batch."""
        return self._is_filled

    def get_value(self) -> Tree:
        """The batch.

        Raises:
          ValueError: there is none: the dataset has ended.
        """
        if not self._is_filled:
            raise ValueError(
                "An empty Optional has no value. Received: `get_value()` at "
                "the end of the dataset. Ask `has_value()` first."
            )
        return self._value


def divided(batch: HostBatch, mesh: ReplicaMesh) -> Tree:
    """A global batch on the devices, each replica's rows on its own."""
    if mesh.num_replicas == 1:
        if mesh.cores_per_replica == 1:
            return jax.device_put(batch.data, mesh.devices[0])
        return jax.tree.map(lambda leaf: _on_all_cores(leaf, mesh), batch.data)
    counts = counts_of(batch, mesh)
    if len(set(counts)) == 1:
        return jax.tree.map(
            lambda leaf: _even(leaf, sum(counts), mesh), batch.data
        )
    return jax.tree.map(lambda leaf: _uneven(leaf, counts, mesh), batch.data)


def counts_of(batch: HostBatch, mesh: ReplicaMesh) -> tuple[int, ...]:
    """How many rows each replica gets of a batch."""
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
    """The rows of a replica that is alone."""
    if mesh.num_processes == 1:
        return jax.device_put(leaf, mesh.whole)
    return jax.make_array_from_callback(
        leaf.shape, mesh.whole, lambda index: leaf[index]
    )


def _even(leaf: np.ndarray, rows: int, mesh: ReplicaMesh) -> PerReplica:
    first = rows // mesh.num_readers * mesh.reader_index

    def rows_of(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(rows)
        return leaf[start - first : stop - first]

    array = jax.make_array_from_callback(
        (rows, *leaf.shape[1:]), mesh.split, rows_of
    )
    return PerReplica.of(array, ROWS)


def _uneven(
    leaf: np.ndarray, counts: tuple[int, ...], mesh: ReplicaMesh
) -> PerReplica:
    own = counts[mesh.local_replicas.start : mesh.local_replicas.stop]
    pieces = np.split(leaf, np.cumsum(own)[:-1])
    most = max(counts)

    def entry(index: Any) -> np.ndarray:
        replica = index[0].indices(len(counts))[0]
        piece = pieces[replica - mesh.local_replicas.start]
        padded = np.zeros((1, most, *leaf.shape[1:]), leaf.dtype)
        padded[0, : len(piece)] = piece
        return padded

    shape = (len(counts), most, *leaf.shape[1:])
    return PerReplica.of(
        jax.make_array_from_callback(shape, mesh.split, entry),
        PADDED,
        shapes=tuple((count, *leaf.shape[1:]) for count in counts),
    )

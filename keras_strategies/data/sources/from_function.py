"""Datasets that a user's function creates, with one batch per replica."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np

from keras_strategies._types import Tree
from keras_strategies.data.batch_spec import find_row_kind
from keras_strategies.data.source import Cut, Part, Reading, Source, Summary
from keras_strategies.data.sources.iterables import check_batches, host_batches
from keras_strategies.spmd import host_arrays
from keras_strategies.spmd.batches import num_rows
from keras_strategies.spmd.mesh import ReplicaMesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputContext:
    """Information about the job that is passed to a dataset function.

    Attributes:
      num_input_pipelines: Number of different datasets in the job: one per
        process. Processes that have cores of the same replicas create the same
        dataset, which counts only once.
      input_pipeline_id: Index of this dataset among them.
      num_replicas_in_sync: Number of replicas in all processes.

    Example:
      ```python
      def dataset_fn(context):
          rows = context.get_per_replica_batch_size(64)
          shard = context.num_input_pipelines, context.input_pipeline_id
          return dataset.unbatch().shard(*shard).batch(rows)

      data = strategy.distribute_datasets_from_function(dataset_fn)
      ```
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the number of rows in one replica's batch.

        Args:
          global_batch_size: Number of rows for all replicas together.

        Raises:
          ValueError: if the number of replicas does not divide
            `global_batch_size`.
        """
        rows, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                "`global_batch_size` must be a multiple of the number of "
                f"replicas. Received: {global_batch_size} for "
                f"{self.num_replicas_in_sync} replicas. Choose a multiple, or "
                "use `experimental_distribute_dataset` for any size."
            )
        return rows


class FunctionSource(Source):
    """A source that reads the datasets that a user's function creates.

    Each replica receives entire batches.

    Args:
      dataset_fn: The function that creates a dataset.
      mesh: The mesh of the replicas.
      is_per_replica: Whether `dataset_fn` is called once for each replica.

    Raises:
      TypeError: if `dataset_fn` is not callable, or returns an object that does
        not yield batches.
      ValueError: if `is_per_replica` is True in a job with several processes.
    """

    kind = "a dataset from a function"

    def __init__(
        self,
        dataset_fn: Callable[[InputContext], Iterable[Tree]],
        mesh: ReplicaMesh,
        *,
        is_per_replica: bool = False,
    ) -> None:
        if not callable(dataset_fn):
            raise TypeError(
                "`dataset_fn` must be a function that returns a dataset. "
                f"Received: an object of type {type(dataset_fn).__name__}. If "
                "it is a dataset, use `experimental_distribute_dataset`."
            )
        self._num_replicas = mesh.replicas_per_process
        self.is_process_local = mesh.num_processes > 1
        count, pipelines = mesh.num_readers, [mesh.reader_index]
        if is_per_replica:
            if mesh.num_processes > 1:
                raise ValueError(
                    "`InputReplicationMode.PER_REPLICA` can only be used in a "
                    "job with a single process. Received: a job with "
                    f"{mesh.num_processes} processes. Use `PER_WORKER`."
                )
            count = mesh.num_replicas
            pipelines = range(count)
        context = InputContext(
            num_input_pipelines=count, num_replicas_in_sync=mesh.num_replicas
        )
        self._datasets = []
        for i in pipelines:
            place = dataclasses.replace(context, input_pipeline_id=i)
            self._datasets.append(dataset_fn(place))
            check_batches(self._datasets[-1])

    def summary(self) -> Summary:
        """See `Source.summary`."""
        return dataclasses.replace(super().summary(), reading=Reading.REPLICAS)

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        """See `Source.read`."""
        del epoch, cut
        return itertools.islice(self._read_steps(), start, None)

    def _read_steps(self) -> Iterator[Part]:
        count = self._num_replicas
        iterators = [host_batches(dataset) for dataset in self._datasets]
        if len(iterators) == 1:
            iterators *= count
        while True:
            # Makes copies, because a dataset may reuse its arrays for the next
            # batch.
            parts = [
                jax.tree.map(host_arrays.copy_if_mutable, next(batches, None))
                for batches in iterators
            ]
            present = [part for part in parts if part is not None]
            if not present:
                return
            for part in present:
                num_rows(part)  # Raises an error unless `part` is a batch.
            _check_equal(present)
            empty = jax.tree.map(lambda leaf: leaf[:0], present[0])
            filled = [empty if part is None else part for part in parts]
            counts = tuple(
                0 if part is None else num_rows(part) for part in parts
            )
            data = jax.tree.map(lambda *leaves: np.concatenate(leaves), *filled)
            yield Part(data=data, rows=sum(counts), counts=counts)


def _check_equal(parts: list[Tree]) -> None:
    kinds = list(map(find_row_kind, parts))
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(
            "The batches of a step must differ only in their number of rows. "
            f"Received: {[str(kind) for kind in kinds]}. Make the dataset "
            "yield batches with the same structure, row shapes and dtypes."
        )

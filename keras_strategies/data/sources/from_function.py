"""Datasets whose batches are a replica's, made by a function."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from keras_strategies._core import host_arrays
from keras_strategies._core.batches import num_rows
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._types import Tree
from keras_strategies.data.batch_spec import rows_kind
from keras_strategies.data.source import Cut, Part, Source
from keras_strategies.data.source_summary import Reading, Summary
from keras_strategies.data.sources.iterables import check_batches, host_batches


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputContext:
    """What a function that makes a dataset may ask.

    Attributes:
      num_input_pipelines: Number of datasets that are made, one a process.
        Processes that have cores of the same replicas make the same one.
      input_pipeline_id: Which of them this one is.
      num_replicas_in_sync: Number of replicas, of all processes.

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
        """Rows of one replica's batch.

        Args:
          global_batch_size: Rows of all replicas together.

        Raises:
          ValueError: the replicas cannot share them evenly.
        """
        rows, rest = divmod(global_batch_size, self.num_replicas_in_sync)
        if rest:
            raise ValueError(
                "The replicas share a global batch evenly here. Received: "
                f"global_batch_size={global_batch_size} for "
                f"{self.num_replicas_in_sync} replicas. Choose a multiple, or "
                "use `experimental_distribute_dataset`, which takes any size."
            )
        return rows


class FunctionSource(Source):
    """The datasets that a function makes: each replica takes whole batches.

    Args:
      dataset_fn: Makes the dataset.
      mesh: The replicas.
      is_per_replica: Whether it makes one for each replica.
      prepare: Makes of each dataset the one that is read.

    Raises:
      TypeError: `dataset_fn` cannot be called, or what it returns does not
        yield batches.
      ValueError: several datasets on several processes.
    """

    kind = "a dataset from a function"

    def __init__(
        self,
        dataset_fn: Callable[[InputContext], Iterable[Tree]],
        mesh: ReplicaMesh,
        *,
        is_per_replica: bool = False,
        prepare: Callable[[Any], Any] = lambda dataset: dataset,
    ) -> None:
        if not callable(dataset_fn):
            raise TypeError(
                "A function that makes a dataset is needed. Received: an "
                f"object of type {type(dataset_fn).__name__}. Pass a dataset "
                "itself to `experimental_distribute_dataset`."
            )
        self._num_replicas = mesh.replicas_per_process
        self.is_process_local = mesh.num_processes > 1
        count, pipelines = mesh.num_readers, [mesh.reader_index]
        if is_per_replica:
            if mesh.num_processes > 1:
                raise ValueError(
                    "A dataset for each replica is for one process. Received: "
                    f"`PER_REPLICA` in a job of {mesh.num_processes} "
                    "processes. Use "
                    "`InputReplicationMode.PER_WORKER`."
                )
            count = mesh.num_replicas
            pipelines = range(count)
        context = InputContext(
            num_input_pipelines=count, num_replicas_in_sync=mesh.num_replicas
        )
        self._datasets = [
            prepare(
                dataset_fn(dataclasses.replace(context, input_pipeline_id=i))
            )
            for i in pipelines
        ]
        for dataset in self._datasets:
            check_batches(dataset)

    def summary(self) -> Summary:
        """See `Source.summary`."""
        return dataclasses.replace(super().summary(), reading=Reading.REPLICAS)

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        """See `Source.read`."""
        del epoch, cut
        return itertools.islice(self._steps(), start, None)

    def _steps(self) -> Iterator[Part]:
        count = self._num_replicas
        iterators = [host_batches(dataset) for dataset in self._datasets]
        if len(iterators) == 1:
            iterators *= count
        while True:
            # Copies: the next one may be in the same arrays.
            parts = [
                jax.tree.map(host_arrays.owned, next(batches, None))
                for batches in iterators
            ]
            given = [part for part in parts if part is not None]
            if not given:
                return
            for part in given:
                num_rows(part)  # Refuses what is no batch.
            _check_alike(given)
            nothing = jax.tree.map(lambda leaf: leaf[:0], given[0])
            whole = [nothing if part is None else part for part in parts]
            counts = tuple(
                0 if part is None else num_rows(part) for part in parts
            )
            data = jax.tree.map(lambda *leaves: np.concatenate(leaves), *whole)
            yield Part(data=data, rows=sum(counts), counts=counts)


def _check_alike(parts: list[Tree]) -> None:
    kinds = list(map(rows_kind, parts))
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(
            "The batches of a step may differ in their number of rows only. "
            f"Received: {[str(kind) for kind in kinds]}. Check what the "
            "dataset yields."
        )

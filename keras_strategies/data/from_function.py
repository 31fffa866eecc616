"""Datasets whose batches are a replica's, made by a function."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from keras_strategies._core.batches import num_rows
from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._core.values import PerReplica
from keras_strategies.data.distributed import (
    DistributedDataset,
    DistributedIterator,
    divided,
    host_batches,
)

Tree = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputContext:
    """What a function that makes a dataset may ask.

    Attributes:
      num_input_pipelines: Number of datasets that are made, one a process.
      input_pipeline_id: Which of them this one is.
      num_replicas_in_sync: Number of replicas, of all processes.
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


class DatasetFromFunction(DistributedDataset):
    """Made by `Strategy.distribute_datasets_from_function`.

    Args:
      dataset_fn: Makes the dataset.
      mesh: The replicas.
    """

    def __init__(
        self,
        dataset_fn: Callable[[InputContext], Iterable[Tree]],
        mesh: ReplicaMesh,
    ) -> None:
        if not callable(dataset_fn):
            raise TypeError(
                "A function that makes a dataset is needed. Received: an "
                f"object of type {type(dataset_fn).__name__}. Pass a dataset "
                "itself to `experimental_distribute_dataset`."
            )
        context = InputContext(num_replicas_in_sync=mesh.num_replicas)
        super().__init__(dataset_fn(context), mesh)

    def __iter__(self) -> "DistributedIterator":
        """Starts at the first batch."""
        return _Iterator(host_batches(self._dataset), self._mesh)


class _Iterator(DistributedIterator):
    """Gives each replica the next batch."""

    def __next__(self) -> Tree:
        """The next batches, one for each replica."""
        count = self._mesh.num_replicas
        parts = []
        for batch in self._batches:
            num_rows(batch)  # Refuses what is no batch.
            parts.append(batch)
            if len(parts) == count:
                break
        if not parts:
            raise StopIteration
        if count == 1:
            return divided(parts[0], 1, 1, self._mesh)
        _check_alike(parts)
        while len(parts) < count:
            parts.append(jax.tree.map(lambda leaf: leaf[:0], parts[0]))
        return jax.tree.map(self._one_value, *parts)

    def _one_value(self, *leaves: np.ndarray) -> PerReplica:
        if len({leaf.shape for leaf in leaves}) == 1:
            whole = np.concatenate(leaves)
            return divided(whole, len(whole), len(whole), self._mesh)
        return PerReplica(
            [
                jax.device_put(leaf, device)
                for leaf, device in zip(leaves, self._mesh.devices, strict=True)
            ]
        )


def _check_alike(parts: list[Tree]) -> None:
    kinds = [
        (
            jax.tree.structure(part),
            [(leaf.shape[1:], leaf.dtype) for leaf in jax.tree.leaves(part)],
        )
        for part in parts
    ]
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(
            "The batches of a step may differ in their number of rows only. "
            f"Received: {[str(kind) for kind in kinds]}. Check what the "
            "dataset yields."
        )

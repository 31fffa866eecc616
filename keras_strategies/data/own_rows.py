"""Rows of other libraries' datasets and loaders."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from keras_strategies._types import Tree
from keras_strategies.data.options import AutoShardPolicy
from keras_strategies.data.source import (
    Cut,
    Part,
    Reading,
    Source,
    Summary,
    all_rows,
)


def stack_rows(rows: Sequence[Tree], fix: str) -> Tree:
    """Stacks rows into a batch.

    Args:
      rows: The rows, as nests of arrays with equal structure and shapes.
      fix: Advice to the user, which ends the error message if the rows differ.

    Raises:
      ValueError: if the rows differ in structure or shape.
    """
    try:
        return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    except ValueError as error:
        raise ValueError(
            "All rows of a batch must have the same structure and shapes. "
            "Received: rows with the shapes "
            f"{[jax.tree.map(np.shape, row) for row in rows[:8]]}. {fix}"
        ) from error


class LoadedSource(Source):
    """A source that reads batches from another library's dataset or loader.

    The rows of each batch are divided among the processes.

    Args:
      batches: The object that reads the batches. It has `read` and
        `batch_size`, like a `Source`; `length` and `num_rows`, the numbers of
        batches and rows in an epoch (None if unknown); `is_by_rows`, whether it
        reads only the rows that `cut` selects; and `has_checksums`, which this
        class sets.
      num_processes: Number of processes that read the data.
      policy: AUTO, DATA or OFF.
      is_divided: Whether the loader is already sharded: it yields only this
        process's rows.
    """

    def __init__(
        self,
        batches: Any,
        num_processes: int,
        policy: AutoShardPolicy,
        *,
        is_divided: bool,
    ) -> None:
        self._batches = batches
        self.is_process_local = is_divided or is_local(num_processes, policy)
        self.batch_size = batches.batch_size
        if is_divided and self.batch_size:
            self.batch_size *= num_processes
        if not self.is_process_local:
            self.num_batches = batches.length
            batches.has_checksums = num_processes > 1

    def summary(self) -> Summary:
        """See `Source.summary`."""
        summary = super().summary()
        if self.is_process_local or not self._batches.is_by_rows:
            return summary
        rows = self._batches.num_rows
        return dataclasses.replace(summary, reading=Reading.ROWS, num_rows=rows)

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        """See `Source.read`."""
        if self.is_process_local:
            cut = all_rows
        return self._batches.read(epoch, start, cut)


def is_local(num_processes: int, policy: AutoShardPolicy) -> bool:
    """Returns whether the policy makes the data process-local."""
    return num_processes > 1 and policy is AutoShardPolicy.OFF

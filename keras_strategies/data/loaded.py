"""Sources that read the datasets and loaders of other libraries."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from keras_strategies.data.options import AutoShardPolicy
from keras_strategies.data.source import Cut, Part, Source, all_rows
from keras_strategies.data.source_summary import Reading, Summary


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
        if not self._batches.is_by_rows:
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


def check_by_rows(policy: AutoShardPolicy, what: str) -> None:
    """Raises ValueError for FILE and HINT, which do not divide batches by rows.

    Args:
      policy: The policy.
      what: The kind of data, which begins the error message, such as "A grain
        dataset".
    """
    if policy in (AutoShardPolicy.FILE, AutoShardPolicy.HINT):
        raise ValueError(
            f"{what} must be divided by rows. Received: AutoShardPolicy."
            f"{AutoShardPolicy(policy).name}. Use AUTO or DATA, or OFF if each "
            "process has different rows."
        )

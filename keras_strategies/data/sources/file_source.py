"""The source that reads the files of `ks.data.files`."""

import dataclasses
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_strategies.data.options import AutoShardPolicy
from keras_strategies.data.prefetch import Rebatcher
from keras_strategies.data.source import (
    Cut,
    Part,
    Source,
    Summary,
    all_rows,
    take,
)
from keras_strategies.data.sources.file_rows import (
    count_rows,
    read_files,
    shuffle_windows,
)
from keras_strategies.data.sources.files import Files
from keras_strategies.spmd.batches import num_rows


class FilesSource(Source):
    """A source that reads the rows of files.

    Args:
      data: The description of the files.
      num_processes: Number of processes that read the files.
      process_index: Index of this process among them.
      seed: The seed for shuffling if `data` has no seed. Must be the same in
        all processes.
      policy: With FILE, each process reads entire files; with DATA, its own
        rows of each batch; with OFF, all rows. AUTO is FILE if there is at
        least one file for each process, else DATA.

    Raises:
      ValueError: if the policy is FILE and there are fewer files than
        processes.
      OSError: if a file could not be read.
    """

    kind = "files"

    def __init__(
        self,
        data: Files,
        *,
        num_processes: int = 1,
        process_index: int = 0,
        seed: int = 0,
        policy: AutoShardPolicy = AutoShardPolicy.AUTO,
    ) -> None:
        self._data = data
        self._num_processes = num_processes
        self._process_index = process_index
        self._seed = (seed if data.seed is None else data.seed) % 2**64
        self._is_by_file = _is_by_file(data, num_processes, policy)
        self.is_process_local = self._is_by_file or (
            num_processes > 1 and policy is AutoShardPolicy.OFF
        )
        self.batch_size = data.batch_size
        self._counts = count_rows(data)
        if self._counts and not self.is_process_local:
            whole, rest = divmod(sum(self._counts.values()), data.batch_size)
            self.num_batches = whole + bool(rest and not data.drop_remainder)

    def summary(self) -> Summary:
        """See `Source.summary`."""
        changed: dict[str, Any] = {}
        if self._is_by_file:
            changed["applied"] = AutoShardPolicy.FILE
            changed["reason"] = "there is a file for each process"
        if not self._data.window:
            processes = range(self._num_processes)
            changed["files"] = tuple(map(self.assigned_files, processes))
        num_rows = sum(self._counts.values()) or None
        return dataclasses.replace(
            super().summary(), num_rows=num_rows, **changed
        )

    @property
    def seed(self) -> int:
        """See `Source.seed`."""
        return self._seed

    def restart(self, seed: str | int | None) -> None:
        """See `Source.restart`."""
        if seed is not None:
            self._seed = int(seed)

    def assigned_files(
        self, process_index: int, epoch: int = 0
    ) -> tuple[str, ...]:
        """Returns the files that a process reads in an epoch, in reading order.

        Args:
          process_index: Index of the process.
          epoch: Number of the epoch, from 0.
        """
        paths = self._data.paths
        if self._data.window:
            rng = np.random.default_rng((self._seed, epoch))
            paths = tuple(paths[i] for i in rng.permutation(len(paths)))
        if not self._is_by_file:
            return paths
        return paths[process_index :: self._num_processes]

    def read(self, epoch: int, start: int, cut: Cut) -> Iterator[Part]:
        """See `Source.read`."""
        data, size = self._data, self._data.batch_size
        reader = 0
        if self._is_by_file:
            size = -(-size // self._num_processes)
            reader = 1 + self._process_index
        if self.is_process_local:
            cut = all_rows
        paths = self.assigned_files(self._process_index, epoch)
        if data.window:
            key = self._seed, epoch, reader
            rows = shuffle_windows(data, paths, self._counts, start * size, key)
        else:
            rows = read_files(data, paths, self._counts, start * size)
        batches = Rebatcher(rows)
        while (batch := batches.take(size)) is not None:
            if data.drop_remainder and num_rows(batch) < size:
                return
            yield take(
                batch,
                cut,
                has_checksums=self._num_processes > 1,
                is_copied=True,
            )


def _is_by_file(
    data: Files, num_processes: int, policy: AutoShardPolicy
) -> bool:
    """Returns whether each process reads entire files, as under FILE."""
    by_rows = (AutoShardPolicy.DATA, AutoShardPolicy.OFF)
    if num_processes == 1 or policy in by_rows:
        return False
    if len(data.paths) >= num_processes:
        return True
    problem = (
        "To divide a dataset by files, there must be at least one file for "
        "each process. Received: "
        f"{len(data.paths)} files for {num_processes} processes. "
    )
    if policy is AutoShardPolicy.FILE:
        raise ValueError(f"{problem}Write more files, or use AUTO or DATA.")
    warnings.warn(
        f"{problem}AutoShardPolicy.AUTO becomes DATA: each process reads all "
        "files and uses only its own rows of each batch. Write more files, or "
        "set AutoShardPolicy.DATA.",
        stacklevel=4,
    )
    return False

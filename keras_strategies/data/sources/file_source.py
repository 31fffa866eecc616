"""The source that reads the files of `ks.data.files`."""

import dataclasses
import functools
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_strategies._types import Tree
from keras_strategies.data.options import AutoShardPolicy
from keras_strategies.data.own_rows import ProcessRows
from keras_strategies.data.source import (
    Cut,
    Part,
    Reading,
    Source,
    Summary,
    all_rows,
)
from keras_strategies.data.sources.file_rows import (
    ArrayRows,
    RecordRows,
    count_array_rows,
    count_records,
    iterate_batches,
)
from keras_strategies.data.sources.files import ARRAYS, Files


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
      ValueError: if the policy is HINT; if it is FILE and there are fewer files
        than processes; or if the files do not contain the same arrays.
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
        self._counts: dict[str, int] = {}
        if data.reader in ARRAYS:
            self._counts = count_array_rows(data)
        elif data.count is not False and not self.is_process_local:
            self._counts = {p: count_records(data, p) for p in data.paths}
        if self._counts and not self.is_process_local:
            whole, rest = divmod(sum(self._counts.values()), data.batch_size)
            self.num_batches = whole + bool(rest and not data.drop_remainder)

    def summary(self) -> Summary:
        """See `Source.summary`."""
        summary, data = super().summary(), self._data
        files = dict.fromkeys(range(self._num_processes), data.paths)
        if self._is_by_file:
            files = {process: self.assigned_files(process) for process in files}
            reason = "there is a file for each process"
            summary = Summary(applied=AutoShardPolicy.FILE, reason=reason)
        is_array = data.reader in ARRAYS
        note = "The files are shuffled again in each epoch."
        return dataclasses.replace(
            summary,
            reading=Reading.ROWS if is_array else Reading.PIPELINE,
            num_rows=sum(self._counts.values()) or None,
            files=files,
            notes=(note,) if data.window else (),
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
        kind = ArrayRows if data.reader in ARRAYS else RecordRows
        rows = kind(data, paths, self._counts)
        key, process_rows = (self._seed, epoch, reader), ProcessRows()
        drawn = iterate_batches(rows, start * size, size, data.window, key)
        for batch in drawn:
            if len(batch) < size and data.drop_remainder:
                return
            ends = f"{rows.label(batch[0])} {rows.label(batch[-1])}"
            read = functools.partial(_read, rows, batch)
            checksum = zlib.crc32(ends.encode())
            yield process_rows.make_part(read, len(batch), cut, checksum)


def _read(
    rows: ArrayRows | RecordRows, batch: list[Any], begin: int, end: int
) -> Tree:
    return rows.read(batch[begin:end])


def _is_by_file(
    data: Files, num_processes: int, policy: AutoShardPolicy
) -> bool:
    """Returns whether each process reads entire files, as under FILE."""
    if policy is AutoShardPolicy.HINT:
        raise ValueError(
            "HINT needs a `tf.data.Dataset` with `shard(SHARD_HINT, ...)`. "
            "`ks.data.files` has none. Use AUTO, FILE, DATA or OFF."
        )
    by_rows = (AutoShardPolicy.DATA, AutoShardPolicy.OFF)
    if num_processes == 1 or policy in by_rows:
        return False
    if len(data.paths) >= num_processes:
        return True
    reason = (
        "To divide a dataset by files, there must be at least one file for "
        "each process. Received: "
        f"{len(data.paths)} files for {num_processes} processes. "
    )
    if policy is AutoShardPolicy.FILE:
        raise ValueError(f"{reason}Write more files, or use AUTO or DATA.")
    cost = "opens all files and reads its own rows of each batch"
    if data.reader not in ARRAYS:
        cost = "reads all files and uses only its own rows of each batch"
    warnings.warn(
        f"{reason}AutoShardPolicy.AUTO becomes DATA: each process "
        f"{cost}. Write more files, or set AutoShardPolicy.DATA.",
        stacklevel=4,
    )
    return False

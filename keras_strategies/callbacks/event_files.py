"""Event files of scalars for TensorBoard, written without TensorFlow.

tensorboardX's `RecordWriter` encodes the records. Its `SummaryWriter` is not
used, because it writes in a background thread: if that thread dies because the
disk is full, the `SummaryWriter` blocks forever.
"""

import contextlib
import importlib.util
import os
import socket
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

_FLUSH_S = 60.0


def check_installed() -> None:
    """Raises ImportError unless tensorboardX is installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise ImportError(
            "`Scalars` needs tensorboardX to write files for TensorBoard, but "
            "it is not installed. Run "
            "`pip install tensorboardX`."
        )


class Points:
    """A writer of data points for TensorBoard.

    Each call of `fit` or `evaluate` starts a new file. Points on a local disk
    can be read immediately. Points in a bucket (`gs://`, `s3://`) appear within
    a minute, because a bucket accepts only complete files. If writing fails,
    `Points` warns once and drops all further points until `close`.

    Args:
      directory: The directory to write to, created if needed; None to write no
        files.
    """

    def __init__(self, directory: str | None) -> None:
        self._records: Any = None
        self._directory = directory
        self._is_remote = directory is not None and "://" in directory
        # Libraries that access buckets raise various types of exceptions.
        self._errors = Exception if self._is_remote else OSError
        self._flushed = 0.0
        self._is_given_up = False
        self._stale: int | None = None

    def open(self) -> None:
        """Starts a new file.

        Raises:
          OSError: if the file cannot be created; another error for a bucket.
        """
        self.close()
        if self._directory is not None:
            self._begin(self._directory)

    def discard_from(self, step: int) -> None:
        """Declares the points of a step, and of all later steps, obsolete.

        The next file tells TensorBoard to drop these points from earlier files.

        Args:
          step: The first global step whose points are dropped.
        """
        self._stale = step

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Adds one point for each value at a step.

        Args:
          step: The global step.
          values: The value for each tag.
        """
        if self._directory is None or self._is_given_up or not values:
            return
        with self._giving_up():
            if self._records is None:
                self._begin(self._directory)
            if self._stale is not None:
                # When TensorBoard reads a START event, it drops the points in
                # earlier files from this step onward.
                start: Any = {"status": "START"}
                self._append(step=self._stale, session_log=start)
                self._stale = None
            points = [{"tag": t, "simple_value": v} for t, v in values.items()]
            self._append(step=step, summary={"value": points})

    def flush(self) -> None:
        """Blocks until all points are on disk or uploaded to the bucket."""
        with self._giving_up():
            if self._records is not None:
                self._records.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        """Closes the open file, if any, and uploads it if it is in a bucket."""
        records, self._records = self._records, None
        with self._giving_up():
            if records is not None:
                records.close()
        self._is_given_up = False

    def __del__(self) -> None:
        # The file is still open if a fit was interrupted before `close`.
        if self._records is not None:
            with contextlib.suppress(Exception):
                self._records.close()

    def _begin(self, directory: str) -> None:
        from tensorboardX import record_writer

        record_writer.directory_check(directory)
        # TensorBoard reads files in the order of their names, so names begin
        # with the time.
        seconds, nanos = divmod(time.time_ns(), 1_000_000_000)
        host, process = socket.gethostname(), os.getpid()
        name = f"{seconds:010d}.{nanos:09d}.{host}.{process}"
        path = os.path.join(directory, f"events.out.tfevents.{name}")
        self._records = record_writer.RecordWriter(path)
        self._flushed = time.monotonic()
        self._append(file_version="brain.Event:2")

    def _append(self, **event: object) -> None:
        from tensorboardX.proto import event_pb2

        # protobuf creates its message classes at import time, so type checkers
        # cannot see them.
        messages: Any = event_pb2
        record = messages.Event(wall_time=time.time(), **event)
        self._records.write(record.SerializeToString())
        if not self._is_remote:
            # Passes the record to the operating system, so that the record
            # survives if this process is killed. `RecordWriter.flush` would
            # also wait for the disk.
            self._records._writer.flush()
        elif time.monotonic() - self._flushed > _FLUSH_S:
            self._records.flush()
            self._flushed = time.monotonic()

    @contextlib.contextmanager
    def _giving_up(self) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            if self._is_given_up:
                return
            self._is_given_up = True
            warnings.warn(
                "`Scalars` could not write to its directory, so it writes no "
                f"further points in this run. Received: {self._directory!r}: "
                f"{error!r}. Free space on the disk, or use another directory.",
                RuntimeWarning,
                stacklevel=4,
            )

"""Files of scalars that TensorBoard reads, written without TensorFlow.

tensorboardX frames the records. Its `SummaryWriter` is not used: it writes in
a thread, which a full disk ends, and then waits for ever.
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
            "`Scalars` writes TensorBoard's files with tensorboardX. Received: "
            "no module `tensorboardX`. Run `pip install tensorboardX`."
        )


class Points:
    """The points of a folder, in a new file for each loop that adds some.

    What is added can be read at once; in a bucket (`gs://`, `s3://`), whose
    files are sent whole, within a minute. Where that fails, `Points` warns
    once and leaves out the rest until `close`.

    Args:
      folder: The folder, made if it is not there; None to write nothing.
    """

    def __init__(self, folder: str | None) -> None:
        self._records: Any = None
        self._folder = folder
        self._is_remote = folder is not None and "://" in folder
        # Libraries for buckets have errors of their own.
        self._errors = Exception if self._is_remote else OSError
        self._flushed = 0.0
        self._is_given_up = False
        self._stale: int | None = None

    def open(self) -> None:
        """Begins a file now.

        Raises:
          ValueError: it cannot be made.
        """
        self.close()
        if self._folder is None:
            return
        try:
            self._begin(self._folder)
        except self._errors as error:
            reason = _described(error)
            raise ValueError(
                "`Scalars` must be able to write to its folder. Received: "
                f"{self._folder!r}: {reason}. Make it a folder that this "
                "process may write to, on a disk with free space."
            ) from error

    def discard_from(self, step: int) -> None:
        """Makes the next file the only one with points from a step on."""
        self._stale = step

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Adds points.

        Args:
          step: The global step.
          values: A number for each tag.
        """
        if self._folder is None or self._is_given_up or not values:
            return
        with self._giving_up():
            if self._records is None:
                self._begin(self._folder)
            if self._stale is not None:
                # TensorBoard forgets what earlier files say of these steps.
                start: Any = {"status": "START"}
                self._append(step=self._stale, session_log=start)
                self._stale = None
            points = [
                {"tag": tag, "simple_value": value}
                for tag, value in values.items()
            ]
            self._append(step=step, summary={"value": points})

    def flush(self) -> None:
        """Returns when all points are on the disk, or sent."""
        with self._giving_up():
            if self._records is not None:
                self._records.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        """Ends the file, if there is one; in a bucket, sends it."""
        records, self._records = self._records, None
        with self._giving_up():
            if records is not None:
                records.close()
        self._is_given_up = False

    def __del__(self) -> None:
        # A fit that was interrupted ends no file.
        if self._records is not None:
            with contextlib.suppress(Exception):
                self._records.close()

    def _begin(self, folder: str) -> None:
        from tensorboardX import record_writer

        record_writer.directory_check(folder)
        # TensorBoard reads files in the order of their names.
        seconds, nanos = divmod(time.time_ns(), 1_000_000_000)
        host, process = socket.gethostname(), os.getpid()
        name = f"{seconds:010d}.{nanos:09d}.{host}.{process}"
        path = os.path.join(folder, f"events.out.tfevents.{name}")
        self._records = record_writer.RecordWriter(path)
        self._flushed = time.monotonic()
        self._append(file_version="brain.Event:2")

    def _append(self, **event: object) -> None:
        from tensorboardX.proto import event_pb2

        # Made of a description when it is imported: no checker sees it.
        messages: Any = event_pb2
        record = messages.Event(wall_time=time.time(), **event)
        self._records.write(record.SerializeToString())
        if not self._is_remote:
            # To the operating system: a process that is killed loses nothing.
            # `RecordWriter.flush` would wait for the disk.
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
                "`Scalars` could not write its points, and leaves out the rest "
                f"of this run's. Received: {self._folder!r}: "
                f"{_described(error)}. Make room on the disk, or choose "
                "another folder.",
                RuntimeWarning,
                stacklevel=4,
            )


def _described(error: Exception) -> str:
    """Returns an error's text; with its class where no system raised it."""
    if isinstance(error, OSError):
        return str(error)
    return f"{type(error).__name__}: {error}"

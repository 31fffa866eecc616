"""Files of scalars that TensorBoard reads, written without TensorFlow.

tensorboardX frames the records. Its `SummaryWriter` is not used: it writes in
a thread, which a full disk ends, and then waits for ever.
"""

import contextlib
import importlib.util
import os
import pathlib
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


class EventFile:
    """A new file of points in a folder of TensorBoard's.

    What is written can be read at once; in a bucket (`gs://`, `s3://`), whose
    files are sent whole, within a minute.

    Args:
      folder: Where; it is made if it is not there.

    Raises:
      OSError: the file cannot be made, or, of `discard_from` and `write`, not
        be written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        from tensorboardX import record_writer
        from tensorboardX.proto import event_pb2

        # Made of a description when it is imported: no checker sees them.
        messages: Any = event_pb2
        self._event = messages.Event
        self._log = messages.SessionLog
        folder = os.fspath(folder)
        prefix = folder.split(":")[0]
        self._is_remote = prefix in record_writer.REGISTERED_FACTORIES
        with self._raised_as_os_errors():
            record_writer.directory_check(folder)
            path = f"{folder}/{_name()}" if self._is_remote else _path(folder)
            self._records: Any = record_writer.RecordWriter(path)
        self._flushed = time.monotonic()
        self._append(self._event(file_version="brain.Event:2"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Adds the points of a step.

        Args:
          step: The global step.
          values: A number for each tag.
        """
        event = self._event(step=step)
        for tag, value in values.items():
            event.summary.value.add(tag=tag, simple_value=value)
        self._append(event)

    def discard_from(self, step: int) -> None:
        """Makes TensorBoard forget what earlier files say of these steps.

        Args:
          step: The first of them.
        """
        start = self._log(status=self._log.START)
        self._append(self._event(step=step, session_log=start))

    def flush(self) -> None:
        """Returns when all that was written is on the disk, or sent."""
        with self._raised_as_os_errors():
            self._records.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Ends the file; in a bucket, sends it."""
        records, self._records = self._records, None
        if records is not None:
            with self._raised_as_os_errors():
                records.close()

    def __del__(self) -> None:
        # A fit that was interrupted ends no file.
        with contextlib.suppress(AttributeError, OSError):
            self.close()

    def _append(self, event: Any) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        if not self._is_remote:
            # To the operating system: a process that is killed loses nothing.
            # `RecordWriter.flush` would wait for the disk.
            self._records._writer.flush()
        elif time.monotonic() - self._flushed > _FLUSH_S:
            self.flush()

    @contextlib.contextmanager
    def _raised_as_os_errors(self) -> Iterator[None]:
        """Libraries for buckets have errors of their own."""
        try:
            yield
        except Exception as error:
            if isinstance(error, OSError) or not self._is_remote:
                raise
            raise OSError(f"{type(error).__name__}: {error}") from error


class Points:
    """The points of a folder, in a new file for each loop that adds some.

    Args:
      folder: Where; None to write nothing.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._file: EventFile | None = None
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
            self._file = EventFile(self._folder)
        except OSError as error:
            raise ValueError(
                "`Scalars` must be able to write to its folder. Received: "
                f"{self._folder!r}: {error}. Make it a folder that this "
                "process may write to, on a disk with free space."
            ) from error

    def discard_from(self, step: int) -> None:
        """Makes the next file the only one with points from a step on."""
        self._stale = step

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Adds points; where that fails, warns once and continues without.

        Args:
          step: The global step.
          values: A number for each tag.
        """
        if self._folder is None or self._is_given_up or not values:
            return
        try:
            if self._file is None:
                self._file = EventFile(self._folder)
            if self._stale is not None:
                self._file.discard_from(self._stale)
                self._stale = None
            self._file.write(step, values)
        except OSError as error:
            self._give_up(error)

    def flush(self) -> None:
        """Returns when all points are on the disk, or sent."""
        self._end("flush")

    def close(self) -> None:
        """Ends the file, if there is one."""
        self._end("close")
        self._file, self._is_given_up = None, False

    def _end(self, how: str) -> None:
        try:
            if self._file is not None:
                getattr(self._file, how)()
        except OSError as error:
            if not self._is_given_up:
                self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._is_given_up = True
        warnings.warn(
            "`Scalars` could not write its points, and leaves out the rest of "
            f"this run's. Received: {self._folder!r}: {error}. Make room on "
            "the disk, or choose another folder.",
            RuntimeWarning,
            stacklevel=3,
        )


def _path(folder: str) -> str:
    """A name in the folder that no file has."""
    while (path := pathlib.Path(folder, _name())).exists():
        pass
    return str(path)


def _name() -> str:
    """A file's name; TensorBoard reads them in the order of their names."""
    seconds, micros = divmod(time.time_ns() // 1000, 1_000_000)
    place = f"{socket.gethostname()}.{os.getpid()}"
    return f"events.out.tfevents.{seconds:010d}.{micros:06d}.{place}"

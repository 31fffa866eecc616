"""Starts a local process of a job, prints its output and ends it."""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from keras_strategies.watchdog.launcher_pipe import LAUNCHER_FD

_CHUNK = 65536
# Longer lines are printed in several parts, so that they cannot use up memory.
_MAX_LINE = 1 << 20
_PR_SET_PDEATHSIG = 1
_STDOUT, _STDERR = 1, 2


class Output:
    """A writer of the lines of all processes, one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed: set[int] = set()
        self.error: OSError | None = None
        self.num_lines = 0

    @property
    def is_writing(self) -> bool:
        """Whether a line is being written, which a slow reader can delay."""
        return self._lock.locked()

    def write(self, file: int, line: bytes) -> None:
        """Writes a line to stdout (1) or stderr (2).

        After an error, further lines for that file are dropped, and `error` is
        the first one.
        """
        with self._lock:
            self.num_lines += 1
            view = memoryview(line)
            while view and file not in self._closed:
                try:
                    view = view[os.write(file, view) :]
                except BlockingIOError:
                    # Another process has made the file non-blocking.
                    select.select([], [file], [])
                except OSError as error:
                    self._closed.add(file)
                    self.error = self.error or error


class Child:
    """A process of a job, in a separate process group.

    It must be started in the main thread and before any other thread exists,
    because a Python function is run between fork and exec. On Linux, the system
    sends SIGTERM to the process when the main thread of the launcher ends.

    Args:
      index: The number of the process in the job.
      words: The command line.
      environ: The environment variables.
      output: The `Output` to which its lines are written.
      name: The prefix for its lines; not used for the chief.
    """

    def __init__(
        self,
        index: int,
        words: Sequence[str],
        environ: Mapping[str, str],
        output: Output,
        name: str,
    ) -> None:
        self.index = index
        self.name = name
        self.code: int | None = None
        self._output = output
        watched, self._news = os.pipe()
        os.set_blocking(self._news, False)
        environ = {**environ, LAUNCHER_FD: str(watched)}
        try:
            self._process = _start(words, environ, watched, is_chief=index == 0)
        except BaseException:
            os.close(self._news)
            raise
        finally:
            os.close(watched)
        self._threads: list[threading.Thread] = []

    @property
    def pid(self) -> int:
        """The ID of the process."""
        return self._process.pid

    def show_output(self) -> None:
        """Starts threads that print the process's lines."""
        for stream, file in (
            (self._process.stdout, _STDOUT),
            (self._process.stderr, _STDERR),
        ):
            if stream is None:
                continue
            thread = threading.Thread(
                target=self._pump, args=(stream, file), daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def poll(self) -> int | None:
        """Returns the exit status (-n for signal n), or None while running.

        The process is not reaped until `close`, so that the system cannot reuse
        the number of its process group.
        """
        if self.code is None:
            result = os.waitid(
                os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
            )
            if result is not None:
                has_exited = result.si_code == os.CLD_EXITED
                self.code = result.si_status * (1 if has_exited else -1)
        return self.code

    def send(self, number: int) -> None:
        """Sends a signal if the process is still running.

        SIGTERM is sent only to the process itself, which may pass it on to its
        children. Other signals are sent to its process group.
        """
        if self.poll() is None:
            send = os.kill if number == signal.SIGTERM else os.killpg
            with contextlib.suppress(ProcessLookupError):
                send(self.pid, number)

    def send_line(self, line: str) -> None:
        """Sends a line to the process through the pipe that it watches."""
        # The process may have closed the pipe, or the pipe may be full.
        with contextlib.suppress(OSError):
            os.write(self._news, f"{line}\n".encode())

    def close(self, timeout_s: float) -> None:
        """Kills what is left of the process group and prints remaining output.

        Args:
          timeout_s: The time to wait for more output, in seconds.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for thread in self._threads:
            before = -1
            while thread.is_alive() and (
                self._output.is_writing or self._output.num_lines != before
            ):
                # Keeps waiting as long as lines are being printed, because the
                # reader of the launcher's output may be slow.
                before = self._output.num_lines
                thread.join(timeout_s)
        os.close(self._news)

    def _pump(self, stream: BinaryIO, file: int) -> None:
        rest = b""
        while chunk := os.read(stream.fileno(), _CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _MAX_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._output.write(file, self._format_line(line))
        if rest:
            self._output.write(file, self._format_line(rest))

    def _format_line(self, line: bytes) -> bytes:
        if self.index == 0:
            return line + b"\n"
        # A progress bar overwrites its line with the help of carriage returns.
        # Only the last part, which a terminal would show, is printed.
        last = line.rstrip(b"\r").rpartition(b"\r")[2]
        return f"[{self.name}] ".encode() + last + b"\n"


def _start(
    words: Sequence[str],
    environ: Mapping[str, str],
    watched: int,
    *,
    is_chief: bool,
) -> subprocess.Popen[bytes]:
    # The chief inherits stdout and stderr if they are terminals, because it may
    # draw a progress bar.
    stdout, stderr = (
        None if is_chief and os.isatty(file) else subprocess.PIPE
        for file in (_STDOUT, _STDERR)
    )
    return subprocess.Popen(
        words,
        env=environ,
        stdin=_choose_stdin() if is_chief else subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        bufsize=0,
        pass_fds=[watched],
        process_group=0,
        preexec_fn=_make_preexec(os.getpid()),
    )


def _choose_stdin() -> int | None:
    # The system stops a process in a background group if it reads from a
    # terminal.
    try:
        is_terminal = os.isatty(0)
    except OSError:
        is_terminal = True
    return subprocess.DEVNULL if is_terminal else None


def _make_preexec(launcher: int):
    """Returns a `preexec_fn` that requests SIGTERM when the launcher dies."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != launcher:  # The launcher died before `prctl`.
            os._exit(1)

    return prepare

"""One local process of a job: starting it, its output, its end."""

import contextlib
import ctypes
import errno
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from keras_strategies.cluster.watchdog.launcher_pipe import LAUNCHER_FD

_CHUNK = 65536
# A line that is longer is shown in parts, so that it cannot fill the memory.
_LONGEST_LINE = 1 << 20
_PR_SET_PDEATHSIG = 1
_STDOUT, _STDERR = 1, 2
_NAMES = {_STDOUT: "stdout", _STDERR: "stderr"}


class Output:
    """Where lines of all processes go, each of them in one piece."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: dict[int, OSError] = {}
        self.num_lines = 0

    @property
    def is_closed(self) -> bool:
        """Whether stdout or stderr takes nothing any more."""
        return bool(self._errors)

    @property
    def is_writing(self) -> bool:
        """Whether a line is being written, whose reader may be slow."""
        return self._lock.locked()

    @property
    def fault(self) -> str:
        """Why one of them takes nothing; "" if its reader is just gone."""
        for file, error in self._errors.items():
            if error.errno != errno.EPIPE:
                return f"{_NAMES[file]} cannot be written: {error.strerror}"
        return ""

    def write(self, file: int, line: bytes) -> None:
        """Writes a line to stdout (1) or stderr (2).

        Once that is not possible, what comes for it is dropped and
        `is_closed` is true.
        """
        with self._lock:
            self.num_lines += 1
            view = memoryview(line)
            while view and file not in self._errors:
                try:
                    view = view[os.write(file, view) :]
                except BlockingIOError:
                    # Another process has made it non-blocking.
                    select.select([], [file], [])
                except OSError as error:
                    self._errors[file] = error


class Child:
    """A process of a job, in a process group of its own.

    Started in the main thread, and before any other thread: a function runs
    between fork and exec. It is sent SIGTERM by the system (Linux) when this
    thread ends.

    Args:
      index: Its number in the job.
      words: Its command line.
      environ: Its variables.
      output: Where its lines go.
      name: What is shown in front of them, but for the chief's.
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
        # A terminal is given to the chief: it may draw a progress bar there.
        is_shared = [
            index == 0 and os.isatty(file) for file in (_STDOUT, _STDERR)
        ]
        try:
            self._process = subprocess.Popen(
                words,
                env=dict(environ) | {LAUNCHER_FD: str(watched)},
                stdin=_stdin_of_chief() if index == 0 else subprocess.DEVNULL,
                stdout=None if is_shared[0] else subprocess.PIPE,
                stderr=None if is_shared[1] else subprocess.PIPE,
                bufsize=0,
                pass_fds=(watched,),
                process_group=0,
                preexec_fn=_end_with(os.getpid()),
            )
        except BaseException:
            os.close(self._news)
            raise
        finally:
            os.close(watched)
        self._threads: list[threading.Thread] = []

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def show_output(self) -> None:
        """Starts to show its lines, in threads."""
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
        """Its exit status once it has ended, negative for a signal.

        It is left unreaped until `close`, so that its process group's number
        stays its own.
        """
        if self.code is None:
            found = os.waitid(
                os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT
            )
            if found is not None:
                has_exited = found.si_code == os.CLD_EXITED
                self.code = found.si_status * (1 if has_exited else -1)
        return self.code

    def send(self, number: int) -> None:
        """Sends a signal if it still runs.

        SIGTERM is the process's own to pass on; others are for all that it
        has started, too.
        """
        if self.poll() is None:
            send = os.kill if number == signal.SIGTERM else os.killpg
            with contextlib.suppress(ProcessLookupError):
                send(self.pid, number)

    def send_line(self, line: str) -> None:
        """Writes a line to the file that it watches."""
        # It may have closed it, or not read for long.
        with contextlib.suppress(OSError):
            os.write(self._news, f"{line}\n".encode())

    def close(self, timeout_s: float) -> None:
        """Ends what it has left behind, and shows the rest of its output.

        Args:
          timeout_s: How long to wait for more of it, in seconds.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for thread in self._threads:
            before = -1
            while thread.is_alive() and (
                self._output.is_writing or self._output.num_lines != before
            ):
                # The reader of our output may be slow.
                before = self._output.num_lines
                thread.join(timeout_s)
        os.close(self._news)

    def _pump(self, stream: BinaryIO, file: int) -> None:
        rest = b""
        while chunk := os.read(stream.fileno(), _CHUNK):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._output.write(file, self._shown(line))
        if rest:
            self._output.write(file, self._shown(rest))

    def _shown(self, line: bytes) -> bytes:
        if self.index == 0:
            return line + b"\n"
        # What a terminal shows of a line that was drawn over, as a bar is.
        drawn = line.rstrip(b"\r").rpartition(b"\r")[2]
        return f"[{self.name}] ".encode() + drawn + b"\n"


def _stdin_of_chief() -> int | None:
    # A process in a group of its own is stopped when it reads a terminal.
    try:
        is_terminal = os.isatty(0)
    except OSError:
        is_terminal = True
    return subprocess.DEVNULL if is_terminal else None


def _end_with(launcher: int):
    """What a new process runs before its program: SIGTERM if we are killed."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def prepare() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != launcher:  # Killed before that.
            os._exit(1)

    return prepare

"""A directory of checkpoints, whose arrays Orbax writes and reads.

A save copies the arrays to the host and returns. Then a thread writes them with
Orbax, adds the manifest, and deletes the checkpoints that no rule retains. The
chief decides which checkpoint is restored, and all processes restore it.
"""

import contextlib
import functools
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from keras_strategies.checkpoint import contents
from keras_strategies.checkpoint.directory import names, retention, verify
from keras_strategies.checkpoint.directory.files import DamagedCheckpoint
from keras_strategies.checkpoint.directory.manifest import (
    Manifest,
    complete_save,
)
from keras_strategies.checkpoint.directory.retention import (
    Keep,
    delete,
    delete_partial_saves,
    find_deletable,
    quarantine,
)
from keras_strategies.checkpoint.orbax_io import (
    copy_to_host,
    make_checkpointer,
    restore_arrays,
    wait_at_exit,
)
from keras_strategies.cluster.exchange.greetings import clean_text
from keras_strategies.cluster.exchange.message_forms import Either, Form
from keras_strategies.cluster.exchange.rounds import Rounds
from keras_strategies.job import compilation_cache
from keras_strategies.names import dry_run

_logger = logging.getLogger(__name__)

_SEEN_S = 10.0
_POLL_S = 0.1


class Storage:
    """A directory of checkpoints that all processes of a job use together.

    Its methods except `wait`, `close`, `path` and `load_document` are
    collective: all processes must call them in the same order.

    Args:
      directory: The directory of the checkpoints, created if missing.
      processes: JAX's ids of the processes; the first is the chief.
      keep: The retention rules.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        processes: tuple[int, ...],
        keep: Keep,
    ) -> None:
        self.directory = pathlib.Path(directory).absolute()
        self._processes = processes
        self._keep = keep
        self._is_alone = len(processes) == 1
        self.is_chief = self._is_alone or jax.process_index() == processes[0]
        self._lock: Any = None
        self._checkpointer: Any = None
        self._finished: threading.Event | None = None
        self._error: BaseException | None = None
        self._good: dict[int, Manifest] = {}
        self._started = time.time()

    def open(self) -> None:
        """Locks the directory, so that no other job writes to it.

        Raises:
          OSError: if the directory is not writable.
          RuntimeError: if another job is writing to it.
          ValueError: if not all processes see the directory, if its path
            contains "*", "?" or "[", or if `processes` does not contain 0.
        """
        if dry_run.get() is not None:
            return
        if self._processes[0] != 0:
            raise ValueError(
                "Process 0 must have variables, since it writes a job's "
                "checkpoints. Received: variables of the processes "
                f"{list(self._processes)}. Use a strategy that includes "
                "process 0, or a separate job for these processes."
            )
        self._run_on_chief("opening", self._acquire)
        self._check_shared()
        self._get_checkpointer()  # Importing Orbax must not delay a save.
        wait_at_exit(self)
        compilation_cache.enable(warns=self.is_chief)

    def _acquire(self) -> None:
        from keras_strategies.checkpoint.directory.lock import DirectoryLock

        retention.check_name(self.directory)
        lock = DirectoryLock(self.directory)
        lock.acquire()
        self._lock = lock
        delete_partial_saves(self.directory)
        self._note_good()  # A script may save without calling `find_newest`.

    def _check_shared(self) -> None:
        if self._is_alone:
            return
        end = time.monotonic() + _SEEN_S
        mark = self.directory / ".lock"
        while not mark.exists() and time.monotonic() < end:
            time.sleep(_POLL_S)
        received = self._exchange("looking at", mark.exists(), bool)
        answers = zip(self._processes, received, strict=True)
        blind = [process for process, answer in answers if not answer]
        if blind:
            raise ValueError(
                "All processes of a job must share the directory of their "
                f"checkpoints. Received: {str(self.directory)!r}, where "
                f"processes {blind} do not see the file that process "
                f"{self._processes[0]} wrote. Use a directory on a disk that "
                "all processes share."
            )

    def close(self) -> None:
        """Waits for pending saves and unlocks the directory. Not collective."""
        try:
            self.wait()
        finally:
            if self._checkpointer is not None:
                self._checkpointer.close()
                self._checkpointer = None
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def find_newest(self, *, is_writer: bool = True) -> int | None:
        """Finds the newest good checkpoint and renames newer, damaged ones.

        The chief waits for a pending save, then reads each file once. It logs
        a warning for each checkpoint that it renames.

        Args:
          is_writer: Whether this run writes to the directory; otherwise,
            nothing is renamed.
        """
        self.wait()

        def find() -> int | None:
            manifest, problems = verify.find_newest_good(self.directory)
            for problem in problems if is_writer else ():
                aside = quarantine(problem)
                _logger.warning("%s It was renamed to %s.", problem, aside)
            if is_writer:
                self._note_good()
            return None if manifest is None else manifest.step

        return self._run_on_chief(
            "looking for the newest checkpoint in", find, int | None
        )

    def find_highest(self) -> int:
        """Returns the highest step of all checkpoints, good or damaged.

        Returns -1 if none exist. Waits for a pending save.
        """
        self.wait()
        return self._run_on_chief(
            "looking for the highest step in",
            lambda: max(names.find_steps(self.directory), default=-1),
            int,
        )

    def check(self, step: int) -> None:
        """Raises DamagedCheckpoint if a checkpoint is damaged or missing.

        Waits for a pending save.
        """
        self.wait()
        self._run_on_chief(
            f"verifying step {step} of",
            lambda: verify.verify(self.path(step)) and None,
        )

    def _note_good(self) -> None:
        """Records which checkpoints are good, and when the run started."""
        self._good = {}
        for step in names.find_steps(self.directory):
            with contextlib.suppress(DamagedCheckpoint):
                self._good[step] = verify.verify(self.path(step), is_quick=True)
        if (newest := max(self._good, default=None)) is not None:
            started = self._good[newest].facts.get("started")
            if isinstance(started, float):
                self._started = started

    def path(self, step: int) -> pathlib.Path:
        """Returns the path of the checkpoint of a step."""
        return names.step_path(self.directory, step)

    def load_document(self, step: int) -> contents.Document:
        """Reads the document of a checkpoint; see `contents.load_document`."""
        return contents.load_document(self.path(step))

    def restore(
        self, step: int, targets: contents.Arrays, *, is_part: bool = False
    ) -> contents.Arrays:
        """Reads arrays of a verified checkpoint.

        Args:
          step: The step of the checkpoint.
          targets: Each array's shape, dtype and sharding, by group and name.
          is_part: Whether the checkpoint may also contain other arrays.
        """
        restored = restore_arrays(
            self._get_checkpointer(), self.path(step), targets, is_part=is_part
        )
        # The chief must not delete files that other processes still read.
        self._exchange("restoring", "done", str)
        return restored

    # Saving.

    def save(
        self,
        step: int,
        arrays: contents.Arrays,
        document: contents.Document,
        facts: Mapping[str, Any],
    ) -> None:
        """Starts a save; returns as soon as the caller may change the arrays.

        Raises:
          OSError: if the checkpoint does not fit on the disk, or the previous
            checkpoint could not be written.
          RuntimeError: if another run now holds the lock of the directory.
        """
        import orbax.checkpoint as ocp

        self.wait()
        if self._lock is not None:
            self._lock.renew()
        if self.is_chief:
            num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))
            retention.check_free_space(self.directory, num_bytes)
        arrays = copy_to_host(arrays, is_alone=self._is_alone)
        write = functools.partial(
            self._get_checkpointer().save,
            names.saving_path(self.directory, step),
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(arrays),
                run=ocp.args.JsonSave(document),
            ),
        )
        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(arrays)):
            # After `save` has returned, steps may donate the buffers of these
            # arrays. So Orbax must copy them to the host before `save` returns.
            write()
            write = None
        facts = {**facts, "started": self._started}
        finished = threading.Event()
        threading.Thread(
            target=self._finish,
            args=(step, facts, write, finished),
            name=f"keras_strategies checkpoint {step}",
        ).start()
        self._finished = finished

    def _finish(
        self,
        step: int,
        facts: Mapping[str, Any],
        write: Callable[[], None] | None,
        finished: threading.Event,
    ) -> None:
        """Writes and completes a checkpoint. Runs in a thread."""
        try:
            if write is not None:
                write()
            self._get_checkpointer().wait_until_finished()
            if not self.is_chief:
                return
            self._good[step] = complete_save(self.directory, step, facts)
            for old in find_deletable(self._good.values(), self._keep):
                delete(self.directory, old)
                del self._good[old]
        except Exception as error:
            self._error = retention.make_save_error(
                self.directory, step, max(self._good, default=None), error
            )
        except BaseException as error:
            self._error = error
        finally:
            finished.set()

    def wait(self) -> None:
        """Blocks until pending saves are on disk. Not collective.

        Raises:
          OSError: if a checkpoint could not be written. Earlier checkpoints
            are still good.
        """
        if self._finished is not None:
            # `Thread.join` is not used: after a Ctrl-C during a join, the next
            # join returns immediately (Python 3.11).
            self._finished.wait()
            self._finished = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    # All processes together.

    def _get_checkpointer(self) -> Any:
        if self._checkpointer is None:
            self._checkpointer = make_checkpointer(self._processes)
        return self._checkpointer

    def _run_on_chief(
        self, doing: str, compute: Callable[[], Any], form: Form = None
    ) -> Any:
        """Runs a function on the chief; returns its result in every process.

        If the function fails on the chief, every process raises an error.
        """
        if self._is_alone:
            return compute()
        value, error = None, None
        if self.is_chief:
            try:
                value = compute()
            except Exception as raised:
                error = raised
        text = "" if error is None else f"{type(error).__name__}: {error}"
        answer = (text, isinstance(error, DamagedCheckpoint), value)
        # The other processes, and a chief that failed, send None as the value.
        forms = (str, bool, Either((form, None)))
        text, is_damage, value = self._exchange(doing, answer, forms)[0]
        if error is not None:
            raise error
        if text:
            kind = DamagedCheckpoint if is_damage else RuntimeError
            raise kind(
                f"Process {self._processes[0]} failed while {doing} "
                f"{str(self.directory)!r}: {clean_text(text)}"
            )
        return value

    def _exchange(self, doing: str, message: object, form: Form) -> list[Any]:
        if self._is_alone:
            return [message]
        with Rounds(self._processes, f"{doing} {self.directory}") as rounds:
            return rounds.exchange(message, form)

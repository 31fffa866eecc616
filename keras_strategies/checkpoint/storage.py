"""A directory of checkpoints: Orbax writes and reads their arrays.

A save takes the arrays to the host and returns; a thread has Orbax write them,
adds the manifest, and deletes what no rule retains. The chief decides what
is restored, and all processes restore it.
"""

import contextlib
import functools
import json
import logging
import os
import pathlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from keras_strategies.checkpoint import contents
from keras_strategies.checkpoint.at_exit import wait_at_exit
from keras_strategies.checkpoint.directory import disk_space, names, verify
from keras_strategies.checkpoint.directory.corruption import DamagedCheckpoint
from keras_strategies.checkpoint.directory.manifest import (
    Manifest,
    write_manifest,
)
from keras_strategies.checkpoint.directory.orbax_files import restoring
from keras_strategies.checkpoint.directory.retention import (
    Keep,
    delete,
    delete_partial_saves,
    set_aside,
    to_delete,
)
from keras_strategies.checkpoint.orbax_io import (
    make_checkpointer,
    on_host,
    restore_args,
)
from keras_strategies.cluster.exchange.greetings import readable
from keras_strategies.cluster.exchange.host_exchange import Agreement
from keras_strategies.cluster.exchange.message_forms import (
    Either,
    Form,
    read_messages,
)

_logger = logging.getLogger(__name__)

_NEWEST = "looking for the newest checkpoint in"
_SEEN_S = 10.0
_POLL_S = 0.1


class Storage:
    """A directory of checkpoints, as the processes of a job use it.

    All methods but `wait` are collective, in one order.

    Args:
      directory: Where checkpoints are; made if it is not there.
      processes: JAX's ids of the processes; the first is the chief.
      keep: Which checkpoints are retained.
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

    # Opening and closing.

    def open(self) -> None:
        """Takes the directory: nobody else may write to it.

        Raises:
          OSError: it cannot be written to.
          RuntimeError: another job writes to it.
          ValueError: not all processes see it, or a name with "*", "?" or
            "["; or processes without the job's first.
        """
        if self._processes[0] != 0:
            # Orbax has arrays of numpy written by process 0 alone.
            raise ValueError(
                "Checkpoints of a job are written by its process 0. Received: "
                f"variables of the processes {list(self._processes)}. Use a "
                "strategy that has process 0, or a job of its own for these "
                "processes."
            )
        self._by_chief("opening", self._take)
        self._check_shared()
        # Importing Orbax takes a second, which the first save would wait.
        self._orbax()
        wait_at_exit(self)

    def _take(self) -> None:
        from keras_strategies.checkpoint.directory.lock import DirectoryLock

        disk_space.check_name(self.directory)
        disk_space.check_writable(self.directory)
        names.make_directory(self.directory)
        lock = DirectoryLock(self.directory)
        lock.acquire()
        self._lock = lock
        delete_partial_saves(self.directory)
        # A script may continue without asking for the newest one.
        self._note_good()

    def _check_shared(self) -> None:
        if self._is_alone:
            return
        end = time.monotonic() + _SEEN_S
        mark = self.directory / ".lock"
        while not mark.exists() and time.monotonic() < end:
            time.sleep(_POLL_S)
        received = self._exchange("looking at", str(mark.exists()))
        found = dict(zip(self._processes, received, strict=True))
        blind = [process for process in found if found[process] == "False"]
        if blind:
            raise ValueError(
                "All processes of a job keep their checkpoints in one "
                f"directory. Received: {str(self.directory)!r}, where "
                f"processes {blind} do not see what process "
                f"{self._processes[0]} wrote. Give a directory on a disk that "
                "all of them share."
            )

    def close(self) -> None:
        """Waits for what is being saved, and lets others write. Local."""
        try:
            self.wait()
        finally:
            if self._checkpointer is not None:
                self._checkpointer.close()
                self._checkpointer = None
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    # Restoring.

    def newest(self) -> int | None:
        """The newest good checkpoint; damaged ones are put aside, and named.

        A file of each is read once, by the chief; what is being saved is
        waited for.
        """
        self.wait()

        def find() -> int | None:
            manifest, faults = verify.newest_good(self.directory)
            for fault in faults:
                aside = set_aside(fault)
                _logger.warning("%s It is now %s.", fault, aside)
            self._note_good()
            return None if manifest is None else manifest.step

        return self._by_chief(_NEWEST, find, int | None)

    def highest(self) -> int:
        """The highest step, good or not; -1 if there is none. Collective.

        What is being saved is waited for.
        """
        self.wait()
        return self._by_chief(
            "looking for the highest step in",
            lambda: max(names.find_steps(self.directory), default=-1),
            int,
        )

    def newest_to_read(self) -> int | None:
        """The newest good checkpoint; nothing is put aside."""

        def find() -> int | None:
            manifest, _ = verify.newest_good(self.directory)
            return None if manifest is None else manifest.step

        return self._by_chief(_NEWEST, find, int | None)

    def check(self, step: int) -> None:
        """Raises DamagedCheckpoint if a checkpoint is, or is not there.

        What is being saved is waited for.
        """
        self.wait()

        def look() -> None:
            verify.verify(self.path(step))

        self._by_chief(f"verifying step {step} of", look)

    def _note_good(self) -> None:
        """Looks which checkpoints there are, and when the run began."""
        self._good = {}
        for step in names.find_steps(self.directory):
            with contextlib.suppress(DamagedCheckpoint):
                self._good[step] = verify.verify(self.path(step), is_quick=True)
        if self._good:
            started = self._good[max(self._good)].facts.get("started")
            if isinstance(started, float):
                self._started = started

    def path(self, step: int) -> pathlib.Path:
        """The folder of a step."""
        return names.step_path(self.directory, step)

    def document(self, step: int) -> contents.Document:
        """What a checkpoint of a version that is known holds beside arrays."""
        return contents.document_of(self.path(step))

    def restore(
        self, step: int, wanted: contents.Arrays, *, is_part: bool = False
    ) -> contents.Arrays:
        """Reads arrays of a checkpoint that was verified.

        Args:
          step: Which one.
          wanted: Shapes, dtypes and shardings, by group and name.
          is_part: Whether it has more than these.
        """
        import orbax.checkpoint as ocp

        path = self.path(step)
        with restoring(path, wanted):
            restored = self._orbax().restore(
                path,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeRestore(
                        item=wanted,
                        restore_args=restore_args(wanted),
                        partial_restore=is_part,
                    )
                ),
            )
        # The chief must not delete what others still read.
        self._exchange("restoring", "done")
        return restored.state

    # Saving.

    def save(
        self,
        step: int,
        arrays: contents.Arrays,
        document: contents.Document,
        facts: Mapping[str, Any],
    ) -> None:
        """Saves a checkpoint; returns when its arrays may change.

        Raises:
          OSError: it does not fit on the disk; or the last one could not be
            written.
          RuntimeError: another run has taken the directory meanwhile.
        """
        import orbax.checkpoint as ocp

        self.wait()
        if self._lock is not None:
            self._lock.renew()
        if self.is_chief:
            leaves = jax.tree.leaves(arrays)
            num_bytes = sum(leaf.nbytes for leaf in leaves)
            disk_space.check_free_space(self.directory, num_bytes)
        arrays = on_host(arrays, is_alone=self._is_alone)
        write = functools.partial(
            self._orbax().save,
            self.path(step),
            args=ocp.args.Composite(
                state=ocp.args.PyTreeSave(arrays),
                run=ocp.args.JsonSave(document),
            ),
        )
        if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(arrays)):
            # The devices' arrays change when this returns.
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
        """Makes a checkpoint complete, in a thread."""
        try:
            if write is not None:
                write()
            self._orbax().wait_until_finished()
            if not self.is_chief:
                return
            manifest = write_manifest(self.path(step), step, facts)
            self._good[step] = manifest
            for old in to_delete(self._good.values(), self._keep):
                delete(self.directory, old)
                del self._good[old]
        except Exception as error:
            self._error = disk_space.not_written(
                self.directory, step, max(self._good, default=None), error
            )
        except BaseException as error:
            self._error = error
        finally:
            finished.set()

    def wait(self) -> None:
        """Until what was saved is on the disk. Local.

        Raises:
          OSError: it could not be written. The checkpoints before it are
            good.
        """
        if self._finished is not None:
            # Joining a thread again shows nothing after a Ctrl-C in it.
            self._finished.wait()
            self._finished = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    # All processes together.

    def _orbax(self) -> Any:
        if self._checkpointer is None:
            self._checkpointer = make_checkpointer(self._processes)
        return self._checkpointer

    def _by_chief(
        self, doing: str, compute: Callable[[], Any], form: Form = None
    ) -> Any:
        """What the chief computes, in all processes. Its error is all's."""
        if self._is_alone:
            return compute()
        answer: dict[str, Any] = {}
        error: Exception | None = None
        if self.is_chief:
            try:
                answer["value"] = compute()
            except Exception as raised:
                error = raised
                answer["error"] = f"{type(raised).__name__}: {raised}"
                answer["is_damage"] = isinstance(raised, DamagedCheckpoint)
        (received,) = read_messages(
            self._exchange(doing, json.dumps(answer))[:1],
            Either(({"error": str, "is_damage": bool}, {"value": form})),
            processes=self._processes[:1],
            about=f"{doing} {str(self.directory)!r}",
        )
        if error is not None:
            raise error
        if "error" in received:
            kind = DamagedCheckpoint if received["is_damage"] else RuntimeError
            raise kind(
                f"Process {self._processes[0]} failed in {doing} "
                f"{str(self.directory)!r}: {readable(received['error'])}"
            )
        return received["value"]

    def _exchange(self, doing: str, text: str) -> list[str]:
        if self._is_alone:
            return [text]
        agreement = Agreement(self._processes, f"{doing} {self.directory}")
        try:
            return agreement.exchange(text)
        finally:
            agreement.end()

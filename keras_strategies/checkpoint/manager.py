"""Checkpoints of loops of one's own, in the manner of tf.train's."""

import os
from collections.abc import Mapping
from typing import Any

from keras_strategies.checkpoint import contents
from keras_strategies.checkpoint.directory.names import find_steps
from keras_strategies.checkpoint.directory.retention import Keep, as_keep
from keras_strategies.checkpoint.objects import (
    Checkpoint,
    read_into,
    write_from,
)
from keras_strategies.checkpoint.storage import Storage
from keras_strategies.strategy import current

_UNSET: Any = object()


class CheckpointManager:
    """Keeps checkpoints in a directory, as `tf.train.CheckpointManager`.

    Saving copies the arrays to the host, and writes them while the loop goes
    on. On several processes every call is collective, in a directory that all
    of them share.

    Differs from tf: a checkpoint's name is its step alone;
    `restore_or_initialize` returns a step.

    Args:
      checkpoint: What to keep.
      directory: Where; made if it is not there. One directory for each run.
      keep: How many checkpoints are retained, or a `ks.checkpoint.Keep`.
      max_to_keep: tf's name of `keep`; None keeps all.

    Raises:
      OSError: the directory cannot be written to.
      RuntimeError: another job writes to it.

    Example:
      ```python
      manager = ks.checkpoint.CheckpointManager(checkpoint, "run", keep=3)
      step = manager.restore_or_initialize() or 0
      for batch in iterator:
          strategy.run(train_step, args=batch)
          step += 1
          if step % 100 == 0:
              manager.save(step)
      manager.close()
      ```
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        keep: int | Keep = 5,
        *,
        max_to_keep: int | None = _UNSET,
    ) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(
                "`checkpoint` is a `ks.checkpoint.Checkpoint`. Received: an "
                f"object of type {type(checkpoint).__name__}. Write "
                "`Checkpoint(model=model)`."
            )
        if max_to_keep is not _UNSET:
            keep = Keep(last=None) if max_to_keep is None else max_to_keep
        self._checkpoint = checkpoint
        self._processes = contents.processes_of(checkpoint.groups())
        self._storage = Storage(
            directory,
            processes=self._processes,
            keep=as_keep(keep),
        )
        self._storage.open()
        self._is_closed = False

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def directory(self) -> str:
        """Where the checkpoints are."""
        return str(self._storage.directory)

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint that was not found damaged.

        What this process is saving is waited for.
        """
        self.wait()
        steps = find_steps(self.directory)
        return str(self._storage.path(steps[-1])) if steps else None

    @property
    def checkpoints(self) -> list[str]:
        """The paths of all checkpoints, the oldest first."""
        return [
            str(self._storage.path(step)) for step in find_steps(self.directory)
        ]

    def save(
        self,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        *,
        checkpoint_number: int | None = None,
    ) -> str:
        """Saves a checkpoint. Collective.

        Args:
          step: The number of train steps done, from 0. None: one more than
            the highest in the directory, as tf counts.
          metrics: Values that `Keep(best=...)` chooses by, and that people see.
          checkpoint_number: tf's name of `step`.

        Returns:
          Its path; it is there when `wait` returns.

        Raises:
          ValueError: there is a checkpoint of that step, or of a later one.
          OSError: it does not fit on the disk, or the last one could not be
            written.
          RuntimeError: the manager is closed.

        Example:
          ```python
          manager = ks.checkpoint.CheckpointManager(
              checkpoint, "run", ks.checkpoint.Keep(last=2, best="loss")
          )
          manager.save(100, {"loss": 0.5})
          manager.close()
          ```
        """
        if self._is_closed:
            raise RuntimeError(
                "A manager saves until it is closed, since others may write "
                f"to its directory then. Received: `save` into "
                f"{self.directory!r} after `close`. Make another manager."
            )
        current.check_outside("CheckpointManager.save")
        if step is None:
            step = checkpoint_number
        if step is None:
            step = max(self._storage.highest(), 0) + 1
        path = self._storage.path(step)
        step = int(path.name)
        self._check_is_next(step)
        write_from(self._checkpoint, self._storage, step, metrics or {})
        return str(path)

    def restore_or_initialize(self) -> int | None:
        """Restores the newest good checkpoint, if there is one. Collective.

        Damaged ones that are newer are named in a warning, and put aside.

        Returns:
          Its step; None if there is none, and nothing was changed.

        Raises:
          ValueError: it is of other objects; they are listed.

        Example:
          ```python
          manager = ks.checkpoint.CheckpointManager(checkpoint, "run")
          step = manager.restore_or_initialize() or 0
          assert step == 0
          ```
        """
        step = self._storage.newest()
        if step is not None:
            read_into(self._checkpoint, self._storage, step, is_part=False)
        return step

    def restore(self, step: int) -> None:
        """Restores one checkpoint. Collective.

        Args:
          step: Which one.

        Raises:
          DamagedCheckpoint: it is damaged, or not there.
          ValueError: it is of other objects.

        Example:
          ```python
          manager = ks.checkpoint.CheckpointManager(checkpoint, "run")
          manager.save(100)
          manager.restore(100)
          ```
        """
        self._storage.check(step)
        read_into(self._checkpoint, self._storage, step, is_part=False)

    def wait(self) -> None:
        """Until what was saved is on the disk.

        Raises:
          OSError: it could not be written.

        Example:
          ```python
          manager = ks.checkpoint.CheckpointManager(checkpoint, "run")
          path = manager.save(100)
          manager.wait()
          assert manager.checkpoints == [path]
          ```
        """
        self._storage.wait()

    def close(self) -> None:
        """Waits for the last save, and lets others write to the directory."""
        self._is_closed = True
        self._storage.close()

    def _check_is_next(self, step: int) -> None:
        newest = self._storage.highest()
        if step == newest:
            raise ValueError(
                "A step is saved once. Received: "
                f"step={step}, which is in {self.directory!r}. Give the next "
                "step, or another directory."
            )
        if step < newest:
            raise ValueError(
                "Steps are saved in their order: a restart resumes from the "
                f"highest. Received: step={step}, and step {newest} is in "
                f"{self.directory!r}. Restore it first, or give another "
                "directory."
            )

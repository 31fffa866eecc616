"""Checkpoints for custom training loops, as in `tf.train`; when to save."""

import math
import os
import time
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
from keras_strategies.cluster.checks import check_type
from keras_strategies.cluster.exchange.message_forms import is_count
from keras_strategies.cluster.exchange.rounds import Rounds
from keras_strategies.names import dry_run
from keras_strategies.names.phases import SAVE, Phase
from keras_strategies.strategy import current

_UNSET: Any = object()


class CheckpointManager:
    """A directory of checkpoints, like `tf.train.CheckpointManager`.

    `save` copies the arrays to the host. They are written to disk in the
    background, while the training loop continues. With several processes,
    every method is collective, and all processes must share the directory.

    Differs from tf: a checkpoint's name is just the number of its step, and
    `restore_or_initialize` returns a step instead of a path.

    Args:
      checkpoint: The objects to save.
      directory: The directory for this run's checkpoints, created if missing.
      keep: The number of checkpoints to retain, or a `ks.checkpoint.Keep`.
      max_to_keep: TensorFlow's name for `keep`; None retains all checkpoints.

    Raises:
      OSError: if the directory is not writable.
      RuntimeError: if another job is writing to it.

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
        what = "a `ks.checkpoint.Checkpoint`"
        fix = "Pass, for example, `ks.checkpoint.Checkpoint(model=model)`."
        check_type("`checkpoint`", checkpoint, Checkpoint, what, fix)
        if max_to_keep is not _UNSET:
            keep = Keep(last=max_to_keep)
        self._checkpoint = checkpoint
        self._processes = contents.find_processes(checkpoint.groups())
        processes, keep = self._processes, as_keep(keep)
        self._storage = Storage(directory, processes=processes, keep=keep)
        self._storage.open()
        self._is_closed = False

    def __enter__(self) -> "CheckpointManager":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def directory(self) -> str:
        """The directory of the checkpoints."""
        return str(self._storage.directory)

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest checkpoint, or None.

        Ignores checkpoints that were renamed because they are damaged. Waits
        for a pending save of this process.
        """
        self.wait()
        return (self.checkpoints or [None])[-1]

    @property
    def checkpoints(self) -> list[str]:
        """The paths of all checkpoints, oldest first."""
        steps = find_steps(self.directory)
        return [str(self._storage.path(step)) for step in steps]

    def save(
        self,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        *,
        checkpoint_number: int | None = None,
    ) -> str:
        """Saves a checkpoint. Collective.

        Args:
          step: The number of completed train steps, at least 0. If None, one
            more than the highest step in the directory, as in TensorFlow.
          metrics: The metrics that `Keep(best=...)` compares. Listings of
            checkpoints also show them.
          checkpoint_number: TensorFlow's name for `step`.

        Returns:
          The path of the checkpoint, which is complete once `wait` returns.

        Raises:
          ValueError: if the directory already has a checkpoint of this step or
            of a later one.
          OSError: if the checkpoint does not fit on the disk, or the previous
            checkpoint could not be written.
          RuntimeError: if the manager is closed.

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
                "A manager cannot save after it was closed, since another run "
                "may be writing to its directory. Received: a call of `save` "
                f"for {self.directory!r} after `close`. Create a new manager."
            )
        current.check_outside("CheckpointManager.save")
        if step is None:
            step = checkpoint_number
        if step is None:
            step = max(self._storage.find_highest(), 0) + 1
        path = self._storage.path(step)
        step = int(path.name)
        self._check_is_next(step)
        with Phase(SAVE) as phase:
            write_from(self._checkpoint, self._storage, step, metrics or {})
            phase.result = step
        return str(path)

    def restore_or_initialize(self) -> int | None:
        """Restores the newest good checkpoint, if any. Collective.

        Newer checkpoints that are damaged are renamed, and a warning is logged
        for each of them.

        Returns:
          The restored step. None if there was no good checkpoint; the objects
          are then unchanged.

        Raises:
          ValueError: if the checkpoint does not match the objects; the message
            lists the differences.

        Example:
          ```python
          manager = ks.checkpoint.CheckpointManager(checkpoint, "run")
          step = manager.restore_or_initialize() or 0
          assert step == 0
          ```
        """
        step = self._storage.find_newest()
        if step is not None:
            read_into(self._checkpoint, self._storage, step, is_part=False)
        return step

    def restore(self, step: int) -> None:
        """Restores one checkpoint. Collective.

        Args:
          step: The step of the checkpoint.

        Raises:
          DamagedCheckpoint: if the checkpoint is damaged or missing.
          ValueError: if the checkpoint does not match the objects.

        Example:
          ```python
          manager = ks.checkpoint.CheckpointManager(checkpoint, "run")
          manager.save(100)
          manager.restore(100)
          ```
        """
        if dry_run.get() is not None:
            return
        self._storage.check(step)
        read_into(self._checkpoint, self._storage, step, is_part=False)

    def wait(self) -> None:
        """Blocks until pending saves are on disk.

        Raises:
          OSError: if a checkpoint could not be written.

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
        """Waits for pending saves and unlocks the directory."""
        self._is_closed = True
        self._storage.close()

    def _check_is_next(self, step: int) -> None:
        newest = self._storage.find_highest()
        if step <= newest:
            raise ValueError(
                "Each step can be saved once, in increasing order, since a "
                f"restart resumes from the highest step. Received: step={step},"
                f" but {self.directory!r} already contains step {newest}. "
                f"Restore step {newest} first, or use another directory."
            )


_ANSWER = {"is_due": bool, "wait": is_count}


class Clock:
    """A timer that makes all processes save after the same step.

    The chief's clock decides when to save. The processes do not exchange
    messages at every step: in each exchange the chief announces after which
    step the next exchange takes place. It estimates this step from the measured
    duration of a step, so only one or two exchanges are needed for each save.

    Args:
      seconds: The time between saves, in seconds.
      step: The number of steps completed so far.
      processes: JAX's ids of the processes.
    """

    def __init__(
        self, seconds: float, step: int, processes: tuple[int, ...]
    ) -> None:
        self._seconds = seconds
        self._processes = processes
        self.restart(step)

    def restart(self, step: int) -> None:
        """Restarts the timer after a save."""
        self._begun = self._asked_at = time.monotonic()
        self._asked = step
        self._next = step + 1
        self.is_waiting = False

    def is_due(self, step: int) -> bool:
        """Returns whether to save after this step. Collective."""
        if self.is_waiting or step < self._next:
            return self.is_waiting
        now = time.monotonic()
        left = self._begun + self._seconds - now
        per_step = (now - self._asked_at) / max(step - self._asked, 1)
        # The estimate may be wrong if the duration of steps changes. So the
        # number of steps until the next exchange is at most twice the number of
        # steps that were measured.
        maximum = 2 * (step - self._asked)
        wait = min(maximum, math.ceil(left / max(per_step, 1e-6)))
        answer = self._agree({"is_due": left <= 0, "wait": max(wait, 1)})
        self._asked, self._asked_at = step, now
        self._next = step + answer["wait"]
        self.is_waiting = answer["is_due"]
        return self.is_waiting

    def _agree(self, answer: dict[str, Any]) -> dict[str, Any]:
        if len(self._processes) == 1:
            # A single process exchanges nothing, so it reads its clock at every
            # step.
            return answer | {"wait": 1}
        with Rounds(self._processes, "the time of a checkpoint") as rounds:
            return rounds.exchange(answer, _ANSWER)[0]

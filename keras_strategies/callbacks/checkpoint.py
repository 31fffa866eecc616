"""The callback that saves checkpoints of a fit, and resumes it."""

import logging
import os
from typing import Any, Literal

from keras_strategies.checkpoint import contents, nests
from keras_strategies.checkpoint.clock import Clock
from keras_strategies.checkpoint.directory.retention import Keep, as_keep
from keras_strategies.checkpoint.storage import Storage
from keras_strategies.cluster.checks import check_number
from keras_strategies.cluster.exchange.exit_codes import ExitCode, Preempted
from keras_strategies.cluster.watchdog import watchdog
from keras_strategies.cluster.watchdog.preemption import PreemptionNotice
from keras_strategies.keras_bridge.callbacks.resumable_fit import (
    CheckpointCallback,
    FitState,
)

_logger = logging.getLogger(__name__)

_METRICS = "metrics"
_CURE = "Leave it out, or give a positive number."


class Checkpoint(CheckpointCallback):
    """Saves all the state that a `fit` needs to resume, and resumes it.

    Saved are the weights, the state of layers, metrics and random seeds, the
    optimizers, the place in the epoch and in the data, `History`, and the
    states of the callbacks: of Keras's `EarlyStopping`, `ReduceLROnPlateau`,
    `ModelCheckpoint`, `OrbaxCheckpoint`, `CSVLogger`, `TensorBoard`,
    `SwapEMAWeights`, and of every callback that has `get_state()` and
    `set_state(state)`. A fit that finds a checkpoint in its directory resumes
    at the next batch, as if it had not been interrupted: bit for bit on as
    many devices and processes, to rounding errors on others.

    Saving copies the arrays to the host, and writes them while training goes
    on. On SIGTERM all processes save at the same step, and end with exit code
    75. What is damaged is not restored: the checkpoint before it is.

    Differs from `keras.callbacks.BackupAndRestore`: training continues in the
    middle of an epoch, with all state, on any number of processes; and the
    checkpoints stay when it is done: calling fit again trains nothing more,
    and warns of it.

    Args:
      directory: Where the checkpoints are, on a disk that all processes share.
        One directory for each run.
      save_every_steps: Save after so many train steps.
      save_every_seconds: Save when so much time has passed, by the chief's
        clock.
      save_every_epochs: Save after so many epochs; 1 if nothing else is given.
        The end of training is saved in any case.
      keep: How many checkpoints are retained, or a `ks.checkpoint.Keep`.
      resume: "auto" to resume where there is a checkpoint; True if there must
        be one; False to begin anew, in a directory without any.

    Raises:
      ValueError: numbers that are not positive; (in `fit`) a checkpoint of
        another model.
      OSError: (in `fit`) the directory cannot be written to.

    Example:
      ```python
      with strategy.scope():
          model = keras.Sequential([keras.layers.Dense(1)])
          model.compile("adam", "mse")
      model.fit(
          x, y, epochs=10,
          callbacks=[ks.callbacks.Checkpoint("run", save_every_steps=500)],
      )
      ```
    """

    # While a fit runs.
    _storage: Storage
    _notice: PreemptionNotice

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        save_every_steps: int | None = None,
        save_every_seconds: float | None = None,
        save_every_epochs: int | None = None,
        keep: int | Keep = 5,
        resume: Literal["auto"] | bool = "auto",
    ) -> None:
        super().__init__()
        _check_directory(directory)
        for name, value in {
            "save_every_steps": save_every_steps,
            "save_every_epochs": save_every_epochs,
            "save_every_seconds": save_every_seconds,
        }.items():
            is_whole = name != "save_every_seconds"
            check_number(f"`{name}`", value, _CURE, above=0, is_whole=is_whole)
        if resume not in ("auto", True, False):
            raise ValueError(
                "`resume` is 'auto', True or False. Received: "
                f"resume={resume!r}. Use 'auto' to resume where there is a "
                "checkpoint."
            )
        given = (save_every_steps, save_every_seconds, save_every_epochs)
        self.directory = os.fspath(directory)
        self._every_steps = save_every_steps
        self._every_epochs = (
            1 if given == (None, None, None) else save_every_epochs
        )
        self._every_seconds = save_every_seconds and float(save_every_seconds)
        self._keep = as_keep(keep)
        self._resume = resume
        self._clock: Clock | None = None
        self._saved: int | None = None
        self._is_best_known = False

    @property
    def saved_step(self) -> int | None:
        """The step of the last checkpoint saved, or resumed from."""
        return self._saved

    # What subclasses may override.

    def begins_anew(
        self, loop: FitState, step: int, document: dict[str, Any]
    ) -> bool:
        """Returns whether a fit has a checkpoint's variables alone.

        All but those of metrics: these, the epoch and the data start over.
        Collective.

        Args:
          loop: The state of the fit.
          step: The checkpoint's.
          document: What the checkpoint holds beside arrays.
        """
        return False

    def before_save(self, loop: FitState) -> None:
        """Called before a checkpoint is saved. Collective."""

    def after_save(self, loop: FitState) -> None:
        """Called after a save, which `wait` waits for. Collective."""

    def wait(self) -> None:
        """Blocks until the last save is on disk."""
        self._storage.wait()

    # What fit calls.

    def begin(self, loop: FitState) -> None:
        """Opens the directory, and resumes with what is in it."""
        self._storage = Storage(
            self.directory, processes=loop.mesh.processes, keep=self._keep
        )
        self._storage.open()
        step = self._storage.newest()
        self._check_resume(step)
        self._saved = None
        if step is not None:
            self._resume_from(loop, step)
        progress = watchdog.progress() if loop.mesh.num_processes > 1 else None
        self._notice = PreemptionNotice(progress).__enter__()
        if self._every_seconds is not None:
            self._clock = Clock(
                self._every_seconds, loop.num_steps, loop.mesh.processes
            )

    def after_batch(self, loop: FitState) -> None:
        """Saves if it is time to, or if the process must end."""
        every = self._every_steps
        is_due = every is not None and self._is_due(loop.num_steps, every)
        if self._clock is not None and self._clock.is_due(loop.num_steps):
            is_due = True
        # After the epoch's end it is saved with the results of validation.
        is_due &= not loop.is_last_step
        if not (is_due or self._notice.came):
            return
        loop.settle()
        if loop.model.stop_training:
            # The epoch's end comes now, and is saved: a fit resumed in the
            # middle of an epoch that was stopped would not come to it.
            return
        self._save(loop)
        if self._notice.came:
            self._end_preempted(loop)

    def _is_due(self, num_steps: int, every: int) -> bool:
        # An execution may have several steps.
        return num_steps // every > (self._saved or 0) // every

    def after_epoch(self, loop: FitState, logs: dict[str, Any]) -> None:
        """Saves if it is time to, or if this was the last epoch."""
        every = self._every_epochs
        is_due = every is not None and loop.epoch % every == 0
        if self._every_steps is not None:
            is_due |= self._is_due(loop.num_steps, self._every_steps)
        if self._clock is not None:
            is_due |= self._clock.is_waiting
        if is_due or loop.is_last_epoch or self._notice.came:
            self._save(loop, logs)
        if self._notice.came:
            self._end_preempted(loop)

    def close(self, *, is_done: bool) -> None:
        """Waits for the last save."""
        notice = vars(self).pop("_notice", None)
        storage = vars(self).pop("_storage", None)
        self._clock = None
        if notice is not None:
            notice.__exit__(None, None, None)
        if storage is None:
            return
        try:
            storage.close()
        except Exception:
            if is_done:
                raise
            # What ended the fit is raised, and not this.
            _logger.exception("A checkpoint could not be saved.")
        if is_done and notice is not None and notice.came:
            # After the last epoch was saved.
            raise Preempted

    # Resuming.

    def _check_resume(self, step: int | None) -> None:
        if self._resume is True and step is None:
            raise FileNotFoundError(
                "`resume=True` resumes from a checkpoint. Received: the "
                f"directory {self.directory!r}, which has none that is good. "
                "Give the run's directory, or `resume='auto'`."
            )
        if self._resume is False and step is not None:
            raise FileExistsError(
                "`resume=False` begins anew, in a directory without "
                f"checkpoints. Received: {self.directory!r}, which has one of "
                f"step {step}. Give another directory, delete this one, or "
                "use `resume='auto'`."
            )

    def _resume_from(self, loop: FitState, step: int) -> None:
        storage = self._storage
        document = storage.document(step)
        where = str(storage.path(step))
        groups = loop.groups()
        is_new = self.begins_anew(loop, step, document)
        if is_new:
            groups = {n: v for n, v in groups.items() if n != _METRICS}
            saved = document["variables"]
            known = {n: v for n, v in saved.items() if n in groups}
            document = document | {"variables": known}
        found = contents.matched(groups, document, where)
        wanted = contents.targets(found, document, loop.mesh)
        arrays = storage.restore(step, wanted, is_part=is_new)
        contents.assign(found, arrays)
        if is_new:
            loop.num_steps = self._saved = step
            return
        state = nests.joined(document["state"], arrays.get(contents.STATE, {}))
        loop.resume(state)
        self._saved = loop.num_steps
        self._announce(loop, step)

    def _announce(self, loop: FitState, step: int) -> None:
        if not self._storage.is_chief:
            return
        if loop.other_batches is not None and not loop.is_over:
            _logger.warning(
                "The place in the data is saved as a number of batches. The "
                "fit in %r resumes in the middle of a pass over data of %s: "
                "until its end rows may be seen twice or not at all. Give the "
                "data and `batch_size` that it had.",
                self.directory,
                loop.other_batches,
            )
        if loop.is_over:
            _logger.warning(
                "The run in %r is over: %d steps are done, and nothing is "
                "trained. %s",
                self.directory,
                step,
                "A callback ended it (as EarlyStopping does): give another "
                "directory."
                if loop.was_stopped
                else "Give more `epochs`, or another directory.",
            )
            return
        text = (
            f"Resuming from step {step} in {self.directory!r}: epoch "
            f"{loop.epoch + 1}, after {loop.step} of its steps."
        )
        _logger.info("%s", text)
        if loop.verbose != 0:
            print(text, flush=True)

    # Saving.

    def _save(self, loop: FitState, logs: dict[str, Any] | None = None) -> None:
        """Saves, unless that was done after the same step."""
        if self._saved == loop.num_steps:
            return
        self.before_save(loop)
        loop.sync()
        state = loop.state(is_epoch_over=loop.step == 0)
        arrays, document = contents.packed(loop.groups(), state)
        facts = {
            "epoch": loop.epoch,
            "step_in_epoch": loop.step,
            "num_processes": loop.mesh.num_processes,
            "num_replicas": loop.mesh.num_replicas,
            "logs": logs or {},
        }
        self._storage.save(loop.num_steps, arrays, document, facts)
        self._saved = loop.num_steps
        if logs is not None:
            self._check_best(logs, is_last=loop.is_last_epoch)
        if self._clock is not None:
            self._clock.restart(loop.num_steps)
        self.after_save(loop)

    def _check_best(self, logs: dict[str, Any], *, is_last: bool) -> None:
        """Warns once if there is nothing that the best are chosen by."""
        best = self._keep.best
        if best is None or self._is_best_known:
            return
        # Not every epoch is validated.
        may_come = best.startswith("val_") and not is_last
        self._is_best_known = best in logs or not may_come
        if best in logs or may_come or not self._storage.is_chief:
            return
        _logger.warning(
            "`Keep(best=%r)` chooses by a name in `logs`, which have %s: no "
            "checkpoint is retained as the best. Give one of these names.",
            best,
            sorted(logs),
        )

    def _end_preempted(self, loop: FitState) -> None:
        self.wait()
        if loop.mesh.num_processes == 1:
            from keras_strategies.cluster.watchdog import exit_hooks

            exit_hooks.write(
                f"stopped by SIGTERM after step {loop.num_steps}, which is "
                f"saved in {self.directory!r}; exit code "
                f"{int(ExitCode.PREEMPTED)}."
            )
        raise Preempted


def _check_directory(directory: object) -> None:
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(
            "`directory` is a path: a string or a `pathlib.Path`. "
            f"Received: an object of type {type(directory).__name__}. "
            "Give a path, as 'checkpoints'."
        )
    if not os.fspath(directory):
        raise ValueError(
            "`directory` is where checkpoints are saved. Received: "
            f"directory={directory!r}. Give a path, as 'checkpoints'."
        )

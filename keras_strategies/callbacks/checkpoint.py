"""The callback that saves checkpoints of a fit and resumes the fit."""

import logging
import os
from typing import Any, Literal

from keras_strategies.checkpoint import contents, nests
from keras_strategies.checkpoint.directory.retention import Keep, as_keep
from keras_strategies.checkpoint.manager import Clock
from keras_strategies.checkpoint.storage import Storage
from keras_strategies.cluster.checks import check_number, check_type
from keras_strategies.cluster.exchange.exit_codes import ExitCode, Preempted
from keras_strategies.fit.callbacks.resumable_fit import (
    CheckpointCallback,
    FitState,
)
from keras_strategies.names.phases import SAVE, Phase
from keras_strategies.watchdog import watchdog
from keras_strategies.watchdog.preemption import PreemptionNotice

_logger = logging.getLogger(__name__)

_FIX = "Omit it, or pass a positive number."


class Checkpoint(CheckpointCallback):
    """A callback that saves the complete state of a `fit` and resumes from it.

    A checkpoint contains the weights, the state of layers, metrics and random
    seeds, the optimizers, the position in the epoch and in the data,
    `History`, and the states of callbacks. A callback's state is saved if it is
    Keras's `EarlyStopping`, `ReduceLROnPlateau`, `ModelCheckpoint`,
    `OrbaxCheckpoint`, `CSVLogger`, `TensorBoard` or `SwapEMAWeights`, or if it
    has the methods `get_state()` and `set_state(state)`.

    If `fit` finds a checkpoint in the directory, it resumes at the next batch
    as if training had not been interrupted. On the same number of devices and
    processes the results are identical bit for bit; on a different number they
    agree up to rounding errors.

    A save copies the arrays to the host, and then writes them in the background
    while training continues. On SIGTERM all processes save after the same step
    and exit with code 75. If the newest checkpoint is damaged, the one before
    it is restored.

    Differs from `keras.callbacks.BackupAndRestore`: training can resume in the
    middle of an epoch, with its complete state, on any number of processes.
    The checkpoints are not deleted when training is done. Calling `fit` again
    then trains no further steps and logs a warning.

    Args:
      directory: Path of the directory for checkpoints, on a disk that all
        processes share. Use a separate directory for each run.
      save_every_steps: Number of train steps between saves.
      save_every_seconds: Number of seconds between saves, measured by the
        chief's clock.
      save_every_epochs: Number of epochs between saves. It defaults to 1 if
        neither `save_every_steps` nor `save_every_seconds` is given. A
        checkpoint is always saved at the end of training.
      keep: Number of newest checkpoints to keep, or a `ks.checkpoint.Keep`.
      resume: "auto" to resume if the directory contains a checkpoint; True to
        raise an error if it contains none; False to start from scratch, which
        requires a directory without checkpoints.

    Raises:
      TypeError: if `directory` is not a path, or an argument has the wrong
        type.
      ValueError: if a number is not positive, or `resume` is invalid. In
        `fit`: if the checkpoint was saved from a different model.
      OSError: in `fit`, if the directory cannot be written to.

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

    # Set only while a fit runs.
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
        fix = "Pass a path, such as 'checkpoints'."
        check_type("`directory`", directory, (str, os.PathLike), "a path", fix)
        if not os.fspath(directory):
            raise ValueError(f"`directory` must not be empty. {fix}")
        periods = (save_every_steps, save_every_seconds, save_every_epochs)
        units = ("steps", "seconds", "epochs")
        for unit, value in zip(units, periods, strict=True):
            name, is_whole = f"`save_every_{unit}`", unit != "seconds"
            check_number(name, value, _FIX, above=0, is_whole=is_whole)
        if resume not in ("auto", True, False):
            raise ValueError(
                "`resume` must be 'auto', True or False. Received: "
                f"resume={resume!r}. Use 'auto' to resume if there is a "
                "checkpoint."
            )
        self.directory = os.fspath(directory)
        self._every_steps = save_every_steps
        self._every_epochs = save_every_epochs
        if periods == (None, None, None):
            self._every_epochs = 1
        self._every_seconds = save_every_seconds and float(save_every_seconds)
        self._keep = as_keep(keep)
        self._resume = resume
        self._clock: Clock | None = None
        self._saved: int | None = None
        self._is_best_known = False

    @property
    def saved_step(self) -> int | None:
        """The step of the checkpoint last saved or resumed from, or None."""
        return self._saved

    # Hooks that subclasses may override.

    def begins_anew(
        self, loop: FitState, step: int, document: dict[str, Any]
    ) -> bool:
        """Returns whether to restore only the variables of a checkpoint.

        If True, the metrics, the epoch and the position in the data start
        over. All processes call this method together.

        Args:
          loop: The state of the fit.
          step: The step of the checkpoint.
          document: The JSON document of the checkpoint.
        """
        return False

    def before_save(self, loop: FitState) -> None:
        """Does nothing; a hook that all processes call before a save begins."""

    def after_save(self, loop: FitState) -> None:
        """Does nothing; a hook that all processes call after a save has begun.

        The files may still be written in the background; `wait` blocks until
        the save is complete.
        """

    def wait(self) -> None:
        """Blocks until the last save is completely written to disk."""
        self._storage.wait()

    # Called by fit.

    def begin(self, loop: FitState) -> None:
        """Opens the directory, and resumes if it contains a checkpoint."""
        self._storage = Storage(
            self.directory, processes=loop.mesh.processes, keep=self._keep
        )
        self._storage.open()
        step = self._storage.find_newest()
        self._check_resume(step)
        self._saved = None
        if step is not None:
            self._resume_from(loop, step)
        is_alone = loop.mesh.num_processes == 1
        progress = None if is_alone else watchdog.get_runner()
        self._notice = PreemptionNotice(progress).__enter__()
        if self._every_seconds is not None:
            self._clock = Clock(
                self._every_seconds, loop.num_steps, loop.mesh.processes
            )

    def after_batch(self, loop: FitState) -> None:
        """Saves if a save is due, or if SIGTERM asks the process to exit."""
        is_due = self._is_step_due(loop.num_steps)
        if self._clock is not None and self._clock.is_due(loop.num_steps):
            is_due = True
        # The last step of an epoch is saved by `after_epoch` instead, so that
        # the checkpoint contains the validation results.
        is_due &= not loop.is_last_step
        if not (is_due or self._notice.came):
            return
        loop.settle()
        if loop.model.stop_training:
            # Keras calls `after_epoch` next, which saves. A checkpoint saved
            # here would be in the middle of an epoch that was stopped early: a
            # fit that resumes from it would never reach the epoch's end.
            return
        self._save(loop)
        if self._notice.came:
            self._end_preempted(loop)

    def _is_step_due(self, num_steps: int) -> bool:
        # An execution of several steps may end after a multiple of `every`, not
        # at it.
        every = self._every_steps
        if every is None:
            return False
        return num_steps // every > (self._saved or 0) // every

    def after_epoch(self, loop: FitState, logs: dict[str, Any]) -> None:
        """Saves if a save is due, or if this was the last epoch."""
        every = self._every_epochs
        is_due = every is not None and loop.epoch % every == 0
        is_due |= self._is_step_due(loop.num_steps)
        if self._clock is not None:
            is_due |= self._clock.is_waiting
        if is_due or loop.is_last_epoch or self._notice.came:
            self._save(loop, logs)
        if self._notice.came:
            self._end_preempted(loop)

    def close(self, *, is_done: bool) -> None:
        """Waits for the last save to finish and closes the directory."""
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
            # This error must not hide the one that ended the fit.
            _logger.exception("A checkpoint could not be saved.")
        if is_done and notice is not None and notice.came:
            # SIGTERM arrived after the last epoch had been saved.
            raise Preempted

    # Resuming.

    def _check_resume(self, step: int | None) -> None:
        if self._resume is True and step is None:
            raise FileNotFoundError(
                "`resume=True` needs a checkpoint to resume from. Received: "
                f"the directory {self.directory!r}, which contains no valid "
                "checkpoint. Pass another directory, or `resume='auto'` to "
                "start from scratch."
            )
        if self._resume is False and step is not None:
            raise FileExistsError(
                "`resume=False` starts from scratch and needs a directory "
                f"without checkpoints. Received: {self.directory!r}, which "
                f"contains a checkpoint of step {step}. Pass another "
                "directory, delete this one, or pass `resume='auto'`."
            )

    def _resume_from(self, loop: FitState, step: int) -> None:
        storage = self._storage
        document = storage.load_document(step)
        where = str(storage.path(step))
        groups = loop.groups()
        is_new = self.begins_anew(loop, step, document)
        if is_new:
            # The metrics start over. With their group removed, they are neither
            # compared with the checkpoint nor restored from it.
            groups = {n: v for n, v in groups.items() if n != "metrics"}
            saved = document["variables"]
            known = {n: v for n, v in saved.items() if n in groups}
            document = document | {"variables": known}
        found = contents.match_variables(groups, document, where)
        wanted = contents.make_targets(found, document, loop.mesh)
        arrays = storage.restore(step, wanted, is_part=is_new)
        contents.assign(found, arrays)
        if is_new:
            loop.num_steps = self._saved = step
            return
        state = nests.join(document["state"], arrays.get(contents.STATE, {}))
        loop.resume(state)
        self._saved = loop.num_steps
        self._announce(loop, step)

    def _announce(self, loop: FitState, step: int) -> None:
        if not self._storage.is_chief:
            return
        if loop.other_batches is not None and not loop.is_over:
            _logger.warning(
                "The fit in %r resumes in the middle of a pass over the data, "
                "but the data differ from those of the saved run: %s. Until "
                "the end of this pass rows may be seen twice or not at all. "
                "Pass the original data and `batch_size`.",
                self.directory,
                loop.other_batches,
            )
        if loop.is_over:
            _logger.warning(
                "The run in %r has ended after %d steps, so `fit` trains no "
                "further steps. %s",
                self.directory,
                step,
                "A callback stopped it, as EarlyStopping does. To train again, "
                "use another directory."
                if loop.was_stopped
                else "Pass more `epochs` to continue, or use another directory "
                "to start again.",
            )
            return
        place = f"epoch {loop.epoch + 1}, after {loop.step} of its steps"
        text = f"Resuming from step {step} in {self.directory!r}: {place}."
        _logger.info("%s", text)
        if loop.verbose != 0:
            print(text, flush=True)

    # Saving.

    def _save(self, loop: FitState, logs: dict[str, Any] | None = None) -> None:
        """Saves a checkpoint unless this step has already been saved."""
        if self._saved != loop.num_steps:
            with Phase(SAVE) as phase:
                self._save_now(loop, logs)
                phase.result = loop.num_steps

    def _save_now(self, loop: FitState, logs: dict[str, Any] | None) -> None:
        self.before_save(loop)
        loop.model.jax_state_sync()
        state = loop.state(is_epoch_over=loop.step == 0)
        arrays, document = contents.pack_checkpoint(loop.groups(), state)
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
        """Warns once if the metric named by `Keep(best=...)` is not logged."""
        best = self._keep.best
        if best is None or self._is_best_known:
            return
        # With `validation_freq`, a later epoch may still log a "val_" metric.
        may_come = best.startswith("val_") and not is_last
        self._is_best_known = best in logs or not may_come
        if best in logs or may_come or not self._storage.is_chief:
            return
        _logger.warning(
            "`best` of `Keep` must be the name of a value in the logs. "
            "Received: best=%r, but the logs contain %s. No checkpoint is kept "
            "as the best one. Pass one of the names in the logs.",
            best,
            sorted(logs),
        )

    def _end_preempted(self, loop: FitState) -> None:
        self.wait()
        if loop.mesh.num_processes == 1:
            from keras_strategies.watchdog import exit_hooks

            exit_hooks.write(
                f"stopped by SIGTERM after step {loop.num_steps}. A checkpoint "
                f"of this step is saved in {self.directory!r}. The process "
                f"exits with exit code {int(ExitCode.PREEMPTED)}."
            )
        raise Preempted

"""The callback that saves, resumes and finishes a call of `Estimator.train`.

A call of `train` is one epoch of Keras's `fit`. If the previous call was
interrupted, the next call resumes it at the batch after the checkpoint. If the
previous call was completed, the next call reads the data from the start, as in
TensorFlow. A small file in `model_dir`, called the mark, shows whether the last
call was completed.
"""

import dataclasses
import json
import logging
import os
import pathlib
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

from keras_strategies.estimator.config.run_config import RunConfig
from keras_strategies.estimator.seam import (
    Checkpoint,
    FitState,
    Form,
    Keep,
    ReplicaMesh,
    Rounds,
    contents,
    dry_run,
    find_fit_state,
    is_count,
    load_form,
    open_regular,
    reading,
)

MARK = "training.json"
"""The name of the mark: a file in `model_dir` with the step at which the last
completed call of `train` ended."""

_MAX_MARK_BYTES = 4096
_WHERE = "the check whether the last `Estimator.train` was completed"
_MARK = {"ended_at_step": is_count}
_PROGRESS = {"step": is_count, "begun": is_count, "is_done": bool}
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of the training whose checkpoints are in a directory.

    Attributes:
      step: The global step of the newest checkpoint; 0 without checkpoints.
      begun: The global step at which the interrupted call of `train` began;
        equal to `step` if the last call was completed.
      is_done: Whether the last call of `train` was completed.
    """

    step: int = 0
    begun: int = 0
    is_done: bool = True


def share_progress(mesh: ReplicaMesh, model_dir: str) -> Progress:
    """Returns the chief's training progress; all processes must call this.

    It reads only the metadata of the newest checkpoint, not its arrays.
    """
    path, local = reading.find_newest(model_dir, is_quick=True), Progress()
    if path is not None:
        step = reading.parse_step(path)
        epoch, steps = reading.read_position(contents.load_document(path), path)
        is_done = is_done_at(model_dir, step, epoch)
        begun = step if is_done else step - steps
        local = Progress(step=step, begun=begun, is_done=is_done)
    values = dataclasses.asdict(local)
    chief = broadcast_from_chief(mesh, "`Estimator.train`", values, _PROGRESS)
    return Progress(**{name: chief[name] for name in _PROGRESS})


def is_done_at(model_dir: str, step: int, epoch: int) -> bool:
    """Returns whether a checkpoint was saved at the end of a `train` call.

    Args:
      model_dir: The directory.
      step: The checkpoint's step.
      epoch: The checkpoint's epoch.
    """
    # A call of `train` is one epoch, so the epoch is 1 at its end. However, if
    # the data end right after a checkpoint was saved within the epoch, no
    # further checkpoint is saved, and only the mark shows that the call has
    # ended.
    return epoch > 0 or read_end_step(model_dir) == step


def read_end_step(model_dir: str) -> int | None:
    """Returns the step at which `train` last ended; None if unknown."""
    try:
        with open_regular(pathlib.Path(model_dir, MARK)) as file:
            text = file.read(_MAX_MARK_BYTES + 1)
        mark = load_form(text, _MARK, max_characters=_MAX_MARK_BYTES)
    except (OSError, ValueError):
        return None
    return mark["ended_at_step"]


def identify_mark(model_dir: str) -> tuple[int, int] | None:
    """Returns an ID that changes whenever a call of `train` ends, or None."""
    try:
        status = os.stat(os.path.join(model_dir, MARK))
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def mark_end(model_dir: str, step: int) -> None:
    """Writes the mark file, atomically, to record that `train` has ended."""
    with tempfile.NamedTemporaryFile(
        "w", dir=model_dir, prefix=".training-", delete=False
    ) as file:
        json.dump({"ended_at_step": step}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, pathlib.Path(model_dir, MARK))


def find_global_step(model: Any) -> int:
    """Returns the global step of a model that is training."""
    loop = find_fit_state(model)
    return 0 if loop is None else loop.num_steps


def broadcast_from_chief(
    mesh: ReplicaMesh, name: str, value: object, form: Form
) -> Any:
    """Sends the chief's value to all processes.

    All processes must call this function.

    Args:
      mesh: The replicas.
      name: What the value describes, for error messages.
      value: This process's value, which must be convertible to JSON. Only the
        chief's value is used.
      form: The types that each process's value must have.

    Returns:
      The chief's `value`. If there are several processes, an error is raised
      unless all values have the types of `form`.
    """
    if mesh.num_processes == 1 or dry_run.get() is not None:
        return value
    with Rounds(mesh.processes, name) as rounds:
        return rounds.exchange(value, form)[0]


def has_steps(
    mesh: ReplicaMesh,
    config: RunConfig,
    progress: Progress,
    max_steps: int | None,
) -> bool:
    """Returns whether a `train` call has steps left; logs a warning if not.

    Args:
      mesh: The replicas.
      config: The RunConfig.
      progress: The progress of the training.
      max_steps: The global step to train up to, or None.
    """
    if max_steps is None or progress.step < max_steps:
        return True
    if mesh.is_chief:
        _logger.warning(
            "No step is trained, because the training in %s has already "
            "reached step %d, and max_steps=%d. Pass a larger `max_steps`, or "
            "another `model_dir`.",
            config.model_dir,
            progress.step,
            max_steps,
        )
    return False


def warn_of_end(num_steps: int, planned_steps: int | None) -> None:
    """Warns if the data ended before the requested number of steps.

    In TensorFlow, an `input_fn` that returns tensors never runs out of data.

    Args:
      num_steps: The number of steps that the call has trained.
      planned_steps: The number of steps that were requested; None to train
        until the data end.
    """
    if planned_steps is not None and num_steps < planned_steps:
        warnings.warn(
            "Arrays that an `input_fn` returns are read only once, so training "
            "ended before the requested number of steps. Received: arrays with "
            f"{num_steps} batches of rows for {planned_steps} steps. Return a "
            "generator, or a dataset that repeats.",
            stacklevel=2,
        )


class TrainCheckpoint(Checkpoint):
    """A callback that saves and resumes a call of `Estimator.train`.

    Args:
      config: The RunConfig, which defines where and how often to save.
      listeners: Objects like `CheckpointSaverListener`, called in the chief.
      after_save: Function that is called with the global step after each save,
        in all processes, and returns whether to stop.
      initialize: Function that is called with the model if there is no
        checkpoint to resume from.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        listeners: tuple[Any, ...] = (),
        after_save: Callable[[int], bool] | None = None,
        initialize: Callable[[Any], None] = lambda model: None,
    ) -> None:
        steps = config.save_checkpoints_steps or None
        seconds = config.save_checkpoints_secs or None
        super().__init__(
            config.model_dir or "",
            save_every_steps=steps,
            save_every_seconds=seconds,
            # A call of `train` is one epoch, so this saves once, at its end.
            save_every_epochs=1,
            keep=Keep(
                last=config.keep_checkpoint_max,
                every_n_hours=config.keep_checkpoint_every_n_hours,
            ),
        )
        self._listeners = listeners
        # Those that are called in this process.
        self._listeners_here: tuple[Any, ...] = ()
        self._asks_to_stop = after_save
        self._initialize = initialize
        self._mesh: ReplicaMesh | None = None

    @property
    def num_steps(self) -> int:
        """The global step of the last checkpoint."""
        return self.saved_step or 0

    def begin(self, loop: FitState) -> None:
        """Restores or initializes the model and notifies the listeners."""
        self._mesh = loop.mesh
        self._listeners_here = self._listeners if loop.mesh.is_chief else ()
        super().begin(loop)
        if self.saved_step is None:
            self._initialize(loop.model)
        for listener in self._listeners_here:
            listener.begin()

    def close(self, *, is_done: bool) -> None:
        """Waits for the last save and records that `train` has ended."""
        super().close(is_done=is_done)
        if not is_done or self._mesh is None:
            return
        if self._mesh.is_chief:
            mark_end(self.directory, self.num_steps)
        for listener in self._listeners_here:
            listener.end(None, self.num_steps)
        # This is a barrier: no process may look for the last checkpoint before
        # the chief has completed it and written the mark.
        broadcast_from_chief(
            self._mesh, "the end of `Estimator.train`", None, None
        )

    def begins_anew(
        self, loop: FitState, step: int, document: dict[str, Any]
    ) -> bool:
        """Returns whether the last call of `train` was completed."""
        where = reading.make_path(self.directory, step)
        epoch, _ = reading.read_position(document, where)
        is_done = is_done_at(self.directory, step, epoch)
        is_done = broadcast_from_chief(loop.mesh, _WHERE, is_done, bool)
        if is_done:
            _logger.info("Resuming from step %d in %r.", step, self.directory)
        return is_done

    def before_save(self, loop: FitState) -> None:
        """Notifies the listeners that a checkpoint will be saved."""
        for listener in self._listeners_here:
            listener.before_save(None, loop.num_steps)

    def after_save(self, loop: FitState) -> None:
        """Notifies the listeners of a saved checkpoint; they may stop `fit`."""
        if not self._listeners and self._asks_to_stop is None:
            return
        self.wait()
        should_stop = False
        for listener in self._listeners_here:
            should_stop |= bool(listener.after_save(None, loop.num_steps))
        should_stop = broadcast_from_chief(
            loop.mesh, "the decision to stop training", should_stop, bool
        )
        if self._asks_to_stop is not None:
            should_stop |= self._asks_to_stop(loop.num_steps)
        if should_stop:
            _logger.info("Stopping at step %d, as requested.", loop.num_steps)
            loop.model.stop_training = True

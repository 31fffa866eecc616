"""The callback that resumes and ends a call of `Estimator.train`.

A call is one epoch of Keras's `fit`. Where the last one was interrupted it
resumes at its next batch; where it came to its end, its data begin anew, as
in tf. A mark in the directory tells the two apart.
"""

import dataclasses
import json
import logging
import os
import pathlib
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.callbacks.checkpoint import Checkpoint
from keras_strategies.checkpoint import Keep, contents, reading
from keras_strategies.cluster.exchange.host_exchange import Agreement
from keras_strategies.cluster.exchange.message_forms import (
    Form,
    is_count,
    load_form,
    read_messages,
)
from keras_strategies.cluster.untrusted import open_regular
from keras_strategies.estimator.config.run_config import RunConfig
from keras_strategies.keras_bridge.callbacks.resumable_fit import (
    FitState,
    loop_of,
)

MARK = "training.json"
"""The file that says where the last call of `train` came to its end."""

_MAX_MARK_BYTES = 4096
_WHERE = "where a training is"
_MARK = {"ended_at_step": is_count}
_PROGRESS = {"step": is_count, "begun": is_count, "is_done": bool}
_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Where the training in a directory is.

    Attributes:
      step: The global step.
      begun: The global step at which the call under way began; `step` if
        none is.
      is_done: Whether the last call came to its end.
    """

    step: int = 0
    begun: int = 0
    is_done: bool = True


def progress_in(model_dir: str) -> Progress:
    """Where the training in a directory is; reads no arrays."""
    path = reading.newest_complete(model_dir)
    if path is None:
        return Progress()
    step = reading.step_of(path)
    epoch, steps = reading.place_in(contents.document_of(path), path)
    if is_done_at(model_dir, step, epoch):
        return Progress(step=step, begun=step)
    return Progress(step=step, begun=step - steps, is_done=False)


def progress_of_all(mesh: ReplicaMesh, model_dir: str) -> Progress:
    """Where the chief finds the training to be. Collective."""
    found = dataclasses.asdict(progress_in(model_dir))
    of_chief = value_of_chief(mesh, "`Estimator.train`", found, _PROGRESS)
    return Progress(**{name: of_chief[name] for name in _PROGRESS})


def is_done_at(model_dir: str, step: int, epoch: int) -> bool:
    """Returns whether a checkpoint was saved where a call came to its end.

    Args:
      model_dir: The directory.
      step: The checkpoint's step.
      epoch: Its epoch.
    """
    # A call is one epoch. The data may also end where it was saved already.
    return epoch > 0 or ended_at(model_dir) == step


def ended_at(model_dir: str) -> int | None:
    """The step at which the last call of `train` came to its end."""
    try:
        with open_regular(pathlib.Path(model_dir, MARK)) as file:
            text = file.read(_MAX_MARK_BYTES + 1)
        mark = load_form(text, _MARK, max_characters=_MAX_MARK_BYTES)
    except (OSError, ValueError):
        return None
    return mark["ended_at_step"]


def mark_of(model_dir: str) -> tuple[int, int] | None:
    """What changes when another call comes to its end."""
    try:
        found = os.stat(os.path.join(model_dir, MARK))
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def mark_end(model_dir: str, step: int) -> None:
    """Says that a call came to its end. In one go: it is there, or not."""
    with tempfile.NamedTemporaryFile(
        "w", dir=model_dir, prefix=".training-", delete=False
    ) as file:
        json.dump({"ended_at_step": step}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(file.name, pathlib.Path(model_dir, MARK))


def step_of_fit(model: Any) -> int:
    """Returns the global step of a model whose training is under way."""
    loop = loop_of(model)
    return 0 if loop is None else loop.num_steps


def value_of_chief(
    mesh: ReplicaMesh, name: str, value: object, form: Form
) -> Any:
    """What the chief has, in all processes. Collective.

    Args:
      mesh: The replicas.
      name: What it is about.
      value: What this process has; JSON.
      form: What it must be like.

    Returns:
      The chief's `value`, of that form.
    """
    if mesh.num_processes == 1:
        return value
    agreement = Agreement(mesh.processes, name)
    received = agreement.exchange(json.dumps(value))
    agreement.end()
    return read_messages(
        received[:1], form, processes=mesh.processes[:1], about=name
    )[0]


def steps_of_call(
    progress: Progress,
    steps: int | None,
    max_steps: int | None,
    *,
    is_endless: bool,
) -> int | None:
    """How many steps a call of `train` has, those done before included.

    Args:
      progress: Where the training is.
      steps: As given to `train`.
      max_steps: As given to `train`.
      is_endless: Whether the data never end.

    Returns:
      The number of steps; None for as many as the data have.
    """
    if max_steps is not None:
        return max_steps - progress.begun
    if steps is not None:
        return steps
    return sys.maxsize if is_endless else None


def has_steps(
    mesh: ReplicaMesh,
    config: RunConfig,
    progress: Progress,
    max_steps: int | None,
) -> bool:
    """Returns whether a call has steps to train; warns if it has none.

    Args:
      mesh: The replicas.
      config: The RunConfig.
      progress: Where the training is.
      max_steps: Up to which the call is to train.
    """
    if max_steps is None or progress.step < max_steps:
        return True
    if mesh.is_chief:
        _logger.warning(
            "Nothing is trained: %s is at step %d, and max_steps=%d. Give more "
            "`max_steps`, or another `model_dir`.",
            config.model_dir,
            progress.step,
            max_steps,
        )
    return False


def warn_of_end(num_steps: int, wanted: int | None) -> None:
    """Warns of arrays, which end: as tensors in tf they had no end.

    Args:
      num_steps: How many steps a call had.
      wanted: How many it was to have; None for as many as the data have.
    """
    if wanted is not None and num_steps < wanted:
        warnings.warn(
            "Arrays that an `input_fn` returns are read once. Received: "
            f"{num_steps} batches of rows for {wanted} steps. Return a dataset "
            "that repeats, such as `tf.data.Dataset.from_tensor_slices("
            "arrays).repeat().batch(batch_size)`, or a generator.",
            stacklevel=2,
        )


class TrainCheckpoint(Checkpoint):
    """Keeps a call of `Estimator.train` as its RunConfig says.

    Args:
      config: The RunConfig; its `model_dir` is where.
      listeners: Objects like `CheckpointSaverListener`; called in the chief.
      after_save: Called in all processes after a checkpoint, with the global
        step; returns whether to stop. Collective.
      initialize: Called with the model where there is no checkpoint.
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
            # The end of training is saved in any case.
            save_every_epochs=1,
            keep=Keep(
                last=config.keep_checkpoint_max,
                every_n_hours=config.keep_checkpoint_every_n_hours,
            ),
        )
        self._listeners = listeners
        self._asks_to_stop = after_save
        self._initialize = initialize
        self._mesh: ReplicaMesh | None = None

    @property
    def num_steps(self) -> int:
        """The global step of the last checkpoint."""
        return self.saved_step or 0

    def begin(self, loop: FitState) -> None:
        """See `Checkpoint.begin`."""
        self._mesh = loop.mesh
        super().begin(loop)
        if self.saved_step is None:
            self._initialize(loop.model)
        for listener in self._listeners_here:
            listener.begin()

    def close(self, *, is_done: bool) -> None:
        """See `Checkpoint.close`."""
        super().close(is_done=is_done)
        if not is_done or self._mesh is None:
            return
        if self._mesh.is_chief:
            mark_end(self.directory, self.num_steps)
        for listener in self._listeners_here:
            listener.end(None, self.num_steps)
        # Nobody looks for the last checkpoint before it is complete.
        value_of_chief(self._mesh, "the end of `Estimator.train`", None, None)

    @property
    def _listeners_here(self) -> tuple[Any, ...]:
        assert self._mesh is not None
        return self._listeners if self._mesh.is_chief else ()

    def begins_anew(
        self, loop: FitState, step: int, document: dict[str, Any]
    ) -> bool:
        """Returns whether the last call of `train` came to its end."""
        where = reading.path_of(self.directory, step)
        epoch, _ = reading.place_in(document, where)
        is_done = is_done_at(self.directory, step, epoch)
        is_done = value_of_chief(loop.mesh, _WHERE, is_done, bool)
        if is_done:
            _logger.info("Resuming from step %d in %r.", step, self.directory)
        return is_done

    def before_save(self, loop: FitState) -> None:
        """See `Checkpoint.before_save`."""
        for listener in self._listeners_here:
            listener.before_save(None, loop.num_steps)

    def after_save(self, loop: FitState) -> None:
        """Has listeners look at a checkpoint that is complete."""
        if not self._listeners and self._asks_to_stop is None:
            return
        self.wait()
        should_stop = False
        for listener in self._listeners_here:
            should_stop |= bool(listener.after_save(None, loop.num_steps))
        should_stop = value_of_chief(
            loop.mesh, "after a checkpoint", should_stop, bool
        )
        if self._asks_to_stop is not None:
            should_stop |= self._asks_to_stop(loop.num_steps)
        if should_stop:
            _logger.info("Stopping at step %d, as asked for.", loop.num_steps)
            loop.model.stop_training = True

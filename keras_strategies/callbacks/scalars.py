"""`ks.callbacks.Scalars`: the scalars of a run, for TensorBoard and the log."""

import logging
import math
import os
import time
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_strategies._types import Logs
from keras_strategies.callbacks.event_files import Points, check_installed
from keras_strategies.callbacks.global_step import (
    ROWS,
    STEPS,
    Every,
    GlobalStep,
)
from keras_strategies.cluster.checks import check_number, check_type
from keras_strategies.variables.model_variables import (
    read_learning_rates,
)

_MAX_ENTRIES = 100
_log = logging.getLogger(__name__)


class Scalars(keras.callbacks.Callback):
    """A callback that writes loss, metrics, learning rate and speed.

    It writes event files for TensorBoard, in the chief only:

    - Training writes to `<log_dir>`, at every multiple of `every_n_steps` and
      at the last step of a `fit`. The scalars are `loss` and the metrics as in
      Keras's logs (means over the epoch so far), `learning_rate`,
      `global_step/sec` and `examples/sec`.
    - `evaluate`, and the validation in `fit`, write their results to
      `<log_dir>/eval`.

    A step is a train step, counted over all calls of `fit` of a model. A step
    that is neither written nor logged costs no time, because the callback does
    not read its logs. With `steps_per_execution=K`, the first step at or after
    each multiple of `every_n_steps` is written.

    If a checkpoint contains the callback's state (`get_state`), the callback
    resumes at the checkpoint's step, and TensorBoard drops the old points of
    steps that are trained again. The speeds exclude the first execution of a
    fit, which includes compilation, and the time of evaluations. Examples are
    the rows of all processes, without padding. Metrics of more than 100 entries
    are not written.

    Args:
      log_dir: The directory of the run, created if needed. It may be in a
        bucket (`gs://`, `s3://`) if the library that tensorboardX needs to
        access the bucket is installed. None to write no files, only log lines.
      every_n_steps: Number of train steps between points; 0 to write no points
        of training.
      log_every_n_steps: Number of train steps between log lines such as "step
        300: loss = 0.123 (12.3 steps/s, 1 230 examples/s)". They are logged by
        the logger `keras_strategies` at level INFO. 0 to log no lines; None to
        use `every_n_steps`.
      eval_name: Name of the evaluation, whose results are then written to
        `<log_dir>/eval_<eval_name>`.
      initial_step: Number of steps trained before this callback is first used.
        None to read the step count of the model's optimizer.

    Raises:
      ImportError: if tensorboardX, which writes the files, is not installed.
      TypeError: if `log_dir` is not a path, or a number is not an integer.
      ValueError: if a number is negative.
      OSError: in `fit`, before the first step: if the directory cannot be
        written to.
      RuntimeError: in `fit` and `evaluate`, if the model was compiled outside a
        strategy's scope.

    Example:
      ```python
      scalars = ks.callbacks.Scalars("logs/first", every_n_steps=50)
      model.fit(x, y, validation_data=(x_val, y_val), callbacks=[scalars])
      model.evaluate(x_test, y_test, callbacks=[
          ks.callbacks.Scalars("logs/first", eval_name="test")
      ])
      ```
    """

    _ks_reads_logs = True

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None,
        *,
        every_n_steps: int = 100,
        log_every_n_steps: int | None = None,
        eval_name: str | None = None,
        initial_step: int | None = None,
    ) -> None:
        super().__init__()
        fix = "Pass the directory to write to."
        kinds = (str, os.PathLike, type(None))
        check_type("`log_dir`", log_dir, kinds, "a path, or None", fix)
        if log_dir is None:
            self._train = self._eval = Points(None)
        else:
            check_installed()
            directory = os.fspath(log_dir)
            eval_directory = f"eval_{eval_name}" if eval_name else "eval"
            self._train = Points(directory)
            self._eval = Points(os.path.join(directory, eval_directory))
        if log_every_n_steps is None:
            log_every_n_steps = every_n_steps
        self._writes = Every(_steps("every_n_steps", every_n_steps))
        self._logs = Every(_steps("log_every_n_steps", log_every_n_steps))
        if initial_step is not None:
            initial_step = _steps("initial_step", initial_step)
        self._step = GlobalStep(initial_step)
        self._eval_step: int | None = None
        self._is_fitting = self._has_begun = self._is_writer = False
        self._has_trained = False
        self._due = math.inf
        self._test_began = 0.0
        self._validated: set[str] = set()

    def get_state(self) -> dict[str, Any]:
        """Returns the state to save in a checkpoint, as JSON values.

        All points written so far are on disk when this method returns.
        """
        self._train.flush()
        self._eval.flush()
        step = self._step.value
        done = self._eval_step
        return {"step": step, "eval_step": step if done is None else done}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Resumes from a state that `get_state` returned.

        Args:
          state: The result of `get_state`, in this process or another one.
        """
        self._step.set(int(state["step"]))
        self._eval_step = int(state["eval_step"])
        if self._has_begun:
            self._resume_writing()

    # Called by Keras in fit.

    def set_model(self, model: keras.Model) -> None:
        """Sets the model; called by Keras."""
        super().set_model(model)
        # Each time a callback reads `self.model` during a step, Keras writes
        # the step's arrays back to all variables. `_fitted` avoids this.
        self._fitted = model

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Opens the file now, so that errors are raised before any step."""
        self._follow()
        self._is_fitting, self._has_begun = True, False
        self._has_trained = False
        self._eval.close()
        self._train.close()
        if self._is_writer and self._writes.period:
            self._train.open()

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Determines, in the first epoch, the step that the fit starts at."""
        if not self._has_begun:
            # All callbacks have restored their state by now.
            self._has_begun = True
            self._step.settle(self._fitted)
            self._resume_writing()
        self._validated = set()

    def wants_batch(self, batch: int) -> bool:
        """Returns whether the logs of the last execution are needed.

        Args:
          batch: The index that Keras assigns to the execution's last batch.
        """
        if not self._is_writer:
            return False
        step = self._step.value
        if not self._has_trained:
            # The first execution includes compilation, so the speed is
            # measured from its end.
            self._has_trained = True
            for every in (self._writes, self._logs):
                every.start(time.perf_counter(), step, self._step.rows)
        return step >= self._due

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Writes the logs of a batch if they are due."""
        if self.wants_batch(batch):
            self._write(logs or {})

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Writes the last step and closes the files."""
        names = {f"val_{name}" for name in self._validated}
        values = {k: v for k, v in (logs or {}).items() if k not in names}
        if self._has_trained:
            self._write(values, is_last=True)
        self._is_fitting = False
        self._train.close()
        self._eval.close()

    # Called by Keras in evaluate, and for the validation in fit.

    def on_test_begin(self, logs: Logs | None = None) -> None:
        """Records the start time; opens the file unless a fit is running."""
        self._test_began = time.perf_counter()
        if not self._is_fitting:
            self._follow()
            self._step.settle(self._fitted)
            if self._is_writer:
                self._eval.open()

    def on_test_end(self, logs: Logs | None = None) -> None:
        """Writes the results of an evaluation at the current train step."""
        logs = logs or {}
        self._validated |= set(logs)
        self._eval_step = self._step.value
        if self._is_writer:
            self._eval.add(self._eval_step, self._flat(logs))
        if not self._is_fitting:
            self._eval.close()
        for every in (self._writes, self._logs):
            every.leave_out(time.perf_counter() - self._test_began)

    # Implementation.

    def _follow(self) -> None:
        binding = self._step.follow(self._fitted, "Scalars")
        self._is_writer = binding.is_chief

    def _resume_writing(self) -> None:
        """Drops points after the current step and restarts the schedules."""
        step = self._step.value
        if self._eval_step is None:
            self._eval_step = step
        self._train.discard_from(step + 1)
        self._eval.discard_from(self._eval_step + 1)
        self._writes.begin(step)
        self._logs.begin(step, is_on=_log.isEnabledFor(logging.INFO))
        self._due = min(self._writes.due, self._logs.due)

    def _write(self, logs: Mapping[str, Any], is_last: bool = False) -> None:
        """Writes and logs the current step if it is due or the last one."""
        step, rows, now = self._step.value, self._step.rows, time.perf_counter()
        values = self._flat(logs)
        if self._writes.is_due(step, is_last=is_last):
            speed = self._writes.take(now, step, rows)
            rates = read_learning_rates(self._fitted)
            self._train.add(step, {**rates, **values, **speed})
        if self._logs.is_due(step, is_last=is_last):
            speed = self._logs.take(now, step, rows)
            _log.info("%s", _line(step, values, speed))
        self._due = min(self._writes.due, self._logs.due)

    def _flat(self, logs: Mapping[str, Any]) -> dict[str, float]:
        """Returns the logs as floats, with a separate tag per array entry."""
        flat: dict[str, float] = {}
        for name, value in logs.items():
            try:
                array = np.asarray(value, "float64")
            except (TypeError, ValueError):
                continue
            if array.size > _MAX_ENTRIES:
                continue
            for index in np.ndindex(array.shape):
                tag = "/".join([name, *map(str, index)])
                flat[tag if array.size > 1 else name] = float(array[index])
        return flat


def _line(
    step: int, values: Mapping[str, float], speed: Mapping[str, float]
) -> str:
    """Formats the log line of a step; the loss comes first."""
    names = sorted(values, key=lambda name: name != "loss")
    shown = ", ".join(f"{name} = {values[name]:.4g}" for name in names)
    if not speed:
        return f"step {step}: {shown}"
    rows = f"{speed[ROWS]:,.0f} examples/s".replace(",", " ")
    return f"step {step}: {shown} ({speed[STEPS]:.3g} steps/s, {rows})"


def _steps(name: str, value: int) -> int:
    fix = "Pass a number of steps, 0 or more."
    check_number(f"`{name}`", value, fix, minimum=0, is_optional=False)
    return int(value)

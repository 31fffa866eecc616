"""Hooks that stop training early, based on the results of evaluations."""

import logging
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras

from keras_strategies._types import Logs
from keras_strategies.estimator import records, train_callback
from keras_strategies.estimator.arguments import (
    check_kind,
    check_positive,
    check_seconds,
)
from keras_strategies.estimator.engine import find_strategy
from keras_strategies.estimator.estimator import Estimator
from keras_strategies.estimator.estimator_spec import ModeKeys
from keras_strategies.estimator.seam import (
    check_number,
    check_type,
)

_logger = logging.getLogger(__name__)

Results = Mapping[int, Mapping[str, float]]
Values = Iterable[tuple[int, float]]
_Comparison = Callable[[Any, Any], bool]


def make_early_stopping_hook(
    estimator: Estimator,
    should_stop_fn: Callable[[], bool],
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> keras.callbacks.Callback:
    """Returns a hook that stops training when a function returns True.

    The chief calls the function after the first step of each call of `train`,
    and then periodically. It sends the result to the other processes.

    Args:
      estimator: The Estimator that trains.
      should_stop_fn: Function without arguments that returns whether to stop.
      run_every_secs: Number of seconds between calls. It must be None if
        `run_every_steps` is given, or if several processes train.
      run_every_steps: Number of steps between calls.

    Returns:
      A Keras callback to pass as one of the `hooks`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if both or neither of `run_every_secs` and `run_every_steps`
        are given, or if `run_every_secs` is given and several processes train.

    Example:
      ```python
      import pathlib

      hook = ks.estimator.experimental.make_early_stopping_hook(
          estimator, pathlib.Path("stop").exists, run_every_secs=30
      )
      spec = ks.estimator.TrainSpec(train_input_fn, hooks=[hook])
      ```
    """
    check_kind("estimator", estimator, Estimator)
    if (run_every_secs is None) == (run_every_steps is None):
        raise ValueError(
            "Exactly one of `run_every_secs` and `run_every_steps` must be "
            f"set. Received: {run_every_secs} and {run_every_steps}. Set one "
            "of them to a number and the other to None."
        )
    check_positive("run_every_steps", run_every_steps)
    if run_every_secs is not None:
        check_seconds("run_every_secs", run_every_secs)
        mesh = find_strategy(estimator, ModeKeys.TRAIN).mesh
        if mesh.num_processes > 1:
            raise ValueError(
                "`run_every_secs` must be None if several processes train, "
                f"because their clocks differ. Received: {run_every_secs}. Set "
                "`run_every_steps` instead."
            )
    return _Stopping(estimator, should_stop_fn, run_every_secs, run_every_steps)


def stop_if_higher_hook(
    estimator: Estimator,
    metric_name: str,
    threshold: float,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> keras.callbacks.Callback:
    """Returns a hook that stops training when a metric exceeds a threshold.

    Args:
      estimator: The Estimator that trains.
      metric_name: Name of a result of the Estimator's evaluations, such as
        "accuracy".
      threshold: The threshold, a number.
      eval_dir: The evaluation's directory, which contains the results; None for
        `estimator.eval_dir()`.
      min_steps: Results of evaluations before this global step are ignored.
      run_every_secs: See `make_early_stopping_hook`.
      run_every_steps: See `make_early_stopping_hook`.

    Returns:
      A Keras callback to pass as one of the `hooks`.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: as for `make_early_stopping_hook`. The hook also raises it
        during training, if the evaluations have no result named `metric_name`.

    Example:
      ```python
      hook = ks.estimator.experimental.stop_if_higher_hook(
          estimator, "accuracy", threshold=0.9, min_steps=100
      )
      spec = ks.estimator.TrainSpec(train_input_fn, hooks=[hook])
      ```
    """
    every = run_every_secs, run_every_steps
    rule = _make_threshold_rule(threshold, operator.gt)
    return _make_hook(rule, estimator, metric_name, eval_dir, min_steps, every)


def stop_if_lower_hook(
    estimator: Estimator,
    metric_name: str,
    threshold: float,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> keras.callbacks.Callback:
    """Returns a hook that stops training when a metric is below a threshold.

    The arguments, result and errors are the same as for `stop_if_higher_hook`.

    Example:
      ```python
      hook = ks.estimator.experimental.stop_if_lower_hook(
          estimator, "loss", threshold=0.1, min_steps=100
      )
      spec = ks.estimator.TrainSpec(train_input_fn, hooks=[hook])
      ```
    """
    every = run_every_secs, run_every_steps
    rule = _make_threshold_rule(threshold, operator.lt)
    return _make_hook(rule, estimator, metric_name, eval_dir, min_steps, every)


def stop_if_no_increase_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_increase: int,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> keras.callbacks.Callback:
    """Returns a hook that stops training when a metric no longer increases.

    The arguments, result and errors are the same as for `stop_if_higher_hook`,
    except that `max_steps_without_increase` replaces the threshold. Training
    stops when this number of train steps has passed since the best result.

    Example:
      ```python
      hook = ks.estimator.experimental.stop_if_no_increase_hook(
          estimator, "accuracy", max_steps_without_increase=500
      )
      spec = ks.estimator.TrainSpec(train_input_fn, hooks=[hook])
      ```
    """
    every = run_every_secs, run_every_steps
    rule = _make_stall_rule(max_steps_without_increase, operator.gt)
    return _make_hook(rule, estimator, metric_name, eval_dir, min_steps, every)


def stop_if_no_decrease_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_decrease: int,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> keras.callbacks.Callback:
    """Returns a hook that stops training when a metric no longer decreases.

    The arguments, result and errors are the same as for
    `stop_if_no_increase_hook`, except that the number of steps is called
    `max_steps_without_decrease`.

    Example:
      ```python
      hook = ks.estimator.experimental.stop_if_no_decrease_hook(
          estimator, "loss", max_steps_without_decrease=500
      )
      spec = ks.estimator.TrainSpec(train_input_fn, hooks=[hook])
      ```
    """
    every = run_every_secs, run_every_steps
    rule = _make_stall_rule(max_steps_without_decrease, operator.lt)
    return _make_hook(rule, estimator, metric_name, eval_dir, min_steps, every)


def iter_values(
    results: Results, name: str, min_steps: int
) -> Iterator[tuple[int, float]]:
    """Yields the global step and a result's value, for each evaluation.

    Args:
      results: Results by global step, in ascending order of the steps.
      name: The result's name.
      min_steps: Results at lower steps are skipped.

    Raises:
      ValueError: if an evaluation has no result with this name.
    """
    for step, metrics in results.items():
        if step < min_steps:
            continue
        if name not in metrics:
            raise ValueError(
                "`metric_name` must be the name of a result. Received: "
                f"{name!r}; the results are {sorted(metrics)}. Use one of them."
            )
        yield step, metrics[name]


def has_stalled(values: Values, max_steps: int, is_better: _Comparison) -> bool:
    """Returns whether the values have not improved for a number of steps.

    Args:
      values: The steps and values that `iter_values` yields.
      max_steps: Number of train steps without a better value after which the
        result is True.
      is_better: Function of a value and the best value so far that returns
        whether the value is better.
    """
    best: tuple[int, float] | None = None
    for step, value in values:
        if best is None or is_better(value, best[1]):
            best = (step, value)
        if step - best[0] >= max_steps:
            return True
    return False


class _Stopping(keras.callbacks.Callback):
    """A callback that periodically asks a function whether to stop."""

    def __init__(
        self,
        estimator: Estimator,
        should_stop_fn: Callable[[], bool],
        every_secs: float | None,
        every_steps: int | None,
    ) -> None:
        super().__init__()
        self._mesh = find_strategy(estimator, ModeKeys.TRAIN).mesh
        self._should_stop_fn = should_stop_fn
        self._is_by_steps = every_steps is not None
        self._every = every_steps or every_secs or 0
        # The step or the time of the last question.
        self._asked_at: float | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        # The function is called after the first step of every call of `train`,
        # so that a run that was stopped early and is started again stops
        # immediately.
        self._asked_at = None

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        step = train_callback.find_global_step(self.model)
        now = step if self._is_by_steps else time.monotonic()
        if self._asked_at is not None and now < self._asked_at + self._every:
            return
        self._asked_at = now
        should_stop = self._mesh.is_chief and bool(self._should_stop_fn())
        if train_callback.broadcast_from_chief(
            self._mesh, "the decision to stop early", should_stop, bool
        ):
            _logger.info("Requesting early stopping at global step %d.", step)
            self.model.stop_training = True  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]


def _make_hook(
    rule: Callable[[Values], bool],
    estimator: Estimator,
    name: str,
    eval_dir: str | None,
    min_steps: int,
    every: tuple[float | None, int | None],
) -> keras.callbacks.Callback:
    """Returns a hook that stops training once `rule` holds for a metric."""
    what, fix = "the name of a result", "Pass a name, such as 'accuracy'."
    check_type("`metric_name`", name, str, what, fix)
    fix = "Pass an integer."
    check_number("`min_steps`", min_steps, fix, is_optional=False)

    def should_stop() -> bool:
        results = records.read(eval_dir or estimator.eval_dir())
        return rule(iter_values(results, name, min_steps))

    return make_early_stopping_hook(estimator, should_stop, *every)


def _make_threshold_rule(
    threshold: float, is_better: _Comparison
) -> Callable[[Values], bool]:
    fix = "Pass, for example, 0.95."
    check_number(
        "`threshold`", threshold, fix, is_whole=False, is_optional=False
    )
    return lambda values: any(is_better(v, threshold) for _, v in values)


def _make_stall_rule(
    max_steps: int, is_better: _Comparison
) -> Callable[[Values], bool]:
    name = "The number of steps without improvement"
    check_number(name, max_steps, "Pass an integer.", is_optional=False)
    return lambda values: has_stalled(values, max_steps, is_better)

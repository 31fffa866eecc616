"""Early stopping of a training, by the results of evaluations."""

import logging
import numbers
import operator
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras

from keras_strategies._types import Logs
from keras_strategies.cluster.addresses import shown
from keras_strategies.cluster.checks import check_number, check_type
from keras_strategies.estimator import records, train_callback
from keras_strategies.estimator.arguments import (
    check_kind,
    check_positive,
    check_seconds,
)
from keras_strategies.estimator.engine import strategy_of
from keras_strategies.estimator.estimator import Estimator
from keras_strategies.estimator.estimator_spec import ModeKeys

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
    """A hook that ends the training when a function says so.

    The chief asks the function, and sends the answer to the others: after the
    first step of a call of `train`, and then as often as is given.

    Args:
      estimator: The Estimator that trains.
      should_stop_fn: Takes nothing; whether to stop.
      run_every_secs: Seconds between two questions; None with
        `run_every_steps`, and on several processes.
      run_every_steps: Steps between two questions, instead.

    Returns:
      A Keras callback for `hooks`.

    Raises:
      TypeError: an argument of another type.
      ValueError: both or none of seconds and steps, or seconds on several
        processes.

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
    if not callable(should_stop_fn):
        raise TypeError(
            "`should_stop_fn` must be callable. Received: "
            f"{shown(should_stop_fn)}. Give a function that takes nothing."
        )
    if (run_every_secs is None) == (run_every_steps is None):
        raise ValueError(
            "Only one of `run_every_secs` and `run_every_steps` must be set. "
            f"Received: run_every_secs={run_every_secs}, run_every_steps="
            f"{run_every_steps}. Set the other one to None."
        )
    check_positive("run_every_steps", run_every_steps)
    if run_every_secs is not None:
        check_seconds("run_every_secs", run_every_secs)
        mesh = strategy_of(estimator, ModeKeys.TRAIN).mesh
        if mesh.num_processes > 1:
            raise ValueError(
                "run_every_secs should not be set when several processes "
                f"train: their clocks differ. Received: {run_every_secs}. "
                "Pass run_every_secs=None and run_every_steps=..."
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
    """A hook that ends the training when a metric is above a threshold.

    Args:
      estimator: The Estimator that trains.
      metric_name: A result of its evaluations: "accuracy".
      threshold: The threshold.
      eval_dir: Where the results are; None for `estimator.eval_dir()`.
      min_steps: Results of earlier global steps do not count.
      run_every_secs: See `make_early_stopping_hook`.
      run_every_steps: See `make_early_stopping_hook`.

    Returns:
      A Keras callback for `hooks`.

    Raises:
      TypeError: an argument of another type.
      ValueError: see `make_early_stopping_hook`; (in training) there is no
        such result.

    Example:
      ```python
      hook = ks.estimator.experimental.stop_if_higher_hook(
          estimator, "accuracy", threshold=0.9, min_steps=100
      )
      spec = ks.estimator.TrainSpec(train_input_fn, hooks=[hook])
      ```
    """
    every = run_every_secs, run_every_steps
    rule = _beyond(threshold, operator.gt)
    return _hook(rule, estimator, metric_name, eval_dir, min_steps, every)


def stop_if_lower_hook(
    estimator: Estimator,
    metric_name: str,
    threshold: float,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> keras.callbacks.Callback:
    """A hook that ends the training when a metric is below a threshold.

    Arguments, returns and errors as of `stop_if_higher_hook`.

    Example:
      ```python
      hook = ks.estimator.experimental.stop_if_lower_hook(
          estimator, "loss", threshold=0.1, min_steps=100
      )
      spec = ks.estimator.TrainSpec(train_input_fn, hooks=[hook])
      ```
    """
    every = run_every_secs, run_every_steps
    rule = _beyond(threshold, operator.lt)
    return _hook(rule, estimator, metric_name, eval_dir, min_steps, every)


def stop_if_no_increase_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_increase: int,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> keras.callbacks.Callback:
    """A hook that ends the training when a metric rises no more.

    Arguments, returns and errors as of `stop_if_higher_hook`, but instead of a
    threshold `max_steps_without_increase`: how many train steps may pass since
    the best result.

    Example:
      ```python
      hook = ks.estimator.experimental.stop_if_no_increase_hook(
          estimator, "accuracy", max_steps_without_increase=500
      )
      spec = ks.estimator.TrainSpec(train_input_fn, hooks=[hook])
      ```
    """
    every = run_every_secs, run_every_steps
    rule = _without_improvement(max_steps_without_increase, operator.gt)
    return _hook(rule, estimator, metric_name, eval_dir, min_steps, every)


def stop_if_no_decrease_hook(
    estimator: Estimator,
    metric_name: str,
    max_steps_without_decrease: int,
    eval_dir: str | None = None,
    min_steps: int = 0,
    run_every_secs: float | None = 60,
    run_every_steps: int | None = None,
) -> keras.callbacks.Callback:
    """A hook that ends the training when a metric falls no more.

    Arguments, returns and errors as of `stop_if_no_increase_hook`.

    Example:
      ```python
      hook = ks.estimator.experimental.stop_if_no_decrease_hook(
          estimator, "loss", max_steps_without_decrease=500
      )
      spec = ks.estimator.TrainSpec(train_input_fn, hooks=[hook])
      ```
    """
    every = run_every_secs, run_every_steps
    rule = _without_improvement(max_steps_without_decrease, operator.lt)
    return _hook(rule, estimator, metric_name, eval_dir, min_steps, every)


def values_of(
    results: Results, name: str, min_steps: int
) -> Iterator[tuple[int, float]]:
    """Yields the global steps and values of a result.

    Args:
      results: By global step, in order.
      name: The result's name.
      min_steps: Results of earlier steps are left out.

    Raises:
      ValueError: a step has no such result.
    """
    for step, metrics in results.items():
        if step < min_steps:
            continue
        if name not in metrics:
            raise ValueError(
                "`metric_name` is a result of evaluations. Received: "
                f"{name!r}; there are {sorted(metrics)}. Give one of these."
            )
        yield step, metrics[name]


def is_beyond(values: Values, threshold: float, is_better: _Comparison) -> bool:
    """Returns whether a value is better than a threshold.

    Args:
      values: What `values_of` yields.
      threshold: The threshold.
      is_better: Compares a value with it.
    """
    return any(is_better(value, threshold) for _, value in values)


def is_without_improvement(
    values: Values, max_steps: int, is_better: _Comparison
) -> bool:
    """Returns whether no value was better for so many steps.

    Args:
      values: What `values_of` yields.
      max_steps: How many train steps may pass since the best one.
      is_better: Compares a value with the best one.
    """
    best: tuple[int, float] | None = None
    for step, value in values:
        if best is None or is_better(value, best[1]):
            best = (step, value)
        if step - best[0] >= max_steps:
            return True
    return False


class _Stopping(keras.callbacks.Callback):
    """Asks now and then whether to stop."""

    def __init__(
        self,
        estimator: Estimator,
        should_stop_fn: Callable[[], bool],
        every_secs: float | None,
        every_steps: int | None,
    ) -> None:
        super().__init__()
        self._mesh = strategy_of(estimator, ModeKeys.TRAIN).mesh
        self._should_stop_fn = should_stop_fn
        self._every_secs = every_secs
        self._every_steps = every_steps
        self._asked_at: float | None = None
        self._asked: int | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        # What stopped a training stops it again when it is called again.
        self._asked_at = self._asked = None

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        step = train_callback.step_of_fit(self.model)
        if not self._is_due(step):
            return
        self._asked_at, self._asked = time.monotonic(), step
        should_stop = self._mesh.is_chief and bool(self._should_stop_fn())
        if train_callback.value_of_chief(
            self._mesh, "stopping early", should_stop, bool
        ):
            _logger.info("Requesting early stopping at global step %d.", step)
            self.model.stop_training = True  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]

    def _is_due(self, step: int) -> bool:
        if self._asked is None or self._asked_at is None:
            return True
        if self._every_steps is not None:
            return step - self._asked >= self._every_steps
        return time.monotonic() - self._asked_at >= (self._every_secs or 0)


def _hook(
    rule: Callable[[Values], bool],
    estimator: Estimator,
    name: str,
    eval_dir: str | None,
    min_steps: int,
    every: tuple[float | None, int | None],
) -> keras.callbacks.Callback:
    """Returns a hook that asks a rule about the results of a name."""
    what, cure = "the name of a result", "Give a name as 'accuracy'."
    check_type("`metric_name`", name, str, what, cure)
    _check_whole("`min_steps`", min_steps)

    def should_stop() -> bool:
        results = records.read(eval_dir or estimator.eval_dir())
        return rule(values_of(results, name, min_steps))

    return make_early_stopping_hook(estimator, should_stop, *every)


def _beyond(
    threshold: object, is_better: _Comparison
) -> Callable[[Values], bool]:
    if isinstance(threshold, bool) or not isinstance(threshold, numbers.Real):
        raise TypeError(
            "`threshold` is a number. Received: "
            f"{shown(threshold)}. Give, for example, 0.95."
        )
    return lambda values: is_beyond(values, float(threshold), is_better)


def _without_improvement(
    max_steps: int, is_better: _Comparison
) -> Callable[[Values], bool]:
    _check_whole("The number of steps without improvement", max_steps)
    return lambda values: is_without_improvement(values, max_steps, is_better)


def _check_whole(name: str, value: object) -> None:
    check_number(name, value, "Give a whole number.", is_optional=False)

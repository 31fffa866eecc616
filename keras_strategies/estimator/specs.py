"""TrainSpec, EvalSpec and CheckpointSaverListener."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from keras_strategies.estimator.arguments import (
    check_hooks,
    check_input_fn,
    check_items,
    check_name,
    check_positive,
    check_seconds,
)
from keras_strategies.estimator.exporters import Exporter
from keras_strategies.estimator.seam import check_type

DEFAULT_EVAL_STEPS = 100
"""The default number of batches in an evaluation, as in TensorFlow."""


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """The training arguments of `train_and_evaluate`, as in TensorFlow.

    Attributes:
      input_fn: Function that returns the training data; see `Estimator.train`.
      max_steps: The global step to train up to; None to train until the data
        end.
      hooks: Keras callbacks.
      saving_listeners: `CheckpointSaverListener`s, whose methods are called
        when checkpoints are saved.

    Raises:
      TypeError: if an argument has the wrong type, such as a SessionRunHook.
      ValueError: if `max_steps` is 0 or less.

    Example:
      >>> spec = ks.estimator.TrainSpec(train_input_fn, max_steps=1000)
      >>> spec.max_steps
      1000
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None
    hooks: Iterable[Any] | None = None
    saving_listeners: Iterable[Any] | None = None

    def __post_init__(self) -> None:
        check_input_fn(self.input_fn)
        check_positive("max_steps", self.max_steps)
        _set(self, "hooks", check_hooks(self.hooks))
        name, what = "saving_listeners", "`CheckpointSaverListener`s"
        fix = "Pass objects of a subclass."
        given, kind = self.saving_listeners, CheckpointSaverListener
        _set(self, name, check_items(name, given, kind, what, fix))


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """The evaluation arguments of `train_and_evaluate`, as in TensorFlow.

    Attributes:
      input_fn: Function that returns the evaluation data; see
        `Estimator.evaluate`.
      steps: Number of batches in each evaluation. The default is 100, as in
        TensorFlow; pass None to evaluate every row.
      name: Name of the evaluation. Its files are written to the directory
        `eval_<name>`, so that several evaluations do not share a directory.
      hooks: Keras callbacks.
      exporters: An `Exporter`, or several exporters with different names. They
        are called after each evaluation.
      start_delay_secs: Number of seconds that a separate evaluator process
        waits before it starts.
      throttle_secs: Minimum number of seconds from the start of an evaluation
        to the start of the next one.

    Raises:
      TypeError: if an argument has the wrong type, such as a SessionRunHook.
      ValueError: if `steps` is 0 or less, a number of seconds is negative, or
        exporters have empty or identical names.

    Example:
      ```python
      spec = ks.estimator.EvalSpec(
          eval_input_fn, steps=None, throttle_secs=60,
          exporters=ks.estimator.LatestExporter("latest"),
      )
      ```
    """

    input_fn: Callable[..., Any]
    steps: int | None = DEFAULT_EVAL_STEPS
    name: str | None = None
    hooks: Iterable[Any] | None = None
    exporters: Exporter | Iterable[Exporter] | None = None
    start_delay_secs: float = 120
    throttle_secs: float = 600

    def __post_init__(self) -> None:
        check_input_fn(self.input_fn)
        check_positive("steps", self.steps)
        check_name(self.name)
        _set(self, "hooks", check_hooks(self.hooks))
        _set(self, "exporters", _check_exporters(self.exporters))
        check_seconds("start_delay_secs", self.start_delay_secs)
        check_seconds("throttle_secs", self.throttle_secs)


class CheckpointSaverListener:
    """A base class for objects that are notified when checkpoints are saved.

    As in TensorFlow, pass instances of subclasses to `Estimator.train`. Their
    methods are called only in the chief. `session` is always None.

    Example:
      ```python
      class Notes(ks.estimator.CheckpointSaverListener):
          def after_save(self, session, global_step_value):
              print("saved", global_step_value)

      estimator.train(input_fn, saving_listeners=[Notes()])
      ```
    """

    def begin(self) -> None:
        """Does nothing by default; called before the first step."""

    def before_save(self, session: None, global_step_value: int) -> None:
        """Does nothing by default; called before a checkpoint is written.

        Args:
          session: Always None.
          global_step_value: Number of training steps so far.
        """

    def after_save(self, session: None, global_step_value: int) -> bool | None:
        """Does nothing by default; called after a checkpoint is written.

        Args:
          session: Always None.
          global_step_value: Number of training steps so far.

        Returns:
          True to stop training; any other value to continue.
        """

    def end(self, session: None, global_step_value: int) -> None:
        """Does nothing by default; called after the last checkpoint.

        Args:
          session: Always None.
          global_step_value: Number of training steps so far.
        """


def _set(spec: object, name: str, value: object) -> None:
    object.__setattr__(spec, name, value)


def _check_exporters(exporters: Any) -> tuple[Exporter, ...]:
    if not isinstance(exporters, Iterable | None):
        exporters = [exporters]
    what = "an Exporter, an iterable of Exporters, or None"
    fix = "Use, for example, `ks.estimator.BestExporter()`."
    checked = check_items("exporters", exporters, Exporter, what, fix)
    for exporter in checked:
        name, what = exporter.name or None, "a str that is not empty"
        check_type("`name`", name, str, what, "Pass a name.")
        check_name(exporter.name)
    names = [exporter.name for exporter in checked]
    if len(set(names)) < len(names):
        raise ValueError(
            "`exporters` must have unique names. Received: the names "
            f"{names}. Rename an exporter, because each one writes to the "
            "directory with its name."
        )
    return checked

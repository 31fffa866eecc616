"""TrainSpec, EvalSpec and listeners, the arguments of training."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from keras_strategies.cluster.addresses import shown
from keras_strategies.cluster.checks import check_type
from keras_strategies.estimator.arguments import (
    check_hooks,
    check_input_fn,
    check_listeners,
    check_name,
    check_positive,
    check_seconds,
)
from keras_strategies.estimator.exporters import Exporter

DEFAULT_EVAL_STEPS = 100
"""Batches of an evaluation; as in tf."""


@dataclasses.dataclass(frozen=True)
class TrainSpec:
    """The training of `train_and_evaluate`; as tf's.

    Attributes:
      input_fn: Makes the training data; see `Estimator.train`.
      max_steps: The global step to train up to; None for as long as the data
        lasts.
      hooks: Keras callbacks.
      saving_listeners: What is called at checkpoints
        (`CheckpointSaverListener`).

    Raises:
      TypeError: an argument of another type, such as a SessionRunHook.
      ValueError: `max_steps` is 0 or less.

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
        listeners = check_listeners(self.saving_listeners)
        _set(self, "saving_listeners", listeners)


@dataclasses.dataclass(frozen=True)
class EvalSpec:
    """The evaluation of `train_and_evaluate`; as tf's.

    Attributes:
      input_fn: Makes the evaluation data; see `Estimator.evaluate`.
      steps: Batches of an evaluation; None for all. 100 as in tf: set it to
        None where every row counts.
      name: The evaluation's, for its files, where there are several.
      hooks: Keras callbacks.
      exporters: An `Exporter`, or several of different names; called after
        each evaluation.
      start_delay_secs: How long an evaluator of its own waits before it
        starts, in seconds.
      throttle_secs: The least seconds from the start of an evaluation to the
        start of the next one.

    Raises:
      TypeError: an argument of another type, such as a SessionRunHook.
      ValueError: `steps` is 0 or less, seconds are negative, or exporters
        have equal or empty names.

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
        _set(self, "exporters", _checked_exporters(self.exporters))
        check_seconds("start_delay_secs", self.start_delay_secs)
        check_seconds("throttle_secs", self.throttle_secs)


class CheckpointSaverListener:
    """A listener of checkpoints while an Estimator trains; as tf's.

    Called in the chief. `session` is None: there is none.

    Example:
      ```python
      class Notes(ks.estimator.CheckpointSaverListener):
          def after_save(self, session, global_step_value):
              print("saved", global_step_value)

      estimator.train(input_fn, saving_listeners=[Notes()])
      ```
    """

    def begin(self) -> None:
        """Called before the first step."""

    def before_save(self, session: None, global_step_value: int) -> None:
        """Called before a checkpoint is written.

        Args:
          session: None.
          global_step_value: Training steps done.
        """

    def after_save(self, session: None, global_step_value: int) -> bool | None:
        """Called when a checkpoint is complete.

        Args:
          session: None.
          global_step_value: Training steps done.

        Returns:
          True to end the training.
        """

    def end(self, session: None, global_step_value: int) -> None:
        """Called at the end, after the last checkpoint.

        Args:
          session: None.
          global_step_value: Training steps done.
        """


def _set(spec: object, name: str, value: object) -> None:
    object.__setattr__(spec, name, value)


def _checked_exporters(exporters: Any) -> tuple[Exporter, ...]:
    if exporters is None:
        return ()
    # A name is no iterable of its letters.
    is_one = isinstance(exporters, Exporter | str)
    is_one |= not isinstance(exporters, Iterable)
    found = (exporters,) if is_one else tuple(exporters)
    for exporter in found:
        what = "an Exporter, an iterable of Exporter, or `None`"
        cure = "Use, for example, `ks.estimator.BestExporter()`."
        check_type("`exporters`", exporter, Exporter, what, cure)
    names = [exporter.name for exporter in found]
    for name in names:
        if not name:
            raise ValueError(
                "An Exporter cannot have a name that is `None` or empty. "
                f"Received: the names {names}. Give each a name."
            )
        if not isinstance(name, str):
            raise ValueError(
                f"An Exporter must have a string name. Received: {shown(name)} "
                f"of type {type(name).__name__}. Give each a name as 'best'."
            )
        check_name(name)
    if len(set(names)) < len(names):
        raise ValueError(
            "`exporters` must have unique names. Received: the names "
            f"{names}. Give each another one: they are folders."
        )
    return found

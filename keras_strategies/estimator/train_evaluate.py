"""train_and_evaluate: in one process, or each task of a cluster its part."""

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import jax

from keras_strategies.checkpoint import DamagedCheckpoint, reading
from keras_strategies.estimator import engine, records, train_callback
from keras_strategies.estimator.arguments import check_kind
from keras_strategies.estimator.config.run_cluster import (
    CHIEF,
    EVALUATOR,
    WORKER,
)
from keras_strategies.estimator.estimator import Estimator
from keras_strategies.estimator.estimator_spec import ModeKeys
from keras_strategies.estimator.specs import EvalSpec, TrainSpec

Results = tuple[dict[str, Any] | None, list[str | None]]
_POLL_S = 0.5
_NOTHING: Results = (None, [])
_logger = logging.getLogger(__name__)


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> Results:
    """Trains, evaluates the checkpoints and exports; as tf's.

    In one process: trains up to `train_spec.max_steps`, and meanwhile
    evaluates each new checkpoint, but not more often than
    `eval_spec.throttle_secs`; the last one in any case. Exporters are called
    after each evaluation.

    With a TF_CONFIG each process does its task's part: the chief and the
    workers train together (`train_distribute=
    ks.MultiWorkerMirroredStrategy()`), and an evaluator, which is none of the
    cluster, evaluates what the chief saves until the training is over. All
    need the same `model_dir`. Without an evaluator nothing is evaluated, as
    in tf; the chief logs a warning.

    Called again, it resumes from the last checkpoint; nothing is trained
    where `max_steps` are done.

    Args:
      estimator: The Estimator.
      train_spec: The training.
      eval_spec: The evaluation, and the exporters.

    Returns:
      What the last evaluation and its exporters returned; (None, []) in a
      task that evaluates nothing.

    Raises:
      TypeError: an argument of another type.
      ValueError: a task that has no part here ("ps").
      RuntimeError: an evaluator found no checkpoint for
        `session_creation_timeout_secs` of the RunConfig.

    Example:
      ```python
      ks.estimator.train_and_evaluate(
          estimator,
          ks.estimator.TrainSpec(train_input_fn, max_steps=1000),
          ks.estimator.EvalSpec(
              eval_input_fn, steps=None, throttle_secs=60,
              exporters=ks.estimator.BestExporter(),
          ),
      )
      ```
    """
    _check(estimator, train_spec, eval_spec)
    config = estimator.config
    if config.task_type == EVALUATOR:
        return _follow(estimator, train_spec, eval_spec)
    if not config.cluster_spec:
        return _train_locally(estimator, train_spec, eval_spec)
    if config.task_type not in (CHIEF, WORKER):
        raise ValueError(
            f"Task type {config.task_type} is not supported. Received: a "
            "TF_CONFIG with that task. Supported task types are chief, "
            "worker and evaluator; all that train have all variables."
        )
    _logger.info("Training as %s %d.", config.task_type, config.task_id)
    jobs = config.cluster_spec.jobs if config.is_chief else [EVALUATOR]
    if not {CHIEF, EVALUATOR} & {*jobs}:
        _warn_without_evaluator(estimator)
    _train(estimator, train_spec, None)
    # One that is none of the cluster may follow a "chief".
    may_be = CHIEF in jobs and EVALUATOR not in jobs
    if may_be and not os.path.isdir(estimator.eval_dir(eval_spec.name)):
        _warn_without_evaluator(estimator)
    return _NOTHING


def _warn_without_evaluator(estimator: Estimator) -> None:
    _logger.warning(
        "No evaluator is known, so no checkpoint in %s is evaluated or "
        "exported. Start one more process of the script, whose task in "
        'TF_CONFIG is {"type": "evaluator", "index": 0} (`keras-strategies '
        "launch --evaluator`).",
        estimator.model_dir,
    )


def _check(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> None:
    for name, value, kind in (
        ("estimator", estimator, Estimator),
        ("train_spec", train_spec, TrainSpec),
        ("eval_spec", eval_spec, EvalSpec),
    ):
        check_kind(name, value, kind)
    config = estimator.config
    if config.task_type == EVALUATOR and config.task_id > 0:
        raise ValueError(
            "For distributed training, there can only be one `evaluator` task "
            f"(with task id 0). Received: task id {config.task_id}. Start one."
        )


def _train(
    estimator: Estimator,
    spec: TrainSpec,
    after_save: Callable[[int], bool] | None,
) -> None:
    engine.train(
        estimator,
        spec.input_fn,
        tuple(spec.hooks or ()),
        max_steps=spec.max_steps,
        listeners=tuple(spec.saving_listeners or ()),
        after_save=after_save,
    )


def _train_locally(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> Results:
    evaluation = _Evaluation(estimator, eval_spec, train_spec.max_steps)
    mesh = engine.strategy_of(estimator, ModeKeys.TRAIN).mesh
    throttle_s = eval_spec.throttle_secs

    def after_save(step: int) -> bool:
        is_due = train_callback.value_of_chief(
            mesh, "whether to evaluate", evaluation.is_due(throttle_s), bool
        )
        if is_due:
            evaluation.run(reading.path_of(estimator.model_dir, step))
        else:
            _logger.info("Step %d is not evaluated: throttle_secs.", step)
        return False

    _train(estimator, train_spec, after_save)
    latest = train_callback.value_of_chief(
        mesh,
        "the last checkpoint",
        estimator.latest_checkpoint(),
        str | None,
    )
    if latest is not None and latest != evaluation.path:
        evaluation.run(latest)
    return evaluation.results


def _follow(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> Results:
    """Evaluates what another process saves, until it has ended."""
    evaluation = _Evaluation(estimator, eval_spec, train_spec.max_steps)
    watch = _Watch(estimator, train_spec.max_steps)
    time.sleep(eval_spec.start_delay_secs)
    while True:
        path = estimator.latest_checkpoint()
        is_last = path is not None and watch.is_last(path)
        if path is not None and path != evaluation.path:
            if is_last or evaluation.is_due(eval_spec.throttle_secs):
                try:
                    evaluation.run(path)
                except (DamagedCheckpoint, ValueError):
                    if os.path.isdir(path):
                        raise
                    # Newer ones are there, and this one was deleted.
                    continue
                watch.note_news()
                continue
        elif is_last or watch.is_over(path):
            _logger.info("Exiting evaluation: the training has ended.")
            return evaluation.results
        time.sleep(_POLL_S)


class _Watch:
    """Tells an evaluator whether the training continues.

    Args:
      estimator: The Estimator.
      max_steps: The training's.
    """

    def __init__(self, estimator: Estimator, max_steps: int | None) -> None:
        self._model_dir = estimator.model_dir
        self._max_steps = max_steps
        self._timeout_s = estimator.config.session_creation_timeout_secs
        # The mark of an earlier training may be there still.
        self._stale = train_callback.mark_of(self._model_dir)
        self.note_news()

    def note_news(self) -> None:
        """A new checkpoint was evaluated."""
        self._since = time.monotonic()

    def is_last(self, path: str) -> bool:
        """Whether no checkpoint comes after this one."""
        step = reading.step_of(path)
        if self._max_steps is not None and step >= self._max_steps:
            return True
        mark = train_callback.mark_of(self._model_dir)
        return (
            mark != self._stale
            and train_callback.ended_at(self._model_dir) == step
        )

    def is_over(self, path: str | None) -> bool:
        """Whether there was no news for too long.

        Raises:
          RuntimeError: there never was a checkpoint.
        """
        timeout_s = self._timeout_s
        if timeout_s is None or time.monotonic() - self._since < timeout_s:
            return False
        if path is None:
            raise RuntimeError(
                "An evaluator waits for the first checkpoint for as long as "
                f"`session_creation_timeout_secs`. Received: {timeout_s} s, "
                f"and no checkpoint in {self._model_dir}. Look at the chief's "
                "log; all tasks need the same `model_dir` on a shared disk."
            )
        # A training that ended before this process came here.
        step = reading.step_of(path)
        return train_callback.ended_at(self._model_dir) == step


class _Evaluation:
    """Evaluates checkpoints, and calls the exporters.

    Args:
      estimator: The Estimator.
      spec: The EvalSpec.
      max_steps: The training's: what is evaluated then is the last.

    Attributes:
      path: The checkpoint that was evaluated last.
      results: What that and its exports returned.
    """

    def __init__(
        self, estimator: Estimator, spec: EvalSpec, max_steps: int | None
    ) -> None:
        self._estimator = estimator
        self._spec = spec
        self._max_steps = max_steps
        self._began: float | None = None
        self.path: str | None = None
        self.results: Results = _NOTHING

    def is_due(self, throttle_s: float) -> bool:
        """Whether the last one began long enough ago."""
        began = self._began
        return began is None or time.monotonic() - began >= throttle_s

    def run(self, path: str) -> None:
        """Evaluates a checkpoint and exports it."""
        self._began = time.monotonic()
        spec = self._spec
        metrics = self._estimator.evaluate(
            spec.input_fn,
            steps=spec.steps,
            hooks=spec.hooks,
            checkpoint_path=path,
            name=spec.name,
        )
        self.results = (metrics, self._export(path, metrics))
        self.path = path

    def _export(self, path: str, metrics: dict[str, Any]) -> list[str | None]:
        """Calls the exporters, in the chief."""
        if jax.process_index() != 0:
            return []
        step = metrics[records.GLOBAL_STEP]
        is_final = self._max_steps is not None and step >= self._max_steps
        base = os.path.join(self._estimator.model_dir, "export")
        exporters: Any = self._spec.exporters  # A tuple, since it is checked.
        return [
            exporter.export(
                estimator=self._estimator,
                export_path=os.path.join(base, exporter.name),
                checkpoint_path=path,
                eval_result=metrics,
                is_the_final_export=is_final,
            )
            for exporter in exporters
        ]

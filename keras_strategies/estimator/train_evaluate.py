"""Implements `train_and_evaluate`, for one process and for clusters."""

import logging
import math
import os
import time
from typing import Any

import jax

from keras_strategies.estimator import engine, records, train_callback
from keras_strategies.estimator.arguments import check_kind
from keras_strategies.estimator.config.run_cluster import (
    CHIEF,
    EVALUATOR,
    WORKER,
)
from keras_strategies.estimator.estimator import Estimator
from keras_strategies.estimator.estimator_spec import ModeKeys
from keras_strategies.estimator.seam import (
    DamagedCheckpoint,
    reading,
)
from keras_strategies.estimator.specs import EvalSpec, TrainSpec

Results = tuple[dict[str, Any] | None, list[str | None]]
_POLL_S = 0.5
_NOTHING: Results = (None, [])
_logger = logging.getLogger(__name__)


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> Results:
    """Trains a model, and evaluates and exports it, as in TensorFlow.

    Without a cluster, this process trains up to `train_spec.max_steps`. During
    training it evaluates new checkpoints, but at most one checkpoint every
    `eval_spec.throttle_secs` seconds. The last checkpoint is always evaluated.
    Exporters are called after each evaluation.

    If TF_CONFIG describes a cluster, each process performs the task that its
    TF_CONFIG specifies. The chief and the workers train together
    (`train_distribute=ks.MultiWorkerMirroredStrategy()`). An evaluator, which
    is not part of the training cluster, evaluates the chief's checkpoints until
    training ends. All tasks must use the same `model_dir`. Without an
    evaluator, no checkpoint is evaluated, and the chief logs a warning.

    If the function is called again, it resumes from the last checkpoint. It
    trains no steps if that checkpoint has already reached `max_steps`.

    Args:
      estimator: The Estimator.
      train_spec: The data and the number of steps for training.
      eval_spec: The data and the exporters for evaluation.

    Returns:
      A tuple of the results of the last evaluation and a list of its exporters'
      results; (None, []) in a task that does not evaluate.

    Raises:
      TypeError: if an argument has the wrong type.
      ValueError: if the task's type is not supported ("ps").
      RuntimeError: if an evaluator finds no checkpoint within the RunConfig's
        `session_creation_timeout_secs`.

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
            f"Task type {config.task_type} is not supported. Use the task "
            "types chief, worker and evaluator: the training processes store "
            "the variables of parameter servers."
        )
    _logger.info("Training as %s %d.", config.task_type, config.task_id)
    jobs = config.cluster_spec.jobs if config.is_chief else [EVALUATOR]
    if not {CHIEF, EVALUATOR} & {*jobs}:
        _warn_without_evaluator(estimator)
    engine.train(estimator, train_spec)
    # If the cluster has a "chief", there may be an evaluator that the cluster
    # does not list. If so, its directory exists by now.
    may_be = CHIEF in jobs and EVALUATOR not in jobs
    if may_be and not os.path.isdir(estimator.eval_dir(eval_spec.name)):
        _warn_without_evaluator(estimator)
    return _NOTHING


def _warn_without_evaluator(estimator: Estimator) -> None:
    _logger.warning(
        "No evaluator was found, so no checkpoint in %s is evaluated or "
        "exported. Run the script in one more process, whose task in "
        'TF_CONFIG is {"type": "evaluator", "index": 0}. `keras-strategies '
        "launch --evaluator` starts this process, too.",
        estimator.model_dir,
    )


def _check(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> None:
    check_kind("estimator", estimator, Estimator)
    check_kind("train_spec", train_spec, TrainSpec)
    check_kind("eval_spec", eval_spec, EvalSpec)
    config = estimator.config
    if config.task_type == EVALUATOR and config.task_id > 0:
        raise ValueError(
            "For distributed training, there can only be one `evaluator` task "
            f"(with task id 0). Received: task id {config.task_id}. Start only "
            "one evaluator."
        )


def _train_locally(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> Results:
    evaluation = _Evaluation(estimator, eval_spec, train_spec.max_steps)
    mesh = engine.find_strategy(estimator, ModeKeys.TRAIN).mesh

    def after_save(step: int) -> bool:
        if train_callback.broadcast_from_chief(
            mesh, "the decision to evaluate", evaluation.is_due(), bool
        ):
            evaluation.run(reading.make_path(estimator.model_dir, step))
        else:
            _logger.info(
                "Step %d is not evaluated, because fewer than throttle_secs "
                "seconds have passed since the last evaluation began.",
                step,
            )
        return False

    engine.train(estimator, train_spec, after_save=after_save)
    latest = train_callback.broadcast_from_chief(
        mesh, "the last checkpoint", estimator.latest_checkpoint(), str | None
    )
    if latest is not None and latest != evaluation.path:
        evaluation.run(latest)
    return evaluation.results


def _follow(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> Results:
    """Evaluates the chief's checkpoints until the chief's training ends."""
    evaluation = _Evaluation(estimator, eval_spec, train_spec.max_steps)
    watch = _Watch(estimator, train_spec.max_steps)
    time.sleep(eval_spec.start_delay_secs)
    while True:
        path = estimator.latest_checkpoint()
        is_last = path is not None and watch.is_last(path)
        if path is not None and path != evaluation.path:
            if is_last or evaluation.is_due():
                try:
                    evaluation.run(path)
                except (DamagedCheckpoint, ValueError):
                    if os.path.isdir(path):
                        raise
                    # The chief has deleted this checkpoint because newer ones
                    # exist.
                    continue
                watch.note_news()
                continue
        elif is_last or watch.is_over(path):
            _logger.info("Exiting evaluation: the training has ended.")
            return evaluation.results
        time.sleep(_POLL_S)


class _Watch:
    """Tells an evaluator process whether the chief is still training.

    Args:
      estimator: The Estimator.
      max_steps: The global step at which the training ends, or None.
    """

    def __init__(self, estimator: Estimator, max_steps: int | None) -> None:
        self._model_dir = estimator.model_dir
        self._max_steps = max_steps
        self._timeout_s = estimator.config.session_creation_timeout_secs
        # A file that exists now may have been written by an earlier training.
        self._stale = train_callback.identify_mark(self._model_dir)
        self.note_news()

    def note_news(self) -> None:
        """Restarts the timeout; called after a new checkpoint was evaluated."""
        self._since = time.monotonic()

    def is_last(self, path: str) -> bool:
        """Returns whether a checkpoint is the final one of the training."""
        step = reading.parse_step(path)
        if self._max_steps is not None and step >= self._max_steps:
            return True
        mark = train_callback.identify_mark(self._model_dir)
        return (
            mark != self._stale
            and train_callback.read_end_step(self._model_dir) == step
        )

    def is_over(self, path: str | None) -> bool:
        """Returns whether the training ended before this evaluator started.

        The result is True only if no new checkpoint appeared for the duration
        of the timeout.

        Raises:
          RuntimeError: if no checkpoint was saved before the timeout.
        """
        timeout_s = self._timeout_s
        if timeout_s is None or time.monotonic() - self._since < timeout_s:
            return False
        if path is None:
            raise RuntimeError(
                f"There is no checkpoint in {self._model_dir} after "
                f"{timeout_s} s (`session_creation_timeout_secs`). Check the "
                "chief's log, and that all tasks share the `model_dir`."
            )
        step = reading.parse_step(path)
        return train_callback.read_end_step(self._model_dir) == step


class _Evaluation:
    """Evaluates checkpoints, and calls the exporters with the results.

    Args:
      estimator: The Estimator.
      spec: The EvalSpec.
      max_steps: The global step at which exports are final, or None.

    Attributes:
      path: The last checkpoint that was evaluated, or None.
      results: The results of that evaluation and of its exporters.
    """

    def __init__(
        self, estimator: Estimator, spec: EvalSpec, max_steps: int | None
    ) -> None:
        self._estimator = estimator
        self._spec = spec
        self._max_steps = max_steps
        self._began = -math.inf
        self.path: str | None = None
        self.results: Results = _NOTHING

    def is_due(self) -> bool:
        """Returns whether the next evaluation may begin."""
        earliest = self._began + self._spec.throttle_secs
        return time.monotonic() >= earliest

    def run(self, path: str) -> None:
        """Evaluates a checkpoint, and calls the exporters."""
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
        """Calls the exporters in the chief, and returns their results."""
        if jax.process_index() != 0:
            return []
        step = metrics[records.GLOBAL_STEP]
        is_final = self._max_steps is not None and step >= self._max_steps
        base = os.path.join(self._estimator.model_dir, "export")
        exporters: Any = self._spec.exporters  # EvalSpec makes it a tuple.
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

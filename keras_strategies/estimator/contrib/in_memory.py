"""A hook that evaluates a model during training, without checkpoints."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import keras

from keras_strategies._types import Logs
from keras_strategies.estimator import engine, train_callback
from keras_strategies.estimator.arguments import check_kind
from keras_strategies.estimator.engine import InputFn
from keras_strategies.estimator.estimator import Estimator
from keras_strategies.estimator.estimator_spec import ModeKeys
from keras_strategies.estimator.seam import (
    check_number,
    reading,
)
from keras_strategies.estimator.specs import EvalSpec


class InMemoryEvaluatorHook(keras.callbacks.Callback):
    """A hook that evaluates a model during training, without a checkpoint.

    As in TensorFlow, the chief evaluates at the start, periodically and at the
    end. For an evaluation, the current weights are copied to a separate model,
    which is created in the scope of the strategy `eval_distribute`.

    Args:
      estimator: The Estimator that trains.
      input_fn: Function that returns the evaluation data.
      steps: Number of batches in each evaluation; None for all.
      hooks: Keras callbacks for the evaluations.
      name: Name of the evaluation. Its event files are written to the directory
        `eval_<name>`.
      every_n_iter: Number of train steps between evaluations.

    Raises:
      ValueError: if `every_n_iter` or `steps` is not positive, or `name`
        contains a slash.
      TypeError: if an argument has the wrong type.

    Example:
      ```python
      evaluator = ks.estimator.experimental.InMemoryEvaluatorHook(
          estimator, eval_input_fn, every_n_iter=500
      )
      estimator.train(train_input_fn, hooks=[evaluator], max_steps=1000)
      ```
    """

    def __init__(
        self,
        estimator: Estimator,
        input_fn: InputFn,
        steps: int | None = None,
        hooks: Iterable[Any] | None = None,
        name: str | None = None,
        every_n_iter: int = 100,
    ) -> None:
        super().__init__()
        check_kind("estimator", estimator, Estimator)
        what, fix = "`every_n_iter`", "Pass a number, such as 100."
        check_number(what, every_n_iter, fix, above=0, is_optional=False)
        self._estimator = estimator
        self._spec = EvalSpec(input_fn, steps, name, hooks)
        self._every = every_n_iter
        self._evaluated = 0
        mesh = engine.find_strategy(estimator, ModeKeys.EVAL).mesh
        self._is_here = mesh.num_processes > 1 or jax.process_index() == 0

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Evaluates the initial weights."""
        self._evaluate(train_callback.find_global_step(self.model))

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Evaluates the current weights every `every_n_iter` steps."""
        step = train_callback.find_global_step(self.model)
        if step - self._evaluated >= self._every:
            self._evaluate(step)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Evaluates the final weights, unless they have been evaluated."""
        step = train_callback.find_global_step(self.model)
        if step != self._evaluated:
            self._evaluate(step)

    def _evaluate(self, step: int) -> None:
        self._evaluated = step
        if not self._is_here:
            return
        model = self.model
        assert isinstance(model, keras.Model)
        model.jax_state_sync()
        restore = functools.partial(reading.copy_weights, model)
        engine.evaluate_model(self._estimator, self._spec, restore, step)

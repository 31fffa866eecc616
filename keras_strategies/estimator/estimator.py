"""Estimator: trains, evaluates and exports the model of a `model_fn`."""

import copy
import functools
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from keras_strategies.estimator import (
    engine,
    exporting,
    model_fns,
    records,
    warm_start,
)
from keras_strategies.estimator.arguments import check_kind, check_positive
from keras_strategies.estimator.config.run_config import RunConfig
from keras_strategies.estimator.engine import InputFn, Settings
from keras_strategies.estimator.estimator_spec import ModeKeys
from keras_strategies.estimator.exporters import check_serving
from keras_strategies.estimator.seam import (
    reading,
    shorten,
)
from keras_strategies.estimator.specs import EvalSpec, TrainSpec

_logger = logging.getLogger(__name__)


class Estimator(Settings):
    """Trains, evaluates and exports a model, and computes its predictions.

    The API is that of `tf.estimator.Estimator`.

        def model_fn(features, labels, mode, params):
            model = keras.Sequential([keras.layers.Dense(1)])
            model.compile("adam", "mse", metrics=["mae"])
            return model

        config = ks.estimator.RunConfig(
            "models/first", train_distribute=ks.MirroredStrategy()
        )
        estimator = ks.estimator.Estimator(model_fn, config=config)
        estimator.train(train_input_fn, max_steps=1000)
        print(estimator.evaluate(eval_input_fn))

    Each call of `train`, `evaluate` or `predict` creates a new model: it calls
    `model_fn` in the scope of the strategy, and then restores the model from
    the newest checkpoint in `model_dir`. Subclasses may override methods.

    An `input_fn` may have any of the arguments `params`, `config`, `mode` and
    `input_context`, and is called with the ones that it has. It returns a
    dataset of (features, labels), a generator of batches, or (features,
    labels) as arrays, which are read in batches of 32 rows. Its batches are
    global batches. If the function has the argument `input_context`, it must
    instead return a process-local dataset of per-replica batches.

    Args:
      model_fn: Function that creates and returns a compiled `keras.Model`, or
        returns an `EstimatorSpec`. It may have any of the arguments
        `features`, `labels`, `mode` (see `ModeKeys`), `params` and `config`,
        which are passed by name. Features are `keras.Input`s and labels are
        `keras.KerasTensor`s. Use them as the inputs of a functional model, or
        only to read their shapes.
      model_dir: Directory for checkpoints, event files and exports; None to use
        `config.model_dir`, or a temporary directory if that is None too.
      config: The RunConfig; None for a default one.
      params: Parameters to pass to `model_fn` and `input_fn`. Each call gets a
        copy.
      warm_start_from: A checkpoint, a `model_dir` or `WarmStartSettings`. The
        initial weights are read from it if `model_dir` contains no checkpoint
        yet.

    Raises:
      ValueError: if `model_fn` is missing or has unknown arguments, or if
        `model_dir` differs from `config.model_dir`.
      TypeError: if an argument has the wrong type.

    References:
      https://www.tensorflow.org/versions/r2.15/api_docs/python/tf/estimator/Estimator
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: str
        | os.PathLike[str]
        | warm_start.WarmStartSettings
        | None = None,
    ) -> None:
        model_fns.check_model_fn(model_fn, params)
        super().__init__(
            model_fn,
            _resolve_config(config, model_dir),
            copy.deepcopy({} if params is None else params),
            warm_start.make_settings(warm_start_from),
        )

    def train(
        self,
        input_fn: InputFn,
        hooks: Iterable[Any] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Iterable[Any] | None = None,
    ) -> "Estimator":
        """Trains from the newest checkpoint onward and saves a new one.

        Each call reads the data from the start, as in TensorFlow. If a call was
        interrupted (the process was killed or received SIGTERM), the next call
        completes it, starting with the first batch that was not trained on. If
        the strategy spans several processes, all of them must call `train`.

        Args:
          input_fn: Function that returns the data; see `Estimator`.
          hooks: Keras callbacks.
          steps: Number of steps to train in this call; None to train until
            the data end.
          max_steps: The global step to train up to, counted over all calls.
          saving_listeners: `CheckpointSaverListener`s. When a checkpoint is
            saved, their methods are called, but only in the chief.

        Returns:
          This Estimator, so that calls can be chained.

        Raises:
          ValueError: if both `steps` and `max_steps` are given, or one of them
            is not positive; if the checkpoint was saved from a different
            model; or if this process is an evaluator.
          TypeError: if an argument has the wrong type.
        """
        if steps is not None and max_steps is not None:
            raise ValueError(
                f"Cannot set both steps and max_steps. Received: {steps} and "
                f"{max_steps}. Pass `steps` to limit the steps of this call, "
                "or `max_steps` to limit those of all calls together."
            )
        check_positive("steps", steps)
        spec = TrainSpec(input_fn, max_steps, hooks, saving_listeners)
        engine.train(self, spec, steps)
        return self

    def evaluate(
        self,
        input_fn: InputFn,
        steps: int | None = None,
        hooks: Iterable[Any] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Evaluates a checkpoint and returns the loss and the metrics.

        If the strategy `eval_distribute` spans several processes, all of them
        must call `evaluate`.

        Args:
          input_fn: Function that returns the data; see `Estimator`.
          steps: Number of batches to evaluate; None for all.
          hooks: Keras callbacks.
          checkpoint_path: Path of the checkpoint; None for the newest one. If
            `model_dir` contains no checkpoint, the model's initial weights are
            evaluated.
          name: Name of the evaluation. Its event files are written to the
            directory `eval_<name>`.

        Returns:
          A dict with "loss", a value for each metric, and "global_step".

        Raises:
          ValueError: if `steps` is not positive, `name` contains a slash, or
            the checkpoint does not exist.
          TypeError: if an argument has the wrong type.
        """
        spec = EvalSpec(input_fn, steps, name, hooks)
        return engine.evaluate(self, spec, checkpoint_path)

    def predict(
        self,
        input_fn: InputFn,
        predict_keys: Iterable[str] | str | None = None,
        hooks: Iterable[Any] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yields predictions lazily, computing one batch at a time.

        Args:
          input_fn: Function that returns the data; labels are ignored.
          predict_keys: Names of the predictions to yield if predictions are
            dicts; None for all.
          hooks: Keras callbacks.
          checkpoint_path: See `evaluate`.
          yield_single_examples: Whether to yield the predictions row by row;
            False to yield whole batches.

        Yields:
          Predictions as NumPy arrays: the `predictions` of the EstimatorSpec,
          or the outputs of the model if `model_fn` returns a model.

        Raises:
          ValueError: if none of `predict_keys` is the name of a prediction, the
            checkpoint does not exist, or `yield_single_examples` is true and
            the predictions have different numbers of rows.
          TypeError: if an argument has the wrong type.
        """
        spec = EvalSpec(input_fn, hooks=hooks)
        if isinstance(predict_keys, str):
            predict_keys = [predict_keys]
        keys = tuple(predict_keys or ())
        if checkpoint_path is not None:
            reading.check(checkpoint_path)
        return engine.predict(
            self, spec, keys, checkpoint_path, yields_rows=yield_single_examples
        )

    def latest_checkpoint(self) -> str | None:
        """Returns the directory of the newest checkpoint, or None."""
        return reading.find_newest(self.model_dir, is_quick=True)

    def get_variable_names(self) -> list[str]:
        """Returns the names of all variables in the newest checkpoint.

        Variables of the model are named by their Keras paths, such as
        "dense/kernel". Variables of the optimizer have the prefix "optimizer/"
        before their paths. The list also contains "global_step".

        Raises:
          ValueError: if `model_dir` contains no checkpoint.
        """
        names = reading.list_variables(self._find_checkpoint())
        return sorted({*names, records.GLOBAL_STEP})

    def get_variable_value(self, name: str) -> np.ndarray[Any, Any]:
        """Returns the value of a variable in the newest checkpoint.

        Args:
          name: One of `get_variable_names()`.

        Raises:
          ValueError: if `model_dir` contains no checkpoint, or the checkpoint
            does not contain the variable.
        """
        path = self._find_checkpoint()
        if name == records.GLOBAL_STEP:
            return np.asarray(reading.parse_step(path))
        return reading.read_variable(path, name)

    def export_saved_model(
        self,
        export_dir_base: str | os.PathLike[str],
        serving_input_receiver_fn: None = None,
        assets_extra: None = None,
        as_text: bool = False,
        checkpoint_path: str | None = None,
        experimental_mode: str = ModeKeys.PREDICT,
        *,
        saved_model: bool | None = None,
    ) -> str:
        """Exports the model with the weights of a checkpoint.

        Writes `model.keras`, which `keras.saving.load_model` can read. If
        TensorFlow is installed, it also writes a SavedModel into the same
        directory. Exports are meant for prediction: the model is not compiled.
        Call this method in the chief only.

        Args:
          export_dir_base: Directory for exports. Each export is a new
            subdirectory, whose name is the time of the export in seconds since
            1970.
          serving_input_receiver_fn: Must be None; see `FinalExporter`.
          assets_extra: Must be None.
          as_text: Must be False.
          checkpoint_path: Path of the checkpoint; None for the newest one.
          experimental_mode: The mode that `model_fn` is called with.
          saved_model: Whether to write a SavedModel; None to write one if
            TensorFlow is installed.

        Returns:
          The path of the new subdirectory.

        Raises:
          ValueError: if no checkpoint exists, the inputs of the model are
            unknown, or an argument is not supported on JAX.
          ImportError: if `saved_model` is true but TensorFlow is not installed.
        """
        check_serving(serving_input_receiver_fn, assets_extra, as_text)
        return exporting.export(
            functools.partial(engine.make_plain, self),
            self.model_dir,
            os.fspath(export_dir_base),
            checkpoint_path,
            mode=experimental_mode,
            saved_model=saved_model,
        )

    def _find_checkpoint(self) -> str:
        path = self.latest_checkpoint()
        if path is None:
            raise ValueError(
                f"Could not find a trained model in {self.model_dir}. "
                "The directory contains no checkpoint. Call `train` first."
            )
        return path


def _resolve_config(config: Any, model_dir: object) -> RunConfig:
    """Returns a RunConfig whose `model_dir` is set."""
    if config is None:
        config = RunConfig()
    check_kind("config", config, RunConfig)
    if isinstance(model_dir, os.PathLike):
        model_dir = os.fspath(model_dir)
    if model_dir is not None:
        if config.model_dir is not None and config.model_dir != model_dir:
            raise ValueError(
                "`model_dir` is set in the constructor and in `RunConfig`, but "
                f"with different values. Received: {shorten(model_dir)} and "
                f"{shorten(config.model_dir)}. Set it in only one of the two."
            )
        return config.replace(model_dir=model_dir)
    if config.model_dir is not None:
        return config
    directory = tempfile.mkdtemp(prefix="keras-strategies-")
    _logger.warning(
        "Using a temporary directory as the model directory: %s", directory
    )
    return config.replace(model_dir=directory)

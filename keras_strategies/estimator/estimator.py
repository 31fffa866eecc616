"""Estimator: a model_fn, trained and evaluated from checkpoints."""

import copy
import functools
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from keras_strategies.checkpoint import reading
from keras_strategies.cluster.addresses import shown
from keras_strategies.estimator import (
    engine,
    exporting,
    model_fns,
    predicting,
    records,
    warm_start,
)
from keras_strategies.estimator.arguments import (
    check_hooks,
    check_input_fn,
    check_listeners,
    check_name,
    check_positive,
)
from keras_strategies.estimator.config.run_config import RunConfig
from keras_strategies.estimator.engine import InputFn, Settings
from keras_strategies.estimator.estimator_spec import ModeKeys

_logger = logging.getLogger(__name__)


class Estimator(Settings):
    """Trains, evaluates, predicts and exports a model; as tf's.

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

    `model_fn` is called anew for each training, evaluation and prediction,
    within the scope of its strategy; the newest checkpoint of `model_dir`
    gives the model its state. Subclasses may override methods.

    `input_fn`s are called with those of `params`, `config`, `mode` and
    `input_context` that they have arguments for, and return a dataset of
    (features, labels), a generator of batches, or (features, labels) as
    arrays, in batches of 32 rows. Batches are those of all replicas together,
    but where the function takes `input_context`: then each process reads a
    dataset of its own, whose batches are one replica's.

    Args:
      model_fn: Makes the model. It takes any of `features`, `labels`, `mode`
        (see `ModeKeys`), `params` and `config` by name, and returns a new
        compiled `keras.Model`, or an `EstimatorSpec`. Features and labels are
        symbolic (`keras.Input`s and `keras.KerasTensor`s), to make a
        functional model of or to ask for shapes.
      model_dir: Where checkpoints, event files and exports go; None for that
        of `config`, or a temporary one.
      config: The RunConfig; None for one of defaults.
      params: What `model_fn` and `input_fn` are given; copied.
      warm_start_from: A checkpoint, a `model_dir` or `WarmStartSettings`: the
        initial weights, where `model_dir` has no checkpoint yet.

    Raises:
      ValueError: no `model_fn`, one with other arguments, `model_dir`s that
        differ, or a `config` that is none.
      TypeError: an argument of another type.

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
            _with_model_dir(config, model_dir),
            copy.deepcopy({} if params is None else params),
            warm_start.settings_of(warm_start_from),
        )

    def train(
        self,
        input_fn: InputFn,
        hooks: Iterable[Any] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Iterable[Any] | None = None,
    ) -> "Estimator":
        """Trains from the newest checkpoint on, and saves at the end.

        The data begin anew with each call, as in tf. A call that was
        interrupted (the process was killed, or sent SIGTERM) is completed by
        the next one, from its next batch on. Collective, for a strategy of
        several processes.

        Args:
          input_fn: Makes the data; see `Estimator`.
          hooks: Keras callbacks.
          steps: How many steps this call trains; None for as long as there
            are data.
          max_steps: The global step to train up to, in all calls together.
          saving_listeners: Are called at checkpoints, in the chief
            (`CheckpointSaverListener`).

        Returns:
          Itself.

        Raises:
          ValueError: `steps` and `max_steps`, or one of them that is not
            positive; a checkpoint of another model; in an evaluator.
          TypeError: an argument of another type.
        """
        _check_steps(steps, max_steps)
        check_input_fn(input_fn)
        callbacks = check_hooks(hooks)
        listeners = check_listeners(saving_listeners)
        engine.train(
            self,
            input_fn,
            callbacks,
            steps=steps,
            max_steps=max_steps,
            listeners=listeners,
        )
        return self

    def evaluate(
        self,
        input_fn: InputFn,
        steps: int | None = None,
        hooks: Iterable[Any] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Evaluates a checkpoint.

        Collective, for an `eval_distribute` of several processes.

        Args:
          input_fn: Makes the data; see `Estimator`.
          steps: How many batches; None for all.
          hooks: Keras callbacks.
          checkpoint_path: The checkpoint; None for the newest one, or, where
            there is none, initial weights.
          name: The evaluation's: its event files are in `eval_<name>`.

        Returns:
          "loss", metrics and "global_step".

        Raises:
          ValueError: `steps` that is not positive, or no such checkpoint.
          TypeError: an argument of another type.
        """
        check_positive("steps", steps)
        check_input_fn(input_fn)
        check_name(name)
        callbacks = check_hooks(hooks)
        return engine.evaluate(
            self,
            input_fn,
            callbacks,
            steps=steps,
            path=checkpoint_path,
            name=name,
        )

    def predict(
        self,
        input_fn: InputFn,
        predict_keys: Iterable[str] | str | None = None,
        hooks: Iterable[Any] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Predicts, a batch at a time as it is asked for.

        Args:
          input_fn: Makes the data; labels are left out.
          predict_keys: Which predictions, where they are a dict; None for
            all.
          hooks: Keras callbacks.
          checkpoint_path: See `evaluate`.
          yield_single_examples: Whether to yield rows; otherwise batches.

        Yields:
          Predictions as numpy arrays: what the EstimatorSpec says, or the
          model's outputs.

        Raises:
          ValueError: keys that are not there, no such checkpoint, or, with
            `yield_single_examples`, predictions of other numbers of rows.
          TypeError: an argument of another type.
        """
        check_input_fn(input_fn)
        callbacks = check_hooks(hooks)
        keys = predicting.checked_keys(predict_keys)
        if checkpoint_path is not None:
            reading.check(checkpoint_path)
        return engine.predict(
            self,
            input_fn,
            callbacks,
            keys=keys,
            path=checkpoint_path,
            yields_rows=yield_single_examples,
        )

    def latest_checkpoint(self) -> str | None:
        """The folder of the newest checkpoint; None if there is none."""
        return reading.newest_complete(self.model_dir)

    def get_variable_names(self) -> list[str]:
        """The names of all variables of the newest checkpoint.

        The model's have their Keras paths ("dense/kernel"), an optimizer's
        "optimizer/" in front, and there is "global_step".

        Raises:
          ValueError: there is no checkpoint.
        """
        names = reading.variables_in(self._checkpoint())
        return sorted({*names, records.GLOBAL_STEP})

    def get_variable_value(self, name: str) -> np.ndarray[Any, Any]:
        """The value of a variable of the newest checkpoint.

        Args:
          name: One of `get_variable_names()`.

        Raises:
          ValueError: there is no checkpoint, or no such variable.
        """
        path = self._checkpoint()
        if name == records.GLOBAL_STEP:
            return np.asarray(reading.step_of(path))
        return reading.value_of(path, name)

    def export_saved_model(
        self,
        export_dir_base: str | os.PathLike[str],
        serving_input_receiver_fn: None = None,
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        checkpoint_path: str | None = None,
        experimental_mode: str = ModeKeys.PREDICT,
        *,
        saved_model: bool | None = None,
    ) -> str:
        """Exports the model with the weights of a checkpoint.

        Writes `model.keras`, which `keras.saving.load_model` reads, and, with
        TensorFlow installed, a SavedModel into the same folder. They are for
        prediction: the model is not compiled. Call it in the chief.

        Args:
          export_dir_base: The folder for exports; each has a folder in it,
            named by seconds since 1970.
          serving_input_receiver_fn: None; see `FinalExporter`.
          assets_extra: Files to copy into `assets.extra`: their paths there
            to where they are.
          as_text: False.
          checkpoint_path: The checkpoint; None for the newest.
          experimental_mode: What `model_fn` is called for.
          saved_model: Whether to write a SavedModel; None for where
            TensorFlow is installed.

        Returns:
          The export's folder.

        Raises:
          ValueError: no checkpoint, a model without known inputs, or what has
            no meaning here.
          ImportError: a SavedModel is asked for without TensorFlow.
        """
        return exporting.export(
            functools.partial(engine.make_plain, self),
            self.model_dir,
            os.fspath(export_dir_base),
            checkpoint_path,
            serving_input_receiver_fn=serving_input_receiver_fn,
            assets_extra=assets_extra,
            as_text=as_text,
            mode=experimental_mode,
            saved_model=saved_model,
        )

    def _checkpoint(self) -> str:
        path = self.latest_checkpoint()
        if path is None:
            raise ValueError(
                f"Could not find trained model in model_dir: {self.model_dir}. "
                "Received: a folder without a checkpoint. Train first."
            )
        return path


def _check_steps(steps: object, max_steps: object) -> None:
    if steps is not None and max_steps is not None:
        raise ValueError(
            "Can not provide both steps and max_steps. Received: "
            f"steps={steps}, max_steps={max_steps}. `steps` counts those of "
            "this call, `max_steps` those of all: give one."
        )
    check_positive("steps", steps)
    check_positive("max_steps", max_steps)


def _with_model_dir(config: object, model_dir: object) -> RunConfig:
    """The RunConfig, with a `model_dir`."""
    if config is None:
        config = RunConfig()
    if not isinstance(config, RunConfig):
        raise ValueError(
            "config must be an instance of `RunConfig`. Received: "
            f"{shown(config)} of type {type(config).__name__}. Make one: "
            "`ks.estimator.RunConfig(...)`."
        )
    if isinstance(model_dir, os.PathLike):
        model_dir = os.fspath(model_dir)
    if model_dir is not None:
        if config.model_dir is not None and config.model_dir != model_dir:
            raise ValueError(
                "`model_dir` are set both in constructor and `RunConfig`, but "
                f"with different values. Received: {shown(model_dir)} and "
                f"{shown(config.model_dir)}. Give it once."
            )
        return config.replace(model_dir=model_dir)
    if config.model_dir is not None:
        return config
    made = tempfile.mkdtemp(prefix="keras-strategies-")
    _logger.warning("Using temporary folder as model directory: %s", made)
    return config.replace(model_dir=made)

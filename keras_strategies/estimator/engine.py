"""The runs of an Estimator: a model for each, and its state."""

import contextlib
import copy
import functools
import logging
import os
import random
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies._types import Logs, Tree
from keras_strategies.checkpoint import DamagedCheckpoint, reading
from keras_strategies.estimator import (
    exporting,
    inputs,
    model_fns,
    predicting,
    records,
    train_callback,
    warm_start,
)
from keras_strategies.estimator.config.run_checks import check_trains
from keras_strategies.estimator.config.run_config import RunConfig
from keras_strategies.estimator.estimator_spec import ModeKeys
from keras_strategies.estimator.warm_start import WarmStartSettings
from keras_strategies.keras_bridge.fresh_names import fresh_names
from keras_strategies.strategy.mirrored import OneDeviceStrategy
from keras_strategies.strategy.strategy import Strategy

Callbacks = tuple[keras.callbacks.Callback, ...]
InputFn = Callable[..., Any]
Restore = Callable[[Any], None]
_NUM_TRIES = 3
_SEEDS = 2**32
_logger = logging.getLogger(__name__)


class Engine:
    """The runs of an Estimator, whose arguments were checked.

    Args:
      model_fn: The `model_fn`.
      config: The RunConfig, with a `model_dir`.
      params: What functions are given copies of.
      warm_start_from: The initial weights, if any.

    Attributes:
      result_names: New names for results of evaluations.
    """

    result_names: Mapping[str, str] = types.MappingProxyType({})

    def __init__(
        self,
        model_fn: Callable[..., Any],
        config: RunConfig,
        params: Mapping[str, Any],
        warm_start_from: WarmStartSettings | None,
    ) -> None:
        self._model_fn = model_fn
        self._config = config
        self._model_dir = os.fspath(config.model_dir or "")
        self._params = params
        self._warm_start = warm_start_from
        self._one_device: Strategy | None = None

    @property
    def model_dir(self) -> str:
        """The folder of checkpoints, event files and exports."""
        return self._model_dir

    @property
    def config(self) -> RunConfig:
        """The RunConfig, with `model_dir` set."""
        return self._config

    @property
    def params(self) -> Mapping[str, Any]:
        """A copy of what `model_fn` is given."""
        return copy.deepcopy(self._params)

    @property
    def model_fn(self) -> Callable[..., Any]:
        """The function that makes the model."""
        return self._model_fn

    def eval_dir(self, name: str | None = None) -> str:
        """Returns the folder of the event files of an evaluation."""
        return os.path.join(self.model_dir, f"eval_{name}" if name else "eval")

    def strategy_of(self, mode: str) -> Strategy:
        """Returns the strategy of a mode; one device if none was given."""
        given = self.config.eval_distribute
        if mode == ModeKeys.TRAIN:
            given = self.config.train_distribute
        if given is not None:
            return given
        if self._one_device is None:
            self._one_device = OneDeviceStrategy(jax.local_devices()[0])
        return self._one_device

    def make_plain(self, mode: str, features: Tree) -> model_fns.Made:
        """Calls `model_fn` outside of any scope, for an export.

        Args:
          mode: One of `ModeKeys`.
          features: Arrays, of which it is given what is symbolic; or None.
        """
        symbols = None
        if features is not None:
            symbols, _ = inputs.symbols_of((features,))
        with _random_state():
            return self._call_model_fn(mode, symbols, None)

    def run_training(
        self,
        input_fn: InputFn,
        hooks: Callbacks,
        *,
        steps: int | None = None,
        max_steps: int | None = None,
        listeners: tuple[Any, ...] = (),
        after_save: Callable[[int], bool] | None = None,
    ) -> None:
        """See `Estimator.train`; `after_save` as of `TrainCheckpoint`."""
        strategy = self.strategy_of(ModeKeys.TRAIN)
        mesh = strategy.mesh
        check_trains(self.config, mesh.num_processes)
        progress = train_callback.progress_of_all(mesh, self.model_dir)
        if max_steps is not None and progress.step >= max_steps:
            if mesh.is_chief:
                train_callback.warn_of_nothing(
                    self.model_dir, progress.step, max_steps
                )
            return
        seed, initial = self.config.tf_random_seed, self._warm_start
        with _random_state(seed, moves_on=seed is None), _data_may_end():
            data = self._input(input_fn, ModeKeys.TRAIN)
            made = self._make(ModeKeys.TRAIN, data)
            checkpointer = train_callback.TrainCheckpoint(
                self.config,
                listeners=listeners,
                after_save=after_save,
                initialize=functools.partial(warm_start.apply, initial),
            )
            wanted = train_callback.steps_of_call(
                progress,
                steps=steps,
                max_steps=max_steps,
                is_endless=data.is_endless,
            )
            callbacks = [
                *(made.chief_hooks if mesh.is_chief else ()),
                *made.hooks,
                *hooks,
                *records.scalars(self.config, progress.step),
                checkpointer,
            ]
            _fit(made.model, data, wanted, callbacks)
        if not (data.is_dataset or made.model.stop_training):
            train_callback.warn_of_end(
                checkpointer.num_steps - progress.begun, wanted
            )
        _logger.info("Trained up to step %d.", checkpointer.num_steps)

    def run_evaluation(
        self,
        input_fn: InputFn,
        hooks: Callbacks,
        *,
        steps: int | None,
        path: str | None,
        name: str | None,
    ) -> dict[str, Any]:
        """See `Estimator.evaluate`."""

        def use(path: str | None) -> dict[str, Any]:
            step = 0 if path is None else reading.step_of(path)
            return self.evaluate_model(
                input_fn,
                hooks,
                _restoring(path),
                step=step,
                steps=steps,
                name=name,
            )

        if path is not None:
            reading.check(path)
            return use(path)
        strategy = self.strategy_of(ModeKeys.EVAL)
        for left in reversed(range(_NUM_TRIES)):
            newest = self._newest(strategy)
            try:
                return use(newest)
            except DamagedCheckpoint:
                # It may have been deleted, for newer ones.
                if not left or newest is None or os.path.isdir(newest):
                    raise
        raise AssertionError("unreachable")

    def evaluate_model(
        self,
        input_fn: InputFn,
        hooks: Callbacks,
        restore: Restore,
        *,
        step: int,
        steps: int | None,
        name: str | None,
    ) -> dict[str, Any]:
        """Evaluates a new model, as `Estimator.evaluate`.

        Args:
          input_fn: Makes the data.
          hooks: Keras callbacks.
          restore: Called with the model when it is built; gives it weights.
          step: The global step of the weights.
          steps: The number of batches; None for all.
          name: The evaluation's.
        """
        seed = self.config.tf_random_seed
        with _random_state(seed), _data_may_end():
            data = self._input(input_fn, ModeKeys.EVAL)
            made = self._make(ModeKeys.EVAL, data)
            found = made.model.evaluate(
                **data.arguments(),
                steps=steps,
                verbose=0,
                return_dict=True,
                callbacks=[
                    _Restore(restore),
                    *made.hooks,
                    *hooks,
                    *records.scalars(self.config, step, name or ""),
                ],
            )
        results = records.renamed(found, self.result_names)
        results[records.GLOBAL_STEP] = step
        if jax.process_index() == 0:
            records.append(self.eval_dir(name), step, results)
        _logger.info("Evaluated: %s", results)
        return results

    def run_prediction(
        self,
        input_fn: InputFn,
        hooks: Callbacks,
        *,
        keys: tuple[str, ...] | None,
        path: str | None,
        yields_rows: bool,
    ) -> Iterator[Any]:
        """See `Estimator.predict`."""
        strategy = self.strategy_of(ModeKeys.PREDICT)
        with _random_state(self.config.tf_random_seed):
            data = self._input(input_fn, ModeKeys.PREDICT)
            made = self._make(ModeKeys.PREDICT, data)
        path = self._newest(strategy) if path is None else path
        restore = _Restore(_restoring(path), made.model)
        callbacks = [restore, *made.hooks, *hooks]
        batches = predicting.batches_of(made, data, strategy, callbacks)
        for batch in batches:
            chosen = predicting.with_keys(made.predictions(batch), keys)
            if yields_rows:
                yield from predicting.rows_of(chosen)
            else:
                yield chosen

    def _make(self, mode: str, data: inputs.Input) -> model_fns.Made:
        """Calls `model_fn` in the scope of the mode's strategy."""
        features, labels = inputs.symbols_of(data.example)
        if mode == ModeKeys.TRAIN and jax.process_index() == 0:
            exporting.note_features(self.model_dir, features)
        with self.strategy_of(mode).scope():
            return self._call_model_fn(mode, features, labels)

    def _call_model_fn(
        self, mode: str, features: Tree, labels: Tree
    ) -> model_fns.Made:
        with fresh_names():
            return model_fns.make(
                self.model_fn,
                mode=mode,
                features=features,
                labels=None if mode == ModeKeys.PREDICT else labels,
                params=self.params,
                config=self.config,
            )

    def _input(self, input_fn: InputFn, mode: str) -> inputs.Input:
        return inputs.call_input_fn(
            input_fn,
            mode=mode,
            params=self.params,
            config=self.config,
            strategy=self.strategy_of(mode),
        )

    def _newest(self, strategy: Strategy) -> str | None:
        """The newest good checkpoint, the same in all processes."""
        mesh = strategy.mesh
        found = None
        if mesh.is_chief:
            found = reading.newest_good(self.model_dir)
        found = train_callback.value_of_chief(
            mesh, "the newest checkpoint", found, str | None
        )
        if found is None and mesh.is_chief:
            reading.warn_of_none(self.model_dir)
        return found


def _fit(
    model: Any, data: inputs.Input, steps: int | None, callbacks: list[Any]
) -> None:
    model.fit(
        **data.arguments(),
        epochs=1,
        # A dataset has its own order.
        shuffle=not data.is_dataset,
        steps_per_epoch=steps,
        verbose=0,
        callbacks=callbacks,
    )


class _Restore(keras.callbacks.Callback):
    """Gives a model its weights, once it is built.

    Args:
      restore: Called with the model.
      model: The model, if it is not the callback's.
    """

    def __init__(
        self, restore: Restore, model: keras.Model | None = None
    ) -> None:
        super().__init__()
        self._apply = restore
        self._given = model

    def on_test_begin(self, logs: Logs | None = None) -> None:
        self._apply(self.model if self._given is None else self._given)

    def on_predict_begin(self, logs: Logs | None = None) -> None:
        self._apply(self.model if self._given is None else self._given)


def _restoring(path: str | None) -> Restore:
    """Returns what gives a model the weights of a checkpoint, if any."""
    if path is None:
        return lambda model: None
    return functools.partial(reading.restore, path=path)


@contextlib.contextmanager
def _data_may_end() -> Iterator[None]:
    """Without the warning of data that end before the steps: that is an end."""
    with warnings.catch_warnings():
        # Keras 3.15's (tests/contract/test_keras_contract.py).
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        yield


@contextlib.contextmanager
def _random_state(
    seed: int | None = None, *, moves_on: bool = False
) -> Iterator[None]:
    """A context after which the caller's random states are as before.

    Initial weights, dropout and the order of rows come from those of Python
    and numpy.

    Args:
      seed: What Keras draws from; None for the caller's states.
      moves_on: Whether the caller's states are moved on instead.
    """
    if moves_on:
        yield
        return
    states = random.getstate(), np.random.get_state()
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % _SEEDS)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])

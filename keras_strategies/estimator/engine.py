"""The runs of an Estimator: a model for each, and its state."""

import contextlib
import copy
import functools
import logging
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from keras.callbacks import Callback, LambdaCallback

from keras_strategies._types import Tree
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

Callbacks = tuple[Callback, ...]
InputFn = Callable[..., Any]
Restore = Callable[[Any], None]
_NUM_TRIES = 3
_SEEDS = 2**32
_logger = logging.getLogger(__name__)


class Settings:
    """What an Estimator was made with, by tf's names.

    Args:
      model_fn: The `model_fn`.
      config: The RunConfig, with a `model_dir`.
      params: What functions are given copies of.
      warm_start_from: The initial weights, if any.
    """

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
        self._result_names: Mapping[str, str] = {}

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


def rename_results(estimator: Settings, names: Mapping[str, str]) -> None:
    """Gives the results of an Estimator's evaluations new names."""
    estimator._result_names = dict(names)


def strategy_of(estimator: Settings, mode: str) -> Strategy:
    """Returns the strategy of a mode; one device if none was given."""
    given = estimator.config.eval_distribute
    if mode == ModeKeys.TRAIN:
        given = estimator.config.train_distribute
    if given is not None:
        return given
    if estimator._one_device is None:
        estimator._one_device = OneDeviceStrategy(jax.local_devices()[0])
    return estimator._one_device


def make_plain(
    estimator: Settings, mode: str, features: Tree
) -> model_fns.Made:
    """Calls `model_fn` outside of any scope, for an export.

    Args:
      estimator: The Estimator.
      mode: One of `ModeKeys`.
      features: Arrays, of which it is given what is symbolic; or None.
    """
    symbols = None
    if features is not None:
        symbols, _ = inputs.symbols_of((features,))
    with _random_state():
        return _call_model_fn(estimator, mode, symbols, None)


def train(
    estimator: Settings,
    input_fn: InputFn,
    hooks: Callbacks,
    *,
    steps: int | None = None,
    max_steps: int | None = None,
    listeners: tuple[Any, ...] = (),
    after_save: Callable[[int], bool] | None = None,
) -> None:
    """See `Estimator.train`; `after_save` as of `TrainCheckpoint`."""
    config = estimator.config
    mesh = strategy_of(estimator, ModeKeys.TRAIN).mesh
    check_trains(config, mesh.num_processes)
    progress = train_callback.progress_of_all(mesh, estimator.model_dir)
    if not train_callback.has_steps(mesh, config, progress, max_steps):
        return
    initialize = functools.partial(warm_start.apply, estimator._warm_start)
    seed = config.tf_random_seed
    with _random_state(seed, moves_on=seed is None), _data_may_end():
        data = _input(estimator, input_fn, ModeKeys.TRAIN)
        made = _make(estimator, ModeKeys.TRAIN, data)
        checkpointer = train_callback.TrainCheckpoint(
            config,
            listeners=listeners,
            after_save=after_save,
            initialize=initialize,
        )
        wanted = train_callback.steps_of_call(
            progress, steps, max_steps, is_endless=data.is_endless
        )
        chief_hooks = made.chief_hooks if mesh.is_chief else ()
        scalars = records.scalars(config, progress.step)
        callbacks = [*chief_hooks, *made.hooks, *hooks, *scalars, checkpointer]
        _fit(made.model, data, wanted, callbacks)
    num_steps = checkpointer.num_steps
    if not (data.is_dataset or made.model.stop_training):
        train_callback.warn_of_end(num_steps - progress.begun, wanted)
    _logger.info("Trained up to step %d.", num_steps)


def evaluate(
    estimator: Settings,
    input_fn: InputFn,
    hooks: Callbacks,
    *,
    steps: int | None,
    path: str | None,
    name: str | None,
) -> dict[str, Any]:
    """See `Estimator.evaluate`."""

    def use(path: str | None) -> dict[str, Any]:
        return evaluate_model(
            estimator,
            input_fn,
            hooks,
            _restoring(path),
            step=0 if path is None else reading.step_of(path),
            steps=steps,
            name=name,
        )

    if path is not None:
        reading.check(path)
        return use(path)
    strategy = strategy_of(estimator, ModeKeys.EVAL)
    for _ in range(_NUM_TRIES - 1):
        newest = _newest(estimator, strategy)
        try:
            return use(newest)
        except DamagedCheckpoint:
            # It may have been deleted, for newer ones.
            if newest is None or os.path.isdir(newest):
                raise
    return use(_newest(estimator, strategy))


def evaluate_model(
    estimator: Settings,
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
      estimator: The Estimator.
      input_fn: Makes the data.
      hooks: Keras callbacks.
      restore: Called with the model when it is built; gives it weights.
      step: The global step of the weights.
      steps: The number of batches; None for all.
      name: The evaluation's.
    """
    config = estimator.config
    with _random_state(config.tf_random_seed), _data_may_end():
        data = _input(estimator, input_fn, ModeKeys.EVAL)
        made = _make(estimator, ModeKeys.EVAL, data)
        scalars = records.scalars(config, step, name or "")
        found = made.model.evaluate(
            **data.arguments(),
            steps=steps,
            verbose=0,
            return_dict=True,
            callbacks=[
                LambdaCallback(on_test_begin=lambda logs: restore(made.model)),
                *made.hooks,
                *hooks,
                *scalars,
            ],
        )
    results = records.renamed(found, estimator._result_names)
    results[records.GLOBAL_STEP] = step
    if jax.process_index() == 0:
        records.append(estimator.eval_dir(name), step, results)
    _logger.info("Evaluated: %s", results)
    return results


def predict(
    estimator: Settings,
    input_fn: InputFn,
    hooks: Callbacks,
    *,
    keys: tuple[str, ...] | None,
    path: str | None,
    yields_rows: bool,
) -> Iterator[Any]:
    """See `Estimator.predict`."""
    strategy = strategy_of(estimator, ModeKeys.PREDICT)
    with _random_state(estimator.config.tf_random_seed):
        data = _input(estimator, input_fn, ModeKeys.PREDICT)
        made = _make(estimator, ModeKeys.PREDICT, data)
    restore = _restoring(_newest(estimator, strategy) if path is None else path)
    callbacks = [
        LambdaCallback(on_predict_begin=lambda logs: restore(made.model)),
        *made.hooks,
        *hooks,
    ]
    for batch in predicting.batches_of(made, data, strategy, callbacks):
        chosen = predicting.with_keys(made.predictions(batch), keys)
        if yields_rows:
            yield from predicting.rows_of(chosen)
        else:
            yield chosen


def _make(estimator: Settings, mode: str, data: inputs.Input) -> model_fns.Made:
    """Calls `model_fn` in the scope of the mode's strategy."""
    features, labels = inputs.symbols_of(data.example)
    if mode == ModeKeys.TRAIN and jax.process_index() == 0:
        exporting.note_features(estimator.model_dir, features)
    with strategy_of(estimator, mode).scope():
        return _call_model_fn(estimator, mode, features, labels)


def _call_model_fn(
    estimator: Settings, mode: str, features: Tree, labels: Tree
) -> model_fns.Made:
    with fresh_names():
        return model_fns.make(
            estimator.model_fn,
            mode=mode,
            features=features,
            labels=None if mode == ModeKeys.PREDICT else labels,
            params=estimator.params,
            config=estimator.config,
        )


def _input(estimator: Settings, input_fn: InputFn, mode: str) -> inputs.Input:
    return inputs.call_input_fn(
        input_fn,
        mode=mode,
        params=estimator.params,
        config=estimator.config,
        strategy=strategy_of(estimator, mode),
    )


def _newest(estimator: Settings, strategy: Strategy) -> str | None:
    """Returns the newest good checkpoint, the same in all processes."""
    mesh = strategy.mesh
    found = reading.newest_good(estimator.model_dir) if mesh.is_chief else None
    found = train_callback.value_of_chief(
        mesh, "the newest checkpoint", found, str | None
    )
    if found is None and mesh.is_chief:
        reading.warn_of_none(estimator.model_dir)
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

"""The training, evaluation and prediction runs of an Estimator.

Each run calls the `model_fn` to create a new model and restores its state.
"""

import contextlib
import copy
import functools
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from keras.callbacks import LambdaCallback

from keras_strategies._types import Tree
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
from keras_strategies.estimator.seam import (
    DamagedCheckpoint,
    OneDeviceStrategy,
    Strategy,
    fresh_names,
    reading,
)
from keras_strategies.estimator.specs import EvalSpec, TrainSpec
from keras_strategies.estimator.warm_start import WarmStartSettings

InputFn = Callable[..., Any]
Restore = Callable[[Any], None]
_NUM_TRIES = 3
_SEEDS = 2**32
_logger = logging.getLogger(__name__)


class Settings:
    """The arguments of an Estimator, as properties with TensorFlow's names.

    Args:
      model_fn: The `model_fn`.
      config: The RunConfig, whose `model_dir` is set.
      params: Parameters for `model_fn` and `input_fn`; each call gets a copy.
      warm_start_from: The source of the initial weights, or None.
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

    @property
    def model_dir(self) -> str:
        """The directory of checkpoints, event files and exports."""
        return self._model_dir

    @property
    def config(self) -> RunConfig:
        """The RunConfig, with `model_dir` set."""
        return self._config

    @property
    def params(self) -> Mapping[str, Any]:
        """A copy of the parameters of `model_fn`."""
        return copy.deepcopy(self._params)

    @property
    def model_fn(self) -> Callable[..., Any]:
        """The function that returns the model."""
        return self._model_fn

    def eval_dir(self, name: str | None = None) -> str:
        """Returns the directory for an evaluation's event files."""
        return os.path.join(self.model_dir, f"eval_{name}" if name else "eval")


def find_strategy(estimator: Settings, mode: str) -> Strategy:
    """Returns the strategy for a mode; its default uses a single device."""
    strategy = estimator.config.eval_distribute
    if mode == ModeKeys.TRAIN:
        strategy = estimator.config.train_distribute
    if strategy is not None:
        return strategy
    if estimator._one_device is None:
        estimator._one_device = OneDeviceStrategy(jax.local_devices()[0])
    return estimator._one_device


def make_plain(
    estimator: Settings, mode: str, features: Tree
) -> model_fns.ModelBundle:
    """Creates the model of a `model_fn` without a strategy, for an export.

    Args:
      estimator: The Estimator.
      mode: One of `ModeKeys`.
      features: Arrays to convert to symbolic features, or None.
    """
    symbols, _ = inputs.make_symbols((features,))
    with _isolate_random_state():
        return _call_model_fn(estimator, mode, symbols, None)


def train(
    estimator: Settings,
    spec: TrainSpec,
    steps: int | None = None,
    after_save: Callable[[int], bool] | None = None,
) -> None:
    """Implements `Estimator.train`; see `TrainCheckpoint` for `after_save`."""
    config = estimator.config
    mesh = find_strategy(estimator, ModeKeys.TRAIN).mesh
    check_trains(config, mesh.num_processes)
    progress = train_callback.share_progress(mesh, estimator.model_dir)
    if not train_callback.has_steps(mesh, config, progress, spec.max_steps):
        return
    initialize = functools.partial(warm_start.apply, estimator._warm_start)
    seed = config.tf_random_seed
    # Without a seed, the next run gets other random numbers.
    unseeded = contextlib.nullcontext()
    isolated = unseeded if seed is None else _isolate_random_state(seed)
    with isolated, _allow_data_to_end():
        data = _call_input_fn(estimator, spec, ModeKeys.TRAIN)
        bundle = _make(estimator, ModeKeys.TRAIN, data)
        checkpointer = train_callback.TrainCheckpoint(
            config,
            listeners=tuple(spec.saving_listeners or ()),
            after_save=after_save,
            initialize=initialize,
        )
        # Including those that were done before the call was interrupted.
        planned_steps = steps
        if spec.max_steps is not None:
            planned_steps = spec.max_steps - progress.begun
        elif steps is None and data.is_infinite:
            planned_steps = sys.maxsize
        chief_hooks = bundle.chief_hooks if mesh.is_chief else ()
        scalars = records.make_scalars(config, progress.step)
        callbacks = [*chief_hooks, *bundle.hooks, *(spec.hooks or ()), *scalars]
        _fit(bundle.model, data, planned_steps, [*callbacks, checkpointer])
    num_steps = checkpointer.num_steps
    if not (data.is_dataset or bundle.model.stop_training):
        train_callback.warn_of_end(num_steps - progress.begun, planned_steps)
    _logger.info("Trained up to step %d.", num_steps)


def evaluate(
    estimator: Settings, spec: EvalSpec, path: str | None
) -> dict[str, Any]:
    """Implements `Estimator.evaluate`."""

    def evaluate_at(path: str | None) -> dict[str, Any]:
        step = 0 if path is None else reading.parse_step(path)
        return evaluate_model(estimator, spec, _make_restore(path), step)

    if path is not None:
        reading.check(path)
        return evaluate_at(path)
    strategy = find_strategy(estimator, ModeKeys.EVAL)
    for _ in range(_NUM_TRIES - 1):
        newest = _find_newest(estimator, strategy)
        try:
            return evaluate_at(newest)
        except DamagedCheckpoint:
            # If training is still running, it may have deleted the checkpoint
            # while it was read. In that case there is a newer one to try.
            if newest is None or os.path.isdir(newest):
                raise
    return evaluate_at(_find_newest(estimator, strategy))


def evaluate_model(
    estimator: Settings, spec: EvalSpec, restore: Restore, step: int
) -> dict[str, Any]:
    """Creates a new model, restores its weights and evaluates it.

    Args:
      estimator: The Estimator.
      spec: The data, their number of batches, the callbacks and the name.
      restore: Function that is called with the built model and assigns its
        weights.
      step: The global step up to which the weights were trained.
    """
    config = estimator.config
    with _isolate_random_state(config.tf_random_seed), _allow_data_to_end():
        data = _call_input_fn(estimator, spec, ModeKeys.EVAL)
        bundle = _make(estimator, ModeKeys.EVAL, data)
        scalars = records.make_scalars(config, step, spec.name or "")
        metrics = bundle.model.evaluate(
            **data.make_arguments(),
            steps=spec.steps,
            verbose=0,
            return_dict=True,
            callbacks=[
                LambdaCallback(
                    on_test_begin=lambda logs: restore(bundle.model)
                ),
                *bundle.hooks,
                *(spec.hooks or ()),
                *scalars,
            ],
        )
    results = {**metrics, records.GLOBAL_STEP: step}
    if jax.process_index() == 0:
        records.append(estimator.eval_dir(spec.name), step, results)
    _logger.info("Evaluated: %s", results)
    return results


def predict(
    estimator: Settings,
    spec: EvalSpec,
    keys: tuple[str, ...],
    path: str | None,
    *,
    yields_rows: bool,
) -> Iterator[Any]:
    """Implements `Estimator.predict`."""
    strategy = find_strategy(estimator, ModeKeys.PREDICT)
    with _isolate_random_state(estimator.config.tf_random_seed):
        data = _call_input_fn(estimator, spec, ModeKeys.PREDICT)
        bundle = _make(estimator, ModeKeys.PREDICT, data)
    restore = _make_restore(
        _find_newest(estimator, strategy) if path is None else path
    )
    callbacks = [
        LambdaCallback(on_predict_begin=lambda logs: restore(bundle.model)),
        *bundle.hooks,
        *(spec.hooks or ()),
    ]
    for batch in predicting.iter_batches(bundle, data, strategy, callbacks):
        predictions = predicting.select_keys(bundle.predictions(batch), keys)
        if yields_rows:
            yield from predicting.iter_rows(predictions)
        else:
            yield predictions


def _make(
    estimator: Settings, mode: str, data: inputs.Input
) -> model_fns.ModelBundle:
    """Calls the `model_fn` in the strategy's scope, and returns its model."""
    features, labels = inputs.make_symbols(data.example)
    if mode == ModeKeys.TRAIN and jax.process_index() == 0:
        exporting.write_features(estimator.model_dir, features)
    with find_strategy(estimator, mode).scope():
        return _call_model_fn(estimator, mode, features, labels)


def _call_model_fn(
    estimator: Settings, mode: str, features: Tree, labels: Tree
) -> model_fns.ModelBundle:
    with fresh_names():
        return model_fns.make(
            estimator.model_fn,
            mode=mode,
            features=features,
            labels=None if mode == ModeKeys.PREDICT else labels,
            params=estimator.params,
            config=estimator.config,
        )


def _call_input_fn(
    estimator: Settings, spec: TrainSpec | EvalSpec, mode: str
) -> inputs.Input:
    return inputs.call_input_fn(
        spec.input_fn,
        mode=mode,
        params=estimator.params,
        config=estimator.config,
        strategy=find_strategy(estimator, mode),
    )


def _find_newest(estimator: Settings, strategy: Strategy) -> str | None:
    """Returns the newest valid checkpoint that the chief finds, or None."""
    mesh = strategy.mesh
    path = reading.find_newest(estimator.model_dir) if mesh.is_chief else None
    path = train_callback.broadcast_from_chief(
        mesh, "the newest checkpoint", path, str | None
    )
    if path is None and mesh.is_chief:
        reading.warn_no_checkpoint(estimator.model_dir)
    return path


def _fit(
    model: Any, data: inputs.Input, steps: int | None, callbacks: list[Any]
) -> None:
    model.fit(
        **data.make_arguments(),
        epochs=1,
        # Only arrays are shuffled. A dataset defines the order of its rows.
        shuffle=not data.is_dataset,
        steps_per_epoch=steps,
        verbose=0,
        callbacks=callbacks,
    )


def _make_restore(path: str | None) -> Restore:
    """Returns a function that restores a model's weights, if given a path."""
    if path is None:
        return lambda model: None
    return functools.partial(reading.restore, path=path)


@contextlib.contextmanager
def _allow_data_to_end() -> Iterator[None]:
    """Suppresses Keras's warning that the data ended before the last step.

    An Estimator may train until the data end, as in TensorFlow.
    """
    with warnings.catch_warnings():
        # The message of Keras 3.15 (tests/contract/test_keras_contract.py).
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        yield


@contextlib.contextmanager
def _isolate_random_state(seed: int | None = None) -> Iterator[None]:
    """Restores Python's and NumPy's global random states when the block ends.

    Initial weights, the seeds for dropout and the shuffle order of rows are
    generated from these states.

    Args:
      seed: The seed to set when the block begins; None to set no seed.
    """
    states = random.getstate(), np.random.get_state()
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % _SEEDS)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])

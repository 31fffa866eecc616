"""The runs of an Estimator: a model for each, and its state."""

import contextlib
import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import keras

from keras_strategies.cluster.addresses import shown
from keras_strategies.estimator import (
    exporting,
    inputs,
    model_fns,
    predicting,
    train_callback,
)
from keras_strategies.estimator.config.run_cluster import EVALUATOR, SERVER
from keras_strategies.estimator.config.run_config import RunConfig
from keras_strategies.estimator.estimator_spec import ModeKeys
from keras_strategies.estimator.records import checkpoint_reading, eval_results
from keras_strategies.estimator.records.event_scalars import (
    eval_scalars,
    train_scalars,
)
from keras_strategies.estimator.seeds import seeded, untouched
from keras_strategies.estimator.warm_start import WarmStart
from keras_strategies.keras_bridge.fresh_names import fresh_names
from keras_strategies.strategy.mirrored import OneDeviceStrategy
from keras_strategies.strategy.strategy import Strategy

Callbacks = tuple[keras.callbacks.Callback, ...]
InputFn = Callable[..., Any]
_NUM_TRIES = 3
_logger = logging.getLogger(__name__)


class Runs:
    """Trains, evaluates and predicts, with arguments that were checked.

    Args:
      model_fn: The `model_fn`.
      config: The RunConfig, with a `model_dir`.
      params: What functions are given copies of.
      warm_start: The initial weights.

    Attributes:
      model_fn: As given.
      config: As given.
      model_dir: That of the RunConfig.
      result_names: New names for results of evaluations.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        config: RunConfig,
        params: Any,
        warm_start: WarmStart,
    ) -> None:
        self.model_fn = model_fn
        self.config = config
        self.model_dir = os.fspath(config.model_dir or "")
        self.result_names: dict[str, str] = {}
        self._params = params
        self._warm_start = warm_start
        self._one_device: Strategy | None = None

    @property
    def params(self) -> Any:
        """A copy of the parameters."""
        return copy.deepcopy(self._params)

    def eval_dir(self, name: str | None) -> str:
        """Where the event files of an evaluation are."""
        folder = f"eval_{name}" if name else "eval"
        return os.path.join(self.model_dir, folder)

    def strategy_of(self, mode: str) -> Strategy:
        """The strategy of a mode; one device if none was given."""
        given = self.config.eval_distribute
        if mode == ModeKeys.TRAIN:
            given = self.config.train_distribute
        if given is not None:
            return given
        if self._one_device is None:
            self._one_device = OneDeviceStrategy(jax.local_devices()[0])
        return self._one_device

    def make_plain(self, mode: str, features: Any) -> model_fns.Made:
        """Calls `model_fn` outside of any scope, for an export.

        Args:
          mode: One of `ModeKeys`.
          features: Arrays, of which it is given what is symbolic; or None.
        """
        symbols = None
        if features is not None:
            symbols, _ = inputs.symbols_of((features,))
        with untouched():
            return self._call_model_fn(mode, symbols, None)

    def train(
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
        self._check_role(strategy)
        mesh = strategy.mesh
        progress = train_callback.progress_of_all(mesh, self.model_dir)
        if max_steps is not None and progress.step >= max_steps:
            if mesh.is_chief:
                train_callback.warn_of_nothing(
                    self.model_dir, progress.step, max_steps
                )
            return
        with seeded(self.config.tf_random_seed), _data_may_end():
            data = self._input(input_fn, ModeKeys.TRAIN)
            made = self._make(ModeKeys.TRAIN, data)
            checkpointer = train_callback.TrainCheckpoint(
                self.config,
                listeners=listeners,
                after_save=after_save,
                initialize=self._warm_start.apply,
            )
            wanted = train_callback.steps_of_call(
                progress,
                steps=steps,
                max_steps=max_steps,
                is_endless=data.is_endless,
            )
            made.model.fit(
                **data.arguments(),
                epochs=1,
                # A dataset has its own order.
                shuffle=not data.is_dataset,
                steps_per_epoch=wanted,
                verbose=0,
                callbacks=[
                    *(made.chief_hooks if mesh.is_chief else ()),
                    *made.hooks,
                    *hooks,
                    *train_scalars(self.config, progress.step),
                    checkpointer,
                ],
            )
        if not (data.is_dataset or made.model.stop_training):
            train_callback.warn_of_end(
                checkpointer.num_steps - progress.begun, wanted
            )
        _logger.info("Trained up to step %d.", checkpointer.num_steps)

    def evaluate(
        self,
        input_fn: InputFn,
        hooks: Callbacks,
        *,
        steps: int | None,
        path: str | None,
        name: str | None,
    ) -> dict[str, Any]:
        """See `Estimator.evaluate`."""
        if path is not None:
            checkpoint_reading.check(path)

        def use(path: str | None) -> dict[str, Any]:
            step = 0 if path is None else checkpoint_reading.step_of(path)
            restore = _restoring(path)
            return self._evaluate(input_fn, hooks, steps, name, restore, step)

        if path is not None:
            return use(path)
        strategy = self.strategy_of(ModeKeys.EVAL)
        for left in reversed(range(_NUM_TRIES)):
            newest = self._newest(strategy)
            try:
                return use(newest)
            except checkpoint_reading.DamagedCheckpoint:
                # It may have been deleted, for newer ones.
                if not left or newest is None or os.path.isdir(newest):
                    raise
        raise AssertionError("unreachable")

    def evaluate_model(
        self,
        input_fn: InputFn,
        hooks: Callbacks,
        model: keras.Model,
        *,
        step: int,
        steps: int | None,
        name: str | None,
    ) -> dict[str, Any]:
        """Evaluates the weights of a model that is being trained.

        Args:
          input_fn: See `Estimator.evaluate`.
          hooks: See `Estimator.evaluate`.
          model: The model, whose variables have their values.
          step: The global step.
          steps: See `Estimator.evaluate`.
          name: See `Estimator.evaluate`.
        """

        def restore(evaluated: keras.Model) -> None:
            checkpoint_reading.copy_weights(model, evaluated)

        return self._evaluate(input_fn, hooks, steps, name, restore, step)

    def predict(
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
        with untouched(), seeded(self.config.tf_random_seed):
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

    def _evaluate(
        self,
        input_fn: InputFn,
        hooks: Callbacks,
        steps: int | None,
        name: str | None,
        restore: Callable[[keras.Model], None],
        step: int,
    ) -> dict[str, Any]:
        seed = self.config.tf_random_seed
        with untouched(), seeded(seed), _data_may_end():
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
                    *eval_scalars(self.config, name, step),
                ],
            )
        results = {**self._renamed(found), checkpoint_reading.GLOBAL_STEP: step}
        if jax.process_index() == 0:
            eval_results.append(self.eval_dir(name), step, results)
        _logger.info("Evaluated: %s", results)
        return results

    def _make(self, mode: str, data: inputs.Input) -> model_fns.Made:
        """Calls `model_fn` in the scope of the mode's strategy."""
        features, labels = inputs.symbols_of(data.example)
        if mode == ModeKeys.TRAIN and jax.process_index() == 0:
            exporting.note_features(self.model_dir, features)
        with self.strategy_of(mode).scope():
            return self._call_model_fn(mode, features, labels)

    def _call_model_fn(
        self, mode: str, features: Any, labels: Any
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

    def _renamed(self, results: Mapping[str, Any]) -> dict[str, Any]:
        names = self.result_names
        for name in names:
            if name not in results:
                raise ValueError(
                    "`metric_names_map` names results of evaluations. "
                    f"Received: {name!r}; there are {sorted(results)}. "
                    "Correct it."
                )
        return {names.get(name, name): v for name, v in results.items()}

    def _newest(self, strategy: Strategy) -> str | None:
        """The newest good checkpoint, the same in all processes."""
        mesh = strategy.mesh
        found = None
        if mesh.is_chief:
            found = checkpoint_reading.newest_good(self.model_dir)
        found = train_callback.value_of_chief(
            mesh, "the newest checkpoint", found, str | None
        )
        if found is None and mesh.is_chief:
            checkpoint_reading.warn_of_none(self.model_dir)
        return found

    def _check_role(self, strategy: Strategy) -> None:
        config = self.config
        if config.task_type in (SERVER, EVALUATOR):
            raise ValueError(
                "Train has been called with a wrong configuration: task type "
                f"{config.task_type!r} does not train. Received: a TF_CONFIG "
                "with that task. Call `ks.estimator.train_and_evaluate`, "
                "which does what each task is for; parameter servers are not "
                "supported."
            )
        num_processes = strategy.mesh.num_processes
        if config.num_worker_replicas > 1 and num_processes == 1:
            raise ValueError(
                "Processes of a cluster train together. Received: a TF_CONFIG "
                f"with {config.num_worker_replicas} training processes, and "
                f"train_distribute={shown(config.train_distribute)} on one. "
                "Pass `train_distribute=ks.MultiWorkerMirroredStrategy()`."
            )


class _Restore(keras.callbacks.Callback):
    """Gives a model its weights, once it is built.

    Args:
      restore: Called with the model.
      model: The model, if it is not the callback's.
    """

    def __init__(
        self,
        restore: Callable[[keras.Model], None],
        model: keras.Model | None = None,
    ) -> None:
        super().__init__()
        self._apply = restore
        self._given = model

    def on_test_begin(self, logs: Any = None) -> None:
        self._restore()

    def on_predict_begin(self, logs: Any = None) -> None:
        self._restore()

    def _restore(self) -> None:
        model = self.model if self._given is None else self._given
        assert isinstance(model, keras.Model)
        self._apply(model)


def _restoring(path: str | None) -> Callable[[keras.Model], None]:
    """What gives a model the weights of a checkpoint, if there is one."""

    def restore(model: keras.Model) -> None:
        if path is not None:
            checkpoint_reading.restore(model, path)

    return restore


@contextlib.contextmanager
def _data_may_end() -> Iterator[None]:
    """Without the warning of data that end before the steps: that is an end."""
    with warnings.catch_warnings():
        # Keras 3.15's (tests/contract/test_keras_contract.py).
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        yield

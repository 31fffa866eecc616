"""Searches for hyperparameters in each process of a job."""

import json
import sys
import tempfile

import keras
import keras_tuner
import numpy as np
import optuna

import keras_strategies as ks

_random = np.random.default_rng(0)
X = _random.normal(size=(22, 8)).astype("float32")
Y = np.tanh(X[:, :2])
SHARDED = ks.experimental.FullySharded(min_size=64)
FIT = {"batch_size": 4, "epochs": 2, "verbose": 0, "validation_data": (X, Y)}


def build(units, rate):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(units, "tanh"),
            keras.layers.Dense(2),
        ]
    )
    model.compile(keras.optimizers.Adam(rate), "mse")
    return model


def build_from(hp):
    units = hp.Choice("units", [64, 128])
    return build(units, hp.Choice("rate", [1e-2, 1e-3]))


def tune(strategy, after_trial=lambda: None):
    """Returns the scores of keras-tuner's trials, and the best model."""

    class Search(keras_tuner.GridSearch):
        def on_trial_end(self, trial):
            super().on_trial_end(trial)
            after_trial()

    with tempfile.TemporaryDirectory() as directory:
        tuner = Search(
            build_from,
            objective="val_loss",
            max_trials=4,
            distribution_strategy=strategy,
            directory=directory,
            seed=0,
        )
        tuner.search(X, Y, **FIT)
        trials = tuner.oracle.trials.values()
        (best,) = tuner.get_best_models(1)
    return [trial.score for trial in trials], best


def study(strategy):
    """Returns the values and states of Optuna's trials."""
    from optuna_integration import KerasPruningCallback

    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def objective(trial):
        rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)
        units = trial.suggest_categorical("units", [64, 128])
        with strategy.scope():
            model = build(units, rate)
        callbacks = [KerasPruningCallback(trial, "val_loss")]
        history = model.fit(X, Y, **FIT, callbacks=callbacks)
        return history.history["val_loss"][-1]

    found = optuna.create_study(
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )
    found.optimize(objective, n_trials=6)
    values = [t.intermediate_values for t in found.trials]
    return values, [t.state.name for t in found.trials]


def main():
    strategy = ks.MultiWorkerMirroredStrategy(variable_partitioner=SHARDED)
    scores, _ = tune(strategy)
    print("\nfound", json.dumps([scores, *study(strategy)]), file=sys.stdout)
    sys.stdout.flush()


if __name__ == "__main__":
    main()

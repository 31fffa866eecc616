"""The API of `tf.estimator`, implemented on Keras 3 and JAX.

    config = ks.estimator.RunConfig(model_dir, save_checkpoints_steps=500)
    estimator = ks.estimator.Estimator(model_fn, config=config)
    ks.estimator.train_and_evaluate(
        estimator,
        ks.estimator.TrainSpec(train_input_fn, max_steps=1000),
        ks.estimator.EvalSpec(eval_input_fn, steps=None),
    )

docs/estimator.md describes how to migrate from TensorFlow. Each public name is
imported when it is first used.
"""

from typing import Any as _Any

from keras_strategies.names.lazy_names import ESTIMATOR as _INSTEAD
from keras_strategies.names.lazy_names import lazy_names as _lazy_names

_MODULES = {
    "BestExporter": "exporters",
    "CheckpointSaverListener": "specs",
    "Estimator": "estimator",
    "EstimatorSpec": "estimator_spec",
    "EvalSpec": "specs",
    "Exporter": "exporters",
    "FinalExporter": "exporters",
    "LatestExporter": "exporters",
    "ModeKeys": "estimator_spec",
    "RunConfig": "config.run_config",
    "TrainSpec": "specs",
    "WarmStartSettings": "warm_start",
    "experimental": "",
    "model_to_estimator": "contrib.from_keras",
    "train_and_evaluate": "train_evaluate",
}

_get, __dir__ = _lazy_names(__name__, __name__, _MODULES, _INSTEAD)

# The names of TensorFlow's canned estimators, such as DNNClassifier and
# BoostedTreesRegressor, end with one of these words.
_CANNED = ("Classifier", "Regressor", "Estimator", "Head")


def __getattr__(name: str) -> _Any:
    if name not in _MODULES and name.endswith(_CANNED):
        raise AttributeError(
            "Canned estimators are not supported. Received: "
            f"`ks.estimator.{name}`. Pass a compiled Keras model to "
            "`ks.estimator.model_to_estimator(keras_model=...)`, or write a "
            "`model_fn`."
        )
    return _get(name)

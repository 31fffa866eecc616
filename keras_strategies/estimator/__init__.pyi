"""The public names, for type checkers; `./run names` writes them."""

from keras_strategies.estimator import experimental as experimental
from keras_strategies.estimator.config.run_config import RunConfig as RunConfig
from keras_strategies.estimator.contrib.from_keras import (
    model_to_estimator as model_to_estimator,
)
from keras_strategies.estimator.estimator import Estimator as Estimator
from keras_strategies.estimator.estimator_spec import (
    EstimatorSpec as EstimatorSpec,
)
from keras_strategies.estimator.estimator_spec import ModeKeys as ModeKeys
from keras_strategies.estimator.exporters import BestExporter as BestExporter
from keras_strategies.estimator.exporters import Exporter as Exporter
from keras_strategies.estimator.exporters import FinalExporter as FinalExporter
from keras_strategies.estimator.exporters import (
    LatestExporter as LatestExporter,
)
from keras_strategies.estimator.specs import (
    CheckpointSaverListener as CheckpointSaverListener,
)
from keras_strategies.estimator.specs import EvalSpec as EvalSpec
from keras_strategies.estimator.specs import TrainSpec as TrainSpec
from keras_strategies.estimator.train_evaluate import (
    train_and_evaluate as train_and_evaluate,
)
from keras_strategies.estimator.warm_start import (
    WarmStartSettings as WarmStartSettings,
)

"""EstimatorSpec: the Keras model, loss and other objects of a `model_fn`."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from keras_strategies._types import Tree
from keras_strategies.estimator.arguments import check_hooks
from keras_strategies.estimator.config.run_checks import check_unsupported
from keras_strategies.estimator.seam import (
    check_type,
    shorten,
)


class ModeKeys:
    """The modes in which a `model_fn` is called, as in TensorFlow.

    Attributes:
      TRAIN: Training.
      EVAL: Evaluation.
      PREDICT: Prediction or export.

    Example:
      ```python
      def model_fn(features, labels, mode, params):
          model = make_model(params)
          if mode == ks.estimator.ModeKeys.PREDICT:
              return ks.estimator.EstimatorSpec(mode, model=model)
          model.compile("adam", "mse")
          return model

      estimator = ks.estimator.Estimator(model_fn)
      ```
    """

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


MODES = (ModeKeys.TRAIN, ModeKeys.EVAL, ModeKeys.PREDICT)
_HOOKS = (
    "training_chief_hooks",
    "training_hooks",
    "evaluation_hooks",
    "prediction_hooks",
)
_COMPILED = ("loss", "train_op", "eval_metric_ops")
# Results that every evaluation contains in addition to its metrics.
_RESERVED_RESULTS = ("loss", "global_step")


@dataclasses.dataclass(frozen=True)
class EstimatorSpec:
    """A model with its loss, optimizer, metrics and predictions.

    A `model_fn` returns an EstimatorSpec, as in TensorFlow, or it returns a
    compiled model.

        def model_fn(features, labels, mode, params):
            model = make_model(params)
            return ks.estimator.EstimatorSpec(
                mode,
                model=model,
                predictions={"class": lambda y: y.argmax(-1), "logits": None},
                loss=keras.losses.SparseCategoricalCrossentropy(True),
                train_op=keras.optimizers.Adam(params["learning_rate"]),
                eval_metric_ops={
                    "accuracy": keras.metrics.SparseCategoricalAccuracy()
                },
            )

        estimator = ks.estimator.Estimator(
            model_fn, params={"learning_rate": 1e-3}
        )

    Training needs `loss` and `train_op`, evaluation needs `loss`, and
    prediction needs `predictions`. Arguments that a mode does not need are
    ignored. If `model` is compiled, omit `loss`, `train_op` and
    `eval_metric_ops`, because the model already contains them.

    Differs from tf: there is no graph, so `loss`, `train_op` and the other
    arguments are not the results of a computation, but Keras objects that
    define it.

    Attributes:
      mode: The `mode` that the `model_fn` was called with, one of `ModeKeys`.
      predictions: The predictions that `predict` yields. These can be names of
        the model's outputs (a str or a list); symbolic tensors of a functional
        model (one tensor or a dict); or a function that receives a batch of the
        model's outputs as NumPy arrays, and returns an array or a dict of
        arrays. A dict may also map names to such functions, or to None for the
        outputs themselves.
      loss: A `keras.losses.Loss`, the name of one, or a function of (y_true,
        y_pred); a nested structure of these for a model with several outputs.
      train_op: A `keras.optimizers.Optimizer`, or the name of one.
      eval_metric_ops: A dict that maps the names of results to metrics, which
        are computed in evaluations. A metric is a `keras.metrics.Metric`, the
        name of one, or a function of (y_true, y_pred).
      export_outputs: Must be None. An exported model returns the `predictions`
        if they are symbolic tensors, and otherwise the outputs of `model`.
      training_chief_hooks: Keras callbacks for training, only in the chief.
      training_hooks: Keras callbacks for training, in all processes.
      scaffold: Must be None.
      evaluation_hooks: Keras callbacks for evaluations.
      prediction_hooks: Keras callbacks for predictions.
      model: The `keras.Model`.

    Raises:
      ValueError: if an argument that the mode needs is missing, or an argument
        is not supported on JAX.
      TypeError: if an argument has the wrong type, such as a tensor or a
        SessionRunHook.
    """

    mode: str
    predictions: Any = None
    loss: Any = None
    train_op: Any = None
    eval_metric_ops: Mapping[str, Any] | None = None
    export_outputs: None = None
    training_chief_hooks: Iterable[Any] | None = None
    training_hooks: Iterable[Any] | None = None
    scaffold: None = None
    evaluation_hooks: Iterable[Any] | None = None
    prediction_hooks: Iterable[Any] | None = None
    _: dataclasses.KW_ONLY
    model: keras.Model | None = None

    def __post_init__(self) -> None:
        check_mode("mode", self.mode)
        fix = "Put the layers into a `keras.Model`, and pass it as `model=`."
        check_type("`model`", self.model, keras.Model, "a Keras model", fix)
        for name in (*_COMPILED, "predictions"):
            _check_symbolic(name, getattr(self, name))
        _check_compiled(self)
        _check_needed(self)
        _check_metrics(self.eval_metric_ops)
        check_unsupported("export_outputs", self.export_outputs)
        check_unsupported("scaffold", self.scaffold)
        for name in _HOOKS:
            hooks = check_hooks(getattr(self, name), name)
            object.__setattr__(self, name, hooks)


def check_mode(name: str, mode: object) -> None:
    """Raises ValueError unless an argument is one of `ModeKeys`."""
    if mode not in MODES:
        raise ValueError(
            f"`{name}` must be one of {MODES}. Received: {shorten(mode)}. Pass "
            "one of `ks.estimator.ModeKeys`."
        )


def _check_compiled(spec: EstimatorSpec) -> None:
    extra = [name for name in _COMPILED if getattr(spec, name) is not None]
    if extra and spec.model is not None and spec.model.compiled:
        raise ValueError(
            "An EstimatorSpec with a compiled model must not set the loss, "
            f"optimizer or metrics. Received: {', '.join(extra)}. Omit these "
            "arguments, or do not compile the model."
        )


def _check_needed(spec: EstimatorSpec) -> None:
    """Raises ValueError if an argument that the mode needs is missing."""
    needed = {
        ModeKeys.TRAIN: ("loss", "train_op"),
        ModeKeys.EVAL: ("loss",),
        ModeKeys.PREDICT: ("predictions",),
    }
    is_compiled = spec.model is not None and spec.model.compiled
    for name in needed[spec.mode]:
        has_it = is_compiled and name in _COMPILED
        if getattr(spec, name) is None and not has_it:
            raise ValueError(
                f"Missing {name}, which the mode {spec.mode!r} needs. Pass a "
                "Keras loss and optimizer to train, and names or functions of "
                "the model's outputs to predict."
            )


def _check_symbolic(name: str, value: Tree) -> None:
    """Raises TypeError for tensors, as TensorFlow's EstimatorSpec has them."""
    for part in keras.tree.flatten(value):
        is_symbol = isinstance(part, keras.KerasTensor)
        if is_tensor(part) and not (is_symbol and name == "predictions"):
            raise TypeError(
                f"`{name}` must consist of Keras objects, names or functions. "
                f"Received: {shorten(part)} of type {type(part).__name__}. "
                "Graph tensors are not supported. Pass what computes the "
                "value, such as `keras.losses.MeanSquaredError()`."
            )


def _check_metrics(metrics: Mapping[str, Any] | None) -> None:
    fix = "Pass a dict such as {'accuracy': keras.metrics.Accuracy()}."
    what = "a dict from names to metrics"
    check_type("`eval_metric_ops`", metrics, Mapping | None, what, fix)
    for name in _RESERVED_RESULTS:
        if name in (metrics or {}):
            raise ValueError(
                f"Metric with name {name!r} is not allowed, because every "
                "evaluation already returns a result with this name. Use "
                "another name."
            )


def is_tensor(value: object) -> bool:
    """Returns whether a value is an array or a tensor of any library."""
    return hasattr(value, "shape") and hasattr(value, "dtype")

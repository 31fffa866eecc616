"""EstimatorSpec: the Keras model, loss and other objects of a `model_fn`."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from keras_strategies._types import Tree
from keras_strategies.cluster.addresses import shorten
from keras_strategies.cluster.checks import check_type
from keras_strategies.estimator.arguments import check_hooks

if TYPE_CHECKING:
    import keras


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
    model: "keras.Model | None" = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(
                f"`mode` must be one of {MODES}. Received: "
                f"{shorten(self.mode)}. Pass the argument `mode` of `model_fn`."
            )
        _check_model(self.model)
        _check_compiled(self)
        _check_train_op(self.train_op)
        _check_loss(self.loss)
        _check_needed(self)
        _check_predictions(self.predictions)
        _check_metrics(self.eval_metric_ops)
        _check_export_outputs(self.export_outputs)
        _check_scaffold(self.scaffold)
        for name in _HOOKS:
            hooks = check_hooks(getattr(self, name), name)
            object.__setattr__(self, name, hooks)


def _check_model(model: object) -> None:
    import keras

    cure = "Put the layers into a `keras.Model`, and pass it as `model=`."
    check_type("`model`", model, keras.Model, "a Keras model", cure)


def _check_compiled(spec: EstimatorSpec) -> None:
    extra = [name for name in _COMPILED if getattr(spec, name) is not None]
    if extra and spec.model is not None and spec.model.compiled:
        raise ValueError(
            "An EstimatorSpec with a compiled model must not set the loss, "
            "optimizer or metrics. Received: a compiled model, and the "
            f"arguments {', '.join(extra)}. Omit these arguments, or do not "
            "compile the model."
        )


def _check_needed(spec: EstimatorSpec) -> None:
    """Raises ValueError if an argument that the mode needs is missing."""
    is_compiled = spec.model is not None and spec.model.compiled
    needs_loss = spec.mode in (ModeKeys.TRAIN, ModeKeys.EVAL)
    if needs_loss and spec.loss is None and not is_compiled:
        raise ValueError(
            f"Missing loss. Received: loss=None for mode={spec.mode!r}, and a "
            "model that is not compiled. Pass a Keras loss."
        )
    is_training = spec.mode == ModeKeys.TRAIN
    if is_training and spec.train_op is None and not is_compiled:
        raise ValueError(
            f"Missing train_op. Received: train_op=None for mode="
            f"{spec.mode!r}, and a model that is not compiled. Pass a Keras "
            "optimizer."
        )
    if spec.mode == ModeKeys.PREDICT and spec.predictions is None:
        raise ValueError(
            f"Missing predictions. Received: predictions=None for mode="
            f"{spec.mode!r}. Pass the names of outputs of the model, or a "
            "function of the outputs. To predict all outputs, return the model "
            "instead of an EstimatorSpec."
        )


def _check_train_op(train_op: object) -> None:
    import keras

    kinds = keras.optimizers.Optimizer | str | None
    what = "a Keras optimizer, or the name of one"
    cure = (
        "Graph operations are not supported. Pass an optimizer such as "
        "`keras.optimizers.Adam(...)` instead of the result of `minimize`."
    )
    check_type("train_op", train_op, kinds, what, cure)


def _check_loss(loss: Tree) -> None:
    import keras

    for part in keras.tree.flatten(loss):
        if part is None or isinstance(part, str | keras.losses.Loss):
            continue
        if is_tensor(part) or not callable(part):
            raise TypeError(
                "loss must be a Keras loss, the name of one, or a function of "
                f"(y_true, y_pred). Received: {shorten(part)} of type "
                f"{type(part).__name__}. Graph tensors are not supported. "
                "Pass a loss such as `keras.losses.MeanSquaredError()` instead "
                "of a computed value. To add a loss that depends on other "
                "tensors, call `add_loss` of a layer or of the model."
            )


def _check_predictions(predictions: Tree) -> None:
    parts = predictions
    if isinstance(predictions, Mapping):
        parts = [p for p in predictions.values() if p is not None]
    elif not isinstance(predictions, list | tuple):
        parts = [predictions] if predictions is not None else []
    for part in parts or ():
        if _is_symbolic(part) or isinstance(part, str):
            continue
        if is_tensor(part) or not callable(part):
            raise TypeError(
                "predictions must be names of the model's outputs, symbolic "
                "tensors of the model, or functions of its outputs. Received: "
                f"{shorten(part)} of type {type(part).__name__}. Graph tensors "
                "are not supported. Pass a function such as "
                "`lambda outputs: outputs.argmax(-1)` instead of a computed "
                "value."
            )


def _check_metrics(metrics: Mapping[str, Any] | None) -> None:
    import keras

    cure = (
        "Pass a dict from names to metrics, such as {'accuracy': "
        "keras.metrics.SparseCategoricalAccuracy()}."
    )
    check_type("eval_metric_ops", metrics, Mapping | None, "a dict", cure)
    for name, metric in (metrics or {}).items():
        if not isinstance(name, str) or not name:
            raise TypeError(
                "Keys of eval_metric_ops must be names, which are non-empty "
                f"strings. Received: {shorten(name)}. Use the name of each "
                "metric as its key."
            )
        if name in _RESERVED_RESULTS:
            raise ValueError(
                f"Metric with name {name!r} is not allowed, because every "
                "evaluation already returns a result with this name. Received: "
                f"{shorten(metric)}. Use another name."
            )
        if isinstance(metric, keras.metrics.Metric | str):
            continue
        if is_tensor(metric) or not callable(metric):
            raise TypeError(
                "Values of eval_metric_ops must be Keras metrics, names of "
                "Keras metrics, or functions of (y_true, y_pred). Received: "
                f"{shorten(metric)} of type {type(metric).__name__} for key: "
                f"{name}. Graph tensors are not supported. Pass a metric such "
                "as `keras.metrics.SparseCategoricalAccuracy()` instead of a "
                "pair (value, update_op)."
            )


def _check_export_outputs(outputs: object) -> None:
    if outputs is None:
        return
    if not isinstance(outputs, Mapping):
        raise TypeError(
            "`export_outputs` must be a dict. Received: "
            f"{shorten(outputs)} of type {type(outputs).__name__}. Omit it, "
            "because an exported model returns symbolic `predictions`, or else "
            "the outputs of `model`."
        )
    raise ValueError(
        "`export_outputs` is not supported. Received: the signatures "
        f"{sorted(map(str, outputs))}. Omit it, because an exported model "
        "returns symbolic `predictions`, or else the outputs of `model`. To "
        "choose these, create the model with `keras.Model(inputs, outputs)`."
    )


def _check_scaffold(scaffold: object) -> None:
    if scaffold is not None:
        raise TypeError(
            "`scaffold` is not supported, because JAX has no sessions. "
            f"Received: {shorten(scaffold)} of type {type(scaffold).__name__}. "
            "Use `warm_start_from` to set initial values, and `RunConfig` to "
            "configure checkpoints."
        )


def is_tensor(value: object) -> bool:
    """Returns whether a value is an array or a tensor of any library."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_symbolic(value: object) -> bool:
    import keras

    return isinstance(value, keras.KerasTensor)

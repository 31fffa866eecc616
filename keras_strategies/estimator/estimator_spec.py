"""EstimatorSpec: the Keras model, loss and other objects of a `model_fn`."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from keras_strategies._types import Tree
from keras_strategies.estimator.arguments import check_hooks
from keras_strategies.estimator.config.run_checks import check_unsupported
from keras_strategies.estimator.seam import (
    check_type,
    shorten,
)

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
_OUTPUTS = (
    "An exported model returns symbolic `predictions`, or else the outputs of "
    "`model`. To choose these, create it with `keras.Model(inputs, outputs)`."
)
_SCAFFOLD = (
    "Use `warm_start_from` to set initial values, and `RunConfig` to configure "
    "checkpoints."
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
        check_mode("mode", self.mode)
        _check_model(self.model)
        _check_compiled(self)
        _check_train_op(self.train_op)
        _check_loss(self.loss)
        _check_needed(self)
        _check_predictions(self.predictions)
        _check_metrics(self.eval_metric_ops)
        name, outputs = "export_outputs", self.export_outputs
        check_type(f"`{name}`", outputs, Mapping | None, "a dict", _OUTPUTS)
        check_unsupported(name, outputs, _OUTPUTS)
        check_unsupported("scaffold", self.scaffold, _SCAFFOLD, error=TypeError)
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


def _check_model(model: object) -> None:
    import keras

    fix = "Put the layers into a `keras.Model`, and pass it as `model=`."
    check_type("`model`", model, keras.Model, "a Keras model", fix)


def _check_compiled(spec: EstimatorSpec) -> None:
    extra = [name for name in _COMPILED if getattr(spec, name) is not None]
    if extra and spec.model is not None and spec.model.compiled:
        raise ValueError(
            "An EstimatorSpec with a compiled model must not set the loss, "
            f"optimizer or metrics. Received: {', '.join(extra)}. Omit these "
            "arguments, or do not "
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
    fix = (
        "Graph operations are not supported. Pass an optimizer such as "
        "`keras.optimizers.Adam(...)` instead of the result of `minimize`."
    )
    check_type("train_op", train_op, kinds, what, fix)


def _check_part(
    part: object, kinds: Any, name: str, what: str, fix: str
) -> None:
    """Raises TypeError unless a part is a function or of some kinds."""
    if not callable(part) or is_tensor(part):
        fix = f"Graph tensors are not supported. {fix}"
        check_type(name, part, kinds, what, fix)


def _check_loss(loss: Tree) -> None:
    import keras

    kinds = str | keras.losses.Loss | None
    what = "a Keras loss, the name of one, or a function of (y_true, y_pred)"
    fix = (
        "Pass a loss such as `keras.losses.MeanSquaredError()` instead of a "
        "computed value. To add a loss that depends on other tensors, call "
        "`add_loss` of a layer or of the model."
    )
    for part in keras.tree.flatten(loss):
        _check_part(part, kinds, "loss", what, fix)


def _check_predictions(predictions: Tree) -> None:
    import keras

    what = (
        "names of the model's outputs, symbolic tensors of the model, or "
        "functions of its outputs"
    )
    fix = (
        "Pass a function such as `lambda outputs: outputs.argmax(-1)` instead "
        "of a computed value."
    )
    kinds = str | keras.KerasTensor | None
    parts = [predictions]
    if isinstance(predictions, Mapping):
        parts = [*predictions.values()]
    elif isinstance(predictions, list | tuple):
        parts = [*predictions]
    for part in parts:
        _check_part(part, kinds, "predictions", what, fix)


def _check_metrics(metrics: Mapping[str, Any] | None) -> None:
    import keras

    fix = (
        "Pass a dict from names to metrics, such as {'accuracy': "
        "keras.metrics.SparseCategoricalAccuracy()}."
    )
    check_type("eval_metric_ops", metrics, Mapping | None, "a dict", fix)
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
        fix = (
            "Pass a metric such as `keras.metrics.SparseCategoricalAccuracy()` "
            f"instead of a pair (value, update_op), for key: {name}."
        )
        what = "Keras metrics, names of them, or functions of (y_true, y_pred)"
        name = "Values of eval_metric_ops"
        _check_part(metric, keras.metrics.Metric | str, name, what, fix)


def is_tensor(value: object) -> bool:
    """Returns whether a value is an array or a tensor of any library."""
    return hasattr(value, "shape") and hasattr(value, "dtype")

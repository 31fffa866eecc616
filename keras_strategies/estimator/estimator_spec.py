"""EstimatorSpec: what a `model_fn` returns, in Keras's objects."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from keras_strategies._types import Tree
from keras_strategies.cluster.addresses import shown
from keras_strategies.cluster.checks import check_type
from keras_strategies.estimator.arguments import check_hooks

if TYPE_CHECKING:
    import keras


class ModeKeys:
    """What a `model_fn` is called for; as tf's.

    Attributes:
      TRAIN: Training.
      EVAL: Evaluation.
      PREDICT: Prediction, and export.

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
# What an evaluation's results have beside metrics.
_OWN_RESULTS = ("loss", "global_step")


@dataclasses.dataclass(frozen=True)
class EstimatorSpec:
    """What a `model_fn` returns if not a compiled model; as tf's.

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

    Training needs `loss` and `train_op`, evaluation `loss`, prediction
    `predictions`; the others are not looked at in a mode. A `model` that is
    compiled brings loss, optimizer and metrics with it.

    Differs from tf: there is no graph, so `loss`, `train_op` and the rest are
    Keras's objects, which say how to compute, and not results.

    Attributes:
      mode: One of `ModeKeys`, as the `model_fn` was given it.
      predictions: What `predict` yields: names of the model's outputs (a str
        or a list); symbolic tensors of a functional model (one or a dict);
        or a function of a batch of the model's outputs, as numpy arrays, that
        returns an array or a dict of arrays. A dict may also map names to
        such functions, with None for the outputs themselves.
      loss: A `keras.losses.Loss`, its name, a function of (y_true, y_pred),
        or a nest of them for several outputs.
      train_op: A `keras.optimizers.Optimizer`, or its name.
      eval_metric_ops: `keras.metrics.Metric`s, or functions of
        (y_true, y_pred), by the names of the results; computed in
        evaluations.
      export_outputs: None: the model is exported with its own outputs.
      training_chief_hooks: Keras callbacks of the chief, in training.
      training_hooks: Keras callbacks of all processes, in training.
      scaffold: None: there is no session to prepare.
      evaluation_hooks: Keras callbacks, in evaluations.
      prediction_hooks: Keras callbacks, in predictions.
      model: The `keras.Model`.

    Raises:
      ValueError: something is missing in this mode, or has no meaning here.
      TypeError: something of another type, such as a tensor or a
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
                f"`mode` is one of {MODES}. Received: {shown(self.mode)}. Pass "
                "on the `mode` that the `model_fn` is given."
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

    cure = "Make the layers a `keras.Model`, and pass it as `model=`."
    check_type("`model`", model, keras.Model, "a Keras model", cure)


def _check_compiled(spec: EstimatorSpec) -> None:
    given = [name for name in _COMPILED if getattr(spec, name) is not None]
    if given and spec.model is not None and spec.model.compiled:
        raise ValueError(
            "A compiled model has its loss, optimizer and metrics. Received: "
            f"a compiled model, and {', '.join(given)}. Leave these out, or "
            "do not compile the model."
        )


def _check_needed(spec: EstimatorSpec) -> None:
    """Raises ValueError for what the mode cannot do without."""
    is_compiled = spec.model is not None and spec.model.compiled
    needs_loss = spec.mode in (ModeKeys.TRAIN, ModeKeys.EVAL)
    if needs_loss and spec.loss is None and not is_compiled:
        raise ValueError(
            f"Missing loss. Received: loss=None for mode={spec.mode!r}, and a "
            "model that is not compiled. Give a loss of Keras."
        )
    is_training = spec.mode == ModeKeys.TRAIN
    if is_training and spec.train_op is None and not is_compiled:
        raise ValueError(
            f"Missing train_op. Received: train_op=None for mode="
            f"{spec.mode!r}, and a model that is not compiled. Give an "
            "optimizer of Keras."
        )
    if spec.mode == ModeKeys.PREDICT and spec.predictions is None:
        raise ValueError(
            f"Missing predictions. Received: predictions=None for mode="
            f"{spec.mode!r}. Name outputs of the model, or give a function of "
            "them; or return the model itself, for all its outputs."
        )


def _check_train_op(train_op: object) -> None:
    import keras

    kinds = keras.optimizers.Optimizer | str | None
    what = "an optimizer of Keras, or its name"
    cure = (
        "There is no graph with operations: give `keras.optimizers.Adam(...)` "
        "instead of what its `minimize` would return."
    )
    check_type("train_op", train_op, kinds, what, cure)


def _check_loss(loss: Tree) -> None:
    import keras

    for part in keras.tree.flatten(loss):
        if part is None or isinstance(part, str | keras.losses.Loss):
            continue
        if is_tensor(part) or not callable(part):
            raise TypeError(
                "loss must be a loss of Keras, its name, or a function of "
                f"(y_true, y_pred). Received: {shown(part)} of type "
                f"{type(part).__name__}. There is no graph: give "
                "`keras.losses.MeanSquaredError()` instead of the value that "
                "it would return; `model.add_loss` and layers take what "
                "depends on more."
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
                "predictions must be names of the model's outputs, its "
                "symbolic tensors, or functions of its outputs. Received: "
                f"{shown(part)} of type {type(part).__name__}. There is no "
                "graph: give `lambda outputs: outputs.argmax(-1)` instead of "
                "a value."
            )


def _check_metrics(metrics: Mapping[str, Any] | None) -> None:
    import keras

    cure = (
        "Give metrics by name: {'accuracy': "
        "keras.metrics.SparseCategoricalAccuracy()}."
    )
    check_type("eval_metric_ops", metrics, Mapping | None, "a dict", cure)
    for name, metric in (metrics or {}).items():
        if not isinstance(name, str) or not name:
            raise TypeError(
                "Keys of eval_metric_ops are names. Received: "
                f"{shown(name)}. Give each metric a name."
            )
        if name in _OWN_RESULTS:
            raise ValueError(
                f"Metric with name {name!r} is not allowed, because an "
                "evaluation has a result of that name already. Received: "
                f"{shown(metric)}. Give it another name."
            )
        if isinstance(metric, keras.metrics.Metric | str):
            continue
        if is_tensor(metric) or not callable(metric):
            raise TypeError(
                "Values of eval_metric_ops must be metrics of Keras, their "
                "names, or functions of (y_true, y_pred). Received: "
                f"{shown(metric)} of type {type(metric).__name__} for key: "
                f"{name}. There is no graph: give "
                "`keras.metrics.SparseCategoricalAccuracy()` instead of a "
                "pair (value, update_op)."
            )


def _check_export_outputs(outputs: object) -> None:
    if outputs is None:
        return
    if not isinstance(outputs, Mapping):
        raise TypeError(
            "export_outputs must be dict. Received: "
            f"{shown(outputs)} of type {type(outputs).__name__}. Leave it "
            "out: the model is exported with its own outputs."
        )
    raise ValueError(
        "`export_outputs` has no meaning here. Received: the signatures "
        f"{sorted(map(str, outputs))}. Leave it out: the model is exported "
        "with its own outputs, which `keras.Model(inputs, outputs)` names."
    )


def _check_scaffold(scaffold: object) -> None:
    if scaffold is not None:
        raise TypeError(
            "`scaffold` has no meaning here: there is no session. Received: "
            f"{shown(scaffold)} of type {type(scaffold).__name__}. Use "
            "`warm_start_from` for initial values, and `RunConfig` for what "
            "is saved."
        )


def is_tensor(value: object) -> bool:
    """Whether it is an array or a tensor, of whichever library."""
    return hasattr(value, "shape") and hasattr(value, "dtype")


def _is_symbolic(value: object) -> bool:
    import keras

    return isinstance(value, keras.KerasTensor)

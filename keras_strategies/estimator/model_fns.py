"""Calls a `model_fn`, and checks the model or EstimatorSpec that it returns."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_strategies._types import Array, Tree
from keras_strategies.estimator.arguments import find_argument_names
from keras_strategies.estimator.config.run_config import RunConfig
from keras_strategies.estimator.estimator_spec import EstimatorSpec, ModeKeys
from keras_strategies.estimator.seam import (
    find_binding,
    get_entered_strategy,
    shorten,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelBundle:
    """The model that a `model_fn` returned, with its predictions and callbacks.

    Attributes:
      model: The model. It is compiled unless the mode is PREDICT.
      outputs: The model to run for predictions: `model`, or a model that shares
        its layers and returns the tensors to predict.
      predictions: Function that receives what the model `outputs` returns for
        a batch, as NumPy arrays, and returns the predictions.
      chief_hooks: Callbacks for training, only in the chief.
      hooks: Callbacks for the mode (training, evaluation or prediction), in all
        processes.
    """

    model: keras.Model
    outputs: keras.Model
    predictions: Callable[[Tree], Tree]
    chief_hooks: tuple[Any, ...] = ()
    hooks: tuple[Any, ...] = ()


def check_model_fn(model_fn: object, params: object) -> None:
    """Raises an error unless a function is a valid `model_fn`.

    Raises:
      ValueError: if `params` are given but it has no argument `params`.
      TypeError: if `model_fn` is not callable, or is a model.
    """
    if not callable(model_fn) or isinstance(model_fn, keras.Model):
        raise TypeError(
            "model_fn must be a function that returns a model. Received: "
            f"{shorten(model_fn)} of type {type(model_fn).__name__}. To use an "
            "existing model, call `ks.estimator.model_to_estimator`."
        )
    names = find_argument_names(model_fn)
    if params is not None and "params" not in names:
        raise ValueError(
            "model_fn does not include an argument `params`, but `params` are "
            "passed to the Estimator. Received: a model_fn with the arguments "
            f"{list(names)}. Add `params` to the arguments of model_fn."
        )


def make(
    model_fn: Callable[..., Any],
    *,
    mode: str,
    features: Tree,
    labels: Tree,
    params: Mapping[str, Any],
    config: RunConfig,
) -> ModelBundle:
    """Calls a `model_fn` in the current scope and checks its result.

    Raises:
      ValueError: if `model_fn` returns neither a model nor an EstimatorSpec,
        or the model cannot be used with the mode, labels or strategy.
    """
    names = find_argument_names(model_fn)
    known = {
        "features": features,
        "labels": labels,
        "mode": mode,
        "params": params,
        "config": config,
    }
    result = model_fn(**{n: known[n] for n in names if n in known})
    if isinstance(result, keras.Model):
        bundle = _bundle_model(result, mode)
    elif isinstance(result, EstimatorSpec):
        bundle = _bundle_spec(result, mode)
    else:
        raise ValueError(
            "model_fn must return an EstimatorSpec or a compiled "
            f"keras.Model. Received: {shorten(result)} of type "
            f"{type(result).__name__}. Return "
            "`ks.estimator.EstimatorSpec(mode, model=model, ...)`."
        )
    if mode != ModeKeys.PREDICT:
        _check_labels(bundle.model, labels)
        _check_new(bundle.model)
    return bundle


def _check_new(model: keras.Model) -> None:
    """Raises ValueError unless a model was created in the current scope."""
    strategy = get_entered_strategy()
    binding = find_binding(model)
    owner = None if binding is None else binding.owner
    if strategy is not None and owner is not strategy:
        raise ValueError(
            "model_fn must create and compile a new model in each call. "
            f"Received: {model.name!r}, which was compiled before the call. To "
            "use it, call `ks.estimator.model_to_estimator`."
        )


def _check_labels(model: keras.Model, labels: Tree) -> None:
    """Raises ValueError if a model has a loss but the data have no labels."""
    kind = type(model)
    # A custom train step may compute the loss without labels.
    has_custom_steps = (
        kind.train_step is not keras.Model.train_step
        or kind.compute_loss is not keras.Model.compute_loss
    )
    if labels is None and not has_custom_steps and getattr(model, "loss", None):
        raise ValueError(
            f"The loss {shorten(model.loss)} needs labels, but the data has no "
            "labels. Return (features, labels) from the `input_fn`, or "
            "(features, features) if these are also the labels."
        )


def _bundle_model(model: keras.Model, mode: str) -> ModelBundle:
    if mode != ModeKeys.PREDICT and not model.compiled:
        raise ValueError(
            f"The model {model.name!r} that model_fn returns for mode={mode!r} "
            "must be compiled. Call `model.compile(optimizer, loss, metrics)`, "
            "or return an EstimatorSpec."
        )
    predictions = functools.partial(_name_outputs, model)
    return ModelBundle(model=model, outputs=model, predictions=predictions)


def _bundle_spec(spec: EstimatorSpec, mode: str) -> ModelBundle:
    if spec.mode != mode:
        raise ValueError(
            "An EstimatorSpec must have the mode that model_fn is called "
            f"with. Received: mode={spec.mode!r} in a call with "
            f"mode={mode!r}. Pass the argument `mode` of model_fn."
        )
    model = spec.model
    assert model is not None  # EstimatorSpec has checked it.
    if mode != ModeKeys.PREDICT and not model.compiled:
        metrics = spec.eval_metric_ops if mode == ModeKeys.EVAL else None
        _check_metrics(spec)
        model.compile(
            # An evaluation does not use the optimizer.
            optimizer=spec.train_op or "sgd",
            loss=spec.loss,
            metrics=[_name_metric(n, m) for n, m in (metrics or {}).items()]
            or None,
        )
    hooks = {
        ModeKeys.TRAIN: spec.training_hooks,
        ModeKeys.EVAL: spec.evaluation_hooks,
        ModeKeys.PREDICT: spec.prediction_hooks,
    }[mode]
    outputs, predictions = model, functools.partial(_name_outputs, model)
    if mode == ModeKeys.PREDICT:
        outputs, predictions = _choose_predictions(model, spec.predictions)
    return ModelBundle(
        model=model,
        outputs=outputs,
        predictions=predictions,
        chief_hooks=tuple(spec.training_chief_hooks or ()),
        hooks=tuple(hooks or ()),
    )


def _name_metric(name: str, metric: object) -> keras.metrics.Metric | str:
    """Returns a metric whose result has the given name."""
    if isinstance(metric, str):
        if metric == name:
            return metric
        metric = keras.metrics.get(metric)
    if not isinstance(metric, keras.metrics.Metric):
        return keras.metrics.MeanMetricWrapper(metric, name=name)
    # The metric is renamed in place, because a copy created from its config
    # could lose arguments.
    metric.name = name
    return metric


def _check_metrics(spec: EstimatorSpec) -> None:
    """Raises ValueError if a metric's name, or its output, is ambiguous."""
    metrics = spec.eval_metric_ops or {}
    outputs = getattr(spec.model, "outputs", None) or []
    if metrics and len(outputs) > 1:
        raise ValueError(
            "eval_metric_ops need a model with one output. Received: "
            f"{sorted(metrics)} for a model with {len(outputs)} outputs. "
            "Return a model that is compiled with metrics={'output': [...]}, "
            "and omit loss, train_op and eval_metric_ops."
        )
    kind = keras.metrics.Metric
    objects = [id(m) for m in metrics.values() if isinstance(m, kind)]
    if len(set(objects)) < len(objects):
        raise ValueError(
            "A metric of eval_metric_ops must have one name. Received: the "
            "same metric object under more than one of the names "
            f"{sorted(metrics)}. Create a separate metric for each name."
        )


def _choose_predictions(
    model: keras.Model, predictions: Tree
) -> tuple[keras.Model, Callable[[Tree], Tree]]:
    """Returns the model to run and a function that converts its outputs."""
    leaves = keras.tree.flatten(predictions)
    symbols = [isinstance(leaf, keras.KerasTensor) for leaf in leaves]
    if all(symbols):
        return keras.Model(model.inputs, predictions), lambda outputs: outputs
    if any(symbols):
        raise ValueError(
            "predictions must be either all symbolic tensors, or all names and "
            "functions, not a mixture. Compute all of them as symbolic "
            "tensors, with `keras.ops` on the tensors of the model."
        )
    entry = functools.partial(_choose_part, model)
    if isinstance(predictions, list | tuple):
        predictions = {name: name for name in predictions}
    if not isinstance(predictions, Mapping):
        return model, entry(predictions)
    parts = {name: entry(part) for name, part in predictions.items()}
    return model, lambda outputs: {
        n: part(outputs) for n, part in parts.items()
    }


def _choose_part(model: keras.Model, part: Any) -> Callable[[Tree], Tree]:
    """Returns a function of a model's outputs that returns one prediction."""
    if part is None:
        return lambda outputs: outputs
    if isinstance(part, str):
        return functools.partial(_pick_output, model, part)
    return part


def _name_outputs(model: keras.Model, outputs: Tree) -> Tree:
    """Converts a list of a model's outputs to a dict."""
    if not isinstance(outputs, list | tuple):
        return outputs
    names = find_output_names(model)
    if len(names) != len(outputs):
        names = [f"output_{index}" for index in range(len(outputs))]
    return dict(zip(names, outputs, strict=True))


def find_output_names(model: keras.Model) -> list[str]:
    """Returns the names of a model's outputs, or [] if they are unknown."""
    if isinstance(model, keras.Sequential):
        # The output is named after the last layer, as in a functional
        # model.
        return [layer.name for layer in model.layers[-1:]]
    return list(getattr(model, "output_names", None) or [])


def _pick_output(model: keras.Model, name: str, outputs: Tree) -> Array:
    """Returns the output of the model that has the given name."""
    if not isinstance(outputs, list | tuple | Mapping):
        outputs = [outputs]
    named = _name_outputs(model, outputs)
    if name not in named:
        raise ValueError(
            "predictions must be names of the model's outputs. Received: "
            f"{name!r}, but the model has {sorted(map(str, named))}. Use one "
            "of these names."
        )
    return named[name]

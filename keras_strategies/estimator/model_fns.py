"""Calls of a `model_fn`, and the models that come of them."""

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_strategies._types import Array, Tree
from keras_strategies.cluster.addresses import shown
from keras_strategies.estimator.arguments import names_of_arguments
from keras_strategies.estimator.config.run_config import RunConfig
from keras_strategies.estimator.estimator_spec import EstimatorSpec, ModeKeys
from keras_strategies.keras_bridge.loops.binding import binding_of
from keras_strategies.strategy.current import entered_strategy

ARGUMENTS = ("features", "labels", "mode", "params", "config")
"""What a `model_fn` may ask for."""

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """What a `model_fn` made.

    Attributes:
      model: The model, compiled but for predictions.
      outputs: The model whose outputs are predicted: `model`, or one of some
        of its tensors.
      predictions: From a batch of its outputs, as numpy arrays, to what is
        yielded.
      chief_hooks: Callbacks of the chief in training.
      hooks: Callbacks of all processes, in the mode.
    """

    model: keras.Model
    outputs: keras.Model
    predictions: Callable[[Tree], Tree]
    chief_hooks: tuple[Any, ...] = ()
    hooks: tuple[Any, ...] = ()


def check_model_fn(model_fn: object, params: object) -> None:
    """Raises unless a function can be called as a `model_fn`.

    Raises:
      ValueError: there is none, it has other arguments, or it has none for
        the parameters that are given.
      TypeError: it cannot be called, or is a model.
    """
    if model_fn is None:
        raise ValueError(
            "model_fn must be provided to Estimator. Received: None. Give a "
            "function that makes the model."
        )
    if not callable(model_fn):
        raise TypeError(
            f"model_fn is a function. Received: {shown(model_fn)} of type "
            f"{type(model_fn).__name__}. For a model that is there already "
            "use `ks.estimator.model_to_estimator`."
        )
    if isinstance(model_fn, keras.Model):
        raise TypeError(
            "`model_fn` is a function of (features, labels, mode, ...). "
            "Received: a Keras model. Use `ks.estimator.model_to_estimator`."
        )
    names = names_of_arguments(model_fn)
    others = sorted(set(names) - set(ARGUMENTS) - _with_defaults(model_fn))
    if others:
        raise ValueError(
            "model_fn has arguments that are not expected. Received: "
            f"{', '.join(others)}. Take {', '.join(ARGUMENTS)} by name; the "
            "rest belongs into `params`."
        )
    if params is not None and "params" not in names:
        raise ValueError(
            "model_fn does not include params argument, but params are passed "
            f"to Estimator. Received: the arguments {list(names)}. Add "
            "`params` to the arguments of model_fn."
        )
    if params is None and "params" in names:
        _logger.warning(
            "model_fn includes params argument, but params are not passed to "
            "Estimator: it is given {}."
        )


def make(
    model_fn: Callable[..., Any],
    *,
    mode: str,
    features: Tree,
    labels: Tree,
    params: Mapping[str, Any],
    config: RunConfig,
) -> Made:
    """Calls a `model_fn`, within the scope of the strategy.

    Raises:
      ValueError: it returns nothing that is a model.
    """
    names = names_of_arguments(model_fn)
    known = {
        "features": features,
        "labels": labels,
        "mode": mode,
        "params": params,
        "config": config,
    }
    result = model_fn(**{n: known[n] for n in names if n in known})
    if isinstance(result, keras.Model):
        made = _of_model(result, mode)
    elif isinstance(result, EstimatorSpec):
        made = _of_spec(result, mode)
    else:
        raise ValueError(
            "model_fn should return an EstimatorSpec, or a compiled "
            f"keras.Model. Received: {shown(result)} of type "
            f"{type(result).__name__}. Return "
            "`ks.estimator.EstimatorSpec(mode, model=model, ...)`."
        )
    if mode != ModeKeys.PREDICT:
        _check_labels(made.model, labels)
        _check_new(made.model)
    return made


def _with_defaults(function: Callable[..., Any]) -> set[str]:
    """Names of arguments that need not be given."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.default is not p.empty}


def _check_new(model: keras.Model) -> None:
    """Raises ValueError for a model that was not made for the strategy."""
    strategy = entered_strategy()
    binding = binding_of(model)
    owner = None if binding is None else binding.owner
    if strategy is not None and owner is not strategy:
        raise ValueError(
            "model_fn makes a new model whenever it is called. Received: "
            f"{model.name!r}, which was compiled before. Make and compile it "
            "in model_fn; for a model that is there already use "
            "`ks.estimator.model_to_estimator`."
        )


def _check_labels(model: keras.Model, labels: Tree) -> None:
    """Raises ValueError for a loss that has no labels."""
    kind = type(model)
    has_own_steps = (
        kind.train_step is not keras.Model.train_step
        or kind.compute_loss is not keras.Model.compute_loss
    )
    if labels is None and not has_own_steps and getattr(model, "loss", None):
        raise ValueError(
            "A loss is a function of labels and outputs. Received: data "
            f"without labels, and the loss {shown(model.loss)}. Have the "
            "`input_fn` return (features, labels); where features are the "
            "labels as well, (features, features)."
        )


def _of_model(model: keras.Model, mode: str) -> Made:
    if mode != ModeKeys.PREDICT and not model.compiled:
        raise ValueError(
            "A model that model_fn returns is compiled. Received: "
            f"{model.name!r}, which is not, for mode={mode!r}. Call "
            "`model.compile(optimizer, loss, metrics)`, or return an "
            "EstimatorSpec."
        )
    return Made(model=model, outputs=model, predictions=_named_outputs(model))


def _of_spec(spec: EstimatorSpec, mode: str) -> Made:
    if spec.mode != mode:
        raise ValueError(
            "An EstimatorSpec is of the mode that model_fn is called for. "
            f"Received: mode={spec.mode!r}, called for {mode!r}. Pass on "
            "`mode`."
        )
    model = spec.model
    assert model is not None  # An EstimatorSpec is checked.
    if mode != ModeKeys.PREDICT and not model.compiled:
        metrics = spec.eval_metric_ops if mode == ModeKeys.EVAL else None
        _check_metrics(spec)
        model.compile(
            # Evaluation uses none.
            optimizer=spec.train_op or "sgd",
            loss=spec.loss,
            metrics=[_named(n, m) for n, m in (metrics or {}).items()] or None,
        )
    hooks = {
        ModeKeys.TRAIN: spec.training_hooks,
        ModeKeys.EVAL: spec.evaluation_hooks,
        ModeKeys.PREDICT: spec.prediction_hooks,
    }[mode]
    outputs, predictions = model, _named_outputs(model)
    if mode == ModeKeys.PREDICT:
        outputs, predictions = _predictions(model, spec.predictions)
    return Made(
        model=model,
        outputs=outputs,
        predictions=predictions,
        chief_hooks=tuple(spec.training_chief_hooks or ()),
        hooks=tuple(hooks or ()),
    )


def _named(name: str, metric: object) -> keras.metrics.Metric | str:
    """A metric whose result has a name."""
    if isinstance(metric, str):
        if metric == name:
            return metric
        metric = keras.metrics.get(metric)
    if not isinstance(metric, keras.metrics.Metric):
        return keras.metrics.MeanMetricWrapper(metric, name=name)
    # It stays what it is: its configuration may leave out arguments.
    metric.name = name
    return metric


def _check_metrics(spec: EstimatorSpec) -> None:
    """Raises ValueError for metrics that would be of another output or name."""
    metrics = spec.eval_metric_ops or {}
    outputs = getattr(spec.model, "outputs", None) or []
    if metrics and len(outputs) > 1:
        raise ValueError(
            "eval_metric_ops are of a model with one output. Received: "
            f"{sorted(metrics)} for a model with {len(outputs)}. Say which "
            "metric is of which output: `model.compile(optimizer, loss, "
            "metrics={'output': [...]})`, and leave loss, train_op and "
            "eval_metric_ops out."
        )
    kind = keras.metrics.Metric
    objects = [id(m) for m in metrics.values() if isinstance(m, kind)]
    if len(set(objects)) < len(objects):
        raise ValueError(
            "A metric of eval_metric_ops has one name. Received: the same "
            f"object twice in {sorted(metrics)}. Make one for each name."
        )


def _predictions(
    model: keras.Model, wanted: Tree
) -> tuple[keras.Model, Callable[[Tree], Tree]]:
    """The model to run, and what its outputs become."""
    leaves = keras.tree.flatten(wanted)
    symbols = [isinstance(leaf, keras.KerasTensor) for leaf in leaves]
    if all(symbols):
        return keras.Model(model.inputs, wanted), lambda outputs: outputs
    if any(symbols):
        raise ValueError(
            "predictions are symbolic tensors, or they are names and "
            "functions. Received: some of both. Use `keras.ops` on the "
            "model's tensors for all of them."
        )
    entry = functools.partial(_entry, model)
    if isinstance(wanted, str):
        return model, lambda outputs: entry(outputs, wanted)
    if isinstance(wanted, list | tuple):
        return model, lambda outputs: {
            name: entry(outputs, name) for name in wanted
        }
    if isinstance(wanted, Mapping):

        def chosen(outputs: Tree) -> dict[str, Any]:
            return {
                name: part(outputs)
                if callable(part)
                else outputs
                if part is None
                else entry(outputs, part)
                for name, part in wanted.items()
            }

        return model, chosen
    return model, wanted


def _named_outputs(model: keras.Model) -> Callable[[Tree], Tree]:
    """From a list of outputs to a dict by their names."""

    def named(outputs: Tree) -> Tree:
        if not isinstance(outputs, list | tuple):
            return outputs
        names = _output_names(model, len(outputs))
        return dict(zip(names, outputs, strict=True))

    return named


def output_names(model: keras.Model) -> list[str]:
    """The names of a model's outputs; none where they are not known."""
    if isinstance(model, keras.Sequential):
        # Its one output has its last layer's name, as in a functional model.
        return [layer.name for layer in model.layers[-1:]]
    return list(getattr(model, "output_names", None) or [])


def _output_names(model: keras.Model, count: int) -> list[str]:
    names = output_names(model)
    if len(names) == count:
        return names
    return [f"output_{index}" for index in range(count)]


def _entry(model: keras.Model, outputs: Tree, name: str) -> Array:
    """The output of a name."""
    named = _named_outputs(model)(outputs)
    if not isinstance(named, Mapping):
        named = {_output_names(model, 1)[0]: named}
    if name not in named:
        raise ValueError(
            f"predictions name outputs of the model. Received: {name!r}; the "
            f"model has {sorted(map(str, named))}. Give one of these."
        )
    return named[name]

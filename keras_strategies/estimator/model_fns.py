"""Calling a `model_fn`, and what comes of what it returns."""

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any

import keras

from keras_strategies.cluster.addresses import shown
from keras_strategies.estimator.arguments import names_of_arguments
from keras_strategies.estimator.estimator_spec import EstimatorSpec, ModeKeys
from keras_strategies.estimator.run_config import RunConfig

Tree = Any
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


def check_model_fn(model_fn: Any, params: Any) -> None:
    """Raises unless a function can be called as a `model_fn`.

    Raises:
      ValueError: there is none, it has other arguments, or it has none for
        the parameters that are given.
      TypeError: it cannot be called.
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
        return _of_model(result, mode)
    if isinstance(result, EstimatorSpec):
        return _of_spec(result, mode)
    raise ValueError(
        "model_fn should return an EstimatorSpec, or a compiled keras.Model. "
        f"Received: {shown(result)} of type {type(result).__name__}. Return "
        "`ks.estimator.EstimatorSpec(mode, model=model, ...)`."
    )


def _with_defaults(function: Callable[..., Any]) -> set[str]:
    """Names of arguments that need not be given."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.default is not p.empty}


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


def _named(name: str, metric: Any) -> Any:
    """A metric whose result has a name."""
    if isinstance(metric, str):
        if metric == name:
            return metric
        metric = keras.metrics.get(metric)
    if not isinstance(metric, keras.metrics.Metric):
        return keras.metrics.MeanMetricWrapper(metric, name=name)
    if metric.name == name:
        return metric
    try:
        return type(metric).from_config(metric.get_config() | {"name": name})
    except (TypeError, ValueError) as error:
        raise ValueError(
            "A key of eval_metric_ops names the metric's result. Received: "
            f"{name!r} for a {type(metric).__name__} with the name "
            f"{metric.name!r}, of which no other can be made ({error}). Make "
            f"it with `name={name!r}`."
        ) from None


def _predictions(
    model: keras.Model, wanted: Any
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


def _output_names(model: keras.Model, count: int) -> list[str]:
    names = getattr(model, "output_names", None) or []
    if len(names) == count:
        return list(names)
    return [f"output_{index}" for index in range(count)]


def _entry(model: keras.Model, outputs: Tree, name: str) -> Any:
    """The output of a name."""
    named = _named_outputs(model)(outputs)
    if not isinstance(named, Mapping):
        named = {_output_names(model, 1)[0]: named}
    if name not in named:
        raise ValueError(
            "predictions name outputs of the model. Received: "
            f"{name!r}; the model has {sorted(map(str, named))}. Give one of "
            "these."
        )
    return named[name]

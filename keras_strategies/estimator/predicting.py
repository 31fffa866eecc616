"""Predictions a batch at a time."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from keras_strategies._types import Array, Tree
from keras_strategies.cluster.addresses import shown
from keras_strategies.estimator.inputs import Input
from keras_strategies.estimator.model_fns import Made
from keras_strategies.keras_bridge.loops.scope_hooks import is_built
from keras_strategies.strategy.strategy import Strategy


def checked_keys(keys: Iterable[str] | str | None) -> tuple[str, ...] | None:
    """The names of predictions; None for all.

    Raises:
      TypeError: they are no strings.
    """
    if keys is None:
        return None
    is_many = isinstance(keys, Iterable) and not isinstance(keys, str)
    found: tuple[Any, ...] = tuple(keys) if is_many else (keys,)
    if not all(isinstance(key, str) for key in found):
        raise TypeError(
            "`predict_keys` are names of predictions. Received: "
            f"{shown(keys)}. Give a str or a list of them, or None for all."
        )
    return found or None


def batches_of(
    made: Made, data: Input, strategy: Strategy, callbacks: list[Any]
) -> Iterator[Tree]:
    """The model's outputs for one batch after the other, as numpy arrays.

    On several processes, which predict together, all are computed first.

    Args:
      made: The model.
      data: The data.
      strategy: The model's strategy.
      callbacks: Keras callbacks; called as `predict` calls them.
    """
    model = made.outputs
    if strategy.mesh.num_processes > 1:
        arguments = data.arguments()
        arguments = {k: arguments[k] for k in arguments if k in _OF_PREDICT}
        yield model.predict(**arguments, verbose=0, callbacks=callbacks)
        return
    listeners = keras.callbacks.CallbackList(callbacks, model=model)
    has_begun = False
    model.stop_predicting = False
    for index, batch in enumerate(data.batches()):
        if not has_begun:
            if not is_built(model):
                model.predict_on_batch(batch)
            listeners.on_predict_begin()
            has_begun = True
        listeners.on_predict_batch_begin(index)
        outputs = model.predict_on_batch(batch)
        outputs = keras.tree.map_structure(np.asarray, outputs)
        listeners.on_predict_batch_end(index, {"outputs": outputs})
        yield outputs
        if model.stop_predicting:
            break
    if has_begun:
        listeners.on_predict_end()


_OF_PREDICT = ("x", "batch_size")


def with_keys(predictions: Tree, keys: tuple[str, ...] | None) -> Tree:
    """Predictions of some names alone.

    Raises:
      ValueError: they are no dict, or it has none of these names.
    """
    if keys is None:
        return predictions
    if not isinstance(predictions, Mapping):
        raise ValueError(
            "predict_keys argument is not valid in case of non-dict "
            f"predictions. Received: predict_keys={keys}. Have `predictions` "
            "of the EstimatorSpec name them, or leave `predict_keys` out."
        )
    chosen = {name: predictions[name] for name in predictions if name in keys}
    if not chosen:
        raise ValueError(
            "Expected to run at least one output from "
            f"{sorted(map(str, predictions))}. Received: predict_keys={keys}. "
            "Give some of these."
        )
    return chosen


def rows_of(predictions: Tree) -> Iterator[Tree]:
    """The predictions of one row after the other.

    Raises:
      ValueError: entries have other numbers of rows, or have no rows.
    """
    if isinstance(predictions, tuple) or not np.iterable(predictions):
        raise ValueError(
            "Predictions of rows are an array or a dict of arrays. Received: "
            f"{shown(predictions)} of type {type(predictions).__name__}. Have "
            "`predictions` of the EstimatorSpec name them in a dict, or pass "
            "`yield_single_examples=False` for whole batches."
        )
    if not isinstance(predictions, Mapping):
        yield from predictions
        return
    lengths = {name: _num_rows(v) for name, v in predictions.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            "Batch length of predictions should be same. Received: "
            f"{lengths}. Pass `yield_single_examples=False` for whole batches."
        )
    for index in range(next(iter(lengths.values()), 0)):
        yield {name: value[index] for name, value in predictions.items()}


def _num_rows(value: Array) -> int:
    return np.shape(value)[0] if np.ndim(value) else 0

"""Computes predictions and yields them in batches or row by row."""

from collections.abc import Iterator, Mapping
from typing import Any

import keras
import numpy as np

from keras_strategies._types import Tree
from keras_strategies.estimator.inputs import DEFAULT_BATCH_SIZE, Input
from keras_strategies.estimator.model_fns import ModelBundle
from keras_strategies.estimator.seam import (
    Strategy,
    is_built,
    shorten,
)


def iter_batches(
    bundle: ModelBundle, data: Input, strategy: Strategy, callbacks: list[Any]
) -> Iterator[Tree]:
    """Yields the model's outputs batch by batch, as NumPy arrays.

    If there are several processes, all of them must call this function. In that
    case all rows are predicted first, and then yielded as one batch.

    Args:
      bundle: The model, as returned by its `model_fn`.
      data: The data to predict for.
      strategy: The model's strategy.
      callbacks: Keras callbacks, called as in `keras.Model.predict`.
    """
    model = bundle.outputs
    if strategy.mesh.num_processes > 1:
        size = None if data.is_dataset else DEFAULT_BATCH_SIZE
        yield model.predict(data.x, size, verbose=0, callbacks=callbacks)
        return
    listeners = keras.callbacks.CallbackList(callbacks, model=model)
    has_begun = False
    model.stop_predicting = False
    for index, batch in enumerate(data.iter_batches()):
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


def select_keys(predictions: Tree, keys: tuple[str, ...]) -> Tree:
    """Returns only the predictions with the given names, or all without names.

    Raises:
      ValueError: if the predictions are not a dict, or contain none of the
        names.
    """
    if not keys:
        return predictions
    if not isinstance(predictions, Mapping):
        raise ValueError(
            "`predict_keys` cannot be used with non-dict predictions. "
            f"Received: predict_keys={keys}. Omit `predict_keys`, or set "
            "`predictions` of the EstimatorSpec to a dict."
        )
    chosen = {name: predictions[name] for name in predictions if name in keys}
    if not chosen:
        raise ValueError(
            "`predict_keys` must contain at least one output from "
            f"{sorted(map(str, predictions))}. Received: predict_keys={keys}. "
            "Use one or more of these names."
        )
    return chosen


def iter_rows(predictions: Tree) -> Iterator[Tree]:
    """Yields the predictions row by row.

    Raises:
      ValueError: if the predictions are neither an array nor a dict of arrays,
        or if the arrays have different numbers of rows.
    """
    if isinstance(predictions, tuple) or not np.iterable(predictions):
        raise ValueError(
            "Predictions must be an array or a dict of arrays to be split "
            f"into rows. Received: {shorten(predictions)} of type "
            f"{type(predictions).__name__}. Return a dict, or pass "
            "`yield_single_examples=False` to get whole batches."
        )
    if not isinstance(predictions, Mapping):
        yield from predictions
        return
    lengths = {n: len(v) if np.ndim(v) else 0 for n, v in predictions.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(
            "All predictions must have the same number of rows to be split "
            f"into rows. Received: the numbers of rows {lengths}. Pass "
            "`yield_single_examples=False` to get whole batches."
        )
    for index in range(next(iter(lengths.values()), 0)):
        yield {name: value[index] for name, value in predictions.items()}

"""Calls of a planned script that use a model's values before it trains.

A plan needs no values. A script may still read initial values, for example to
copy weights from one model to another. So variables get values when they are
read, and `predict` and `evaluate` run on this machine with their first batch.
"""

import contextlib
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies._types import Tree
from keras_strategies.planning.capture.captured_data import (
    CapturedData,
    read_first_batch,
)
from keras_strategies.planning.capture.errors import PlanError
from keras_strategies.planning.seam import (
    Binding,
    Call,
    ReplicaMesh,
    ValueStore,
    describe,
    distribution_scope,
    num_rows,
    storing_values,
    temporary_attribute,
)

EARLY_CALLS = ("evaluate", "predict", "test_on_batch", "predict_on_batch")
"""The methods of a model that a script may call before it trains."""

_MAX_BYTES = 2**31


def values_on_read() -> contextlib.AbstractContextManager[None]:
    """Gives variables values when the script reads them, while a block runs."""
    return storing_values(ValueStore(_MAX_BYTES, _refuse))


def run_early_call(binding: Binding, call: Call, host: ReplicaMesh) -> Any:
    """Runs one of `EARLY_CALLS` on this machine.

    `evaluate` and `predict` use the first batch of their data; `predict`
    repeats its outputs until there is one for each row.

    Args:
      binding: The model's binding.
      call: The call.
      host: A mesh of one CPU device, on which the data are read.

    Returns:
      What Keras's method returns.
    """
    if call.name.endswith("_on_batch"):
        return _run_by_keras(binding, call)
    batch, rows = _read_batch(call, host)
    x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
    call.set(x=x, y=y, sample_weight=weight, batch_size=num_rows(x))
    call.set(steps=None, callbacks=None)
    result = _run_by_keras(binding, call)
    if call.name == "evaluate":
        return result
    return jax.tree.map(lambda leaf: _repeat(leaf, rows), result)


def _run_by_keras(binding: Binding, call: Call) -> Any:
    is_prediction = call.name.startswith("predict")
    names = ("x",) if is_prediction else ("x", "y", "sample_weight")
    binding.build_for_shapes(tuple(call[name] for name in names))
    with (
        distribution_scope(None),
        # It would raise in the strategy's scope: the devices are absent.
        temporary_attribute(binding, "check_context", lambda: None),
    ):
        return call.run()


def _read_batch(call: Call, host: ReplicaMesh) -> tuple[Tree, int]:
    """Returns the first batch of a call's data, and the number of its rows."""
    batch, number = read_first_batch(call, host)
    rows = num_rows(batch) * (number or 1)
    if isinstance(call["x"], CapturedData):
        return jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), batch), rows
    lengths = [
        len(x) for x in keras.tree.flatten(call["x"]) if hasattr(x, "ndim")
    ]
    return batch, min([rows, *lengths])


def _repeat(array: np.ndarray, rows: int) -> np.ndarray:
    return np.take(array, np.arange(rows) % len(array), axis=0)


def _refuse(variable: keras.Variable) -> PlanError:
    return PlanError(
        "The values of variables that a planned script reads before its first "
        f"`fit` or `run` must take at most {_MAX_BYTES / 1e9:.1f} GB in total. "
        f"Received: a read of {describe(variable)}, which exceeds this limit. "
        "A plan needs no values: make the script skip this read, for example "
        "if a flag is passed."
    )

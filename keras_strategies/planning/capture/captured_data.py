"""Data of a planned script, and calls that use values before it trains.

Distributed datasets yield shapes, not arrays. A plan needs no values, but a
script may read initial values, for example to copy weights from one model to
another. So variables get values when they are read, and `predict` and
`evaluate` run on this machine with their first batch.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies._types import Array, Batch, Tree
from keras_strategies.planning.capture.errors import PlanError
from keras_strategies.planning.compile.step import with_rows
from keras_strategies.planning.seam import (
    Binding,
    Call,
    ReplicaMesh,
    Source,
    ValueStore,
    describe,
    distributed,
    distribution_scope,
    get_shape,
    make_feed,
    num_rows,
    storing_values,
    temporary_attribute,
    values,
)

_DATA = ("x", "y", "sample_weight", "class_weight", "batch_size", "shuffle")


class CapturedData(distributed.DistributedDataset):
    """A distributed dataset that yields shapes in place of arrays.

    Args:
      source: The source of the batches.
      host: A mesh of one CPU device, on which the batches are read.
      mesh: The replicas of the planned slice, among which batches are divided.
      factor: The number of batches from `source` that form one global batch.
    """

    def __init__(
        self, source: Source, host: ReplicaMesh, mesh: ReplicaMesh, factor: int
    ) -> None:
        super().__init__(source, host)
        self._replicas, self._factor = mesh, factor

    def iterator(self, epoch: int, start: int = 0) -> "_ShapeIterator":
        """Returns an iterator over batches that contain shapes, not values."""
        return _ShapeIterator(super().iterator(epoch, start), self._stand_in)

    def first_shapes(self) -> Batch:
        """Returns the shapes of the first batch.

        Returns:
          A `jax.ShapeDtypeStruct` for each array of the global batch.
        """
        batch = next(super().iterator(self.source.passes.next))
        return times_rows(batch, self._factor)

    def _stand_in(self, leaf: Array) -> values.PerReplica:
        shape, mesh = times_rows(leaf, self._factor), self._replicas
        replicas = mesh.num_replicas
        # The number of rows is rounded up to a multiple of the number of
        # replicas, because programs are compiled for such numbers.
        rows = max(-(-shape.shape[0] // replicas), 1) * replicas
        array = jax.ShapeDtypeStruct(
            (rows, *shape.shape[1:]), shape.dtype, sharding=mesh.split
        )
        return values.PerReplica.of(array, values.ROWS)


class _ShapeIterator(distributed.DistributedIterator):
    """An iterator that yields the shapes of another iterator's batches."""

    def __init__(
        self,
        batches: distributed.DistributedIterator,
        stand_in: Callable[[Any], Any],
    ) -> None:
        super().__init__(batches._steps, *batches._place)
        self._stand_in = stand_in

    def __next__(self) -> Batch:
        return jax.tree.map(self._stand_in, super().__next__())


def read_first_batch(call: Call, host: ReplicaMesh) -> tuple[Any, int | None]:
    """Reads the first batch of a call of `fit`, `evaluate` or `predict`.

    Args:
      call: The call.
      host: A mesh of one CPU device.

    Returns:
      The batch (for `CapturedData` its shapes), and the number of batches of
      the call or of an epoch; None if it is unknown.
    """
    steps = call["steps_per_epoch" if call.name == "fit" else "steps"]
    if isinstance(call["x"], CapturedData):
        return call["x"].first_shapes(), steps or call["x"].source.num_batches
    data = {name: call[name] for name in _DATA}
    feed = make_feed(host, **data, steps_per_epoch=steps, name=call.name)
    return next(iter(feed.get_numpy_iterator())), steps or feed.num_batches


def times_rows(batch: Batch, factor: int) -> Batch:
    """Returns a batch's shapes, with its row count multiplied by `factor`."""
    return jax.tree.map(
        lambda leaf: with_rows(leaf, get_shape(leaf).shape[0] * factor), batch
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
    places = np.arange(rows)
    return jax.tree.map(
        lambda leaf: np.take(leaf, places % len(leaf), axis=0), result
    )


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


def _refuse(variable: keras.Variable) -> PlanError:
    return PlanError(
        "The values of variables that a planned script reads before its first "
        f"`fit` or `run` must take at most {_MAX_BYTES / 1e9:.1f} GB in total. "
        f"Received: a read of {describe(variable)}, which exceeds this limit. "
        "A plan needs no values: make the script skip this read, for example "
        "if a flag is passed."
    )

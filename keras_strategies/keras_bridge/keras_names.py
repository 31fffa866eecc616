"""Private Keras names that differ between versions, and names of objects.

Each name is chosen by looking at the attributes of the installed Keras, never
at its version. tests/contract/test_keras_names.py checks the names for both
versions.
"""

import collections
import contextlib
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import jax
import keras
import numpy as np
from keras.src.backend import jax as jax_backend
from keras.src.backend.common import global_state
from keras.src.trainers import trainer as trainer_lib
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

from keras_strategies._types import Batch
from keras_strategies.data.shuffled_orders import (
    BatchOrder,
    NumberedBatchOrder,
    NumberedRowOrder,
    RowOrder,
)

TRAINER: Any = (
    getattr(trainer_lib, "BaseTrainer", None) or vars(trainer_lib)["Trainer"]
)
"""The class that defines `compile`: `Trainer` in Keras 3.15, `BaseTrainer` in
3.16."""

NN: Any = getattr(jax_backend, "nn", None) or vars(jax_backend)["ops"].nn
"""The backend module that defines `dot_product_attention`: `nn` in Keras 3.15,
`ops.nn` in 3.16."""

CORE: Any = getattr(jax_backend, "core", None) or vars(jax_backend)["ops"]
"""The backend module whose `remat` Keras calls: `core` in Keras 3.15, `ops` in
3.16."""

MAYBE_BUILD = "_maybe_symbolic_build"
BUILDS_FIRST = hasattr(keras.Model, MAYBE_BUILD)
"""Whether fit and evaluate call `_maybe_symbolic_build` (Keras 3.16). It reads
a batch of the data if the model, its loss, its metrics or its optimizer are not
built yet."""

ORDERS_ARE_NUMBERED = "_epoch" in vars(ArrayDataAdapter(np.zeros((1, 1))))
"""Whether Keras computes shuffle orders from the epoch's number (Keras 3.16)
instead of from the global random generators (3.15). The first epoch of a fit
has the number 1."""

ROW_ORDER: Any = NumberedRowOrder if ORDERS_ARE_NUMBERED else RowOrder
"""The class that computes the shuffle orders for the rows of arrays."""

BATCH_ORDER: Any = NumberedBatchOrder if ORDERS_ARE_NUMBERED else BatchOrder
"""The class that computes the shuffle orders for a PyDataset's batches."""

_PARTIAL: Any = getattr(data_adapter_utils, "PartialBatchList", None)
SUPER_BATCHES = _PARTIAL is not None
"""Whether Keras's iterators stack `steps_per_execution` batches (Keras 3.16).
Keras's trainer then scans over the stacked batches on the device."""


def take_execution(
    iterator: Iterator[Any], first: Batch, num_steps: int
) -> list[Any]:
    """Returns the batches of one execution of Keras's `fit`, as a list.

    An execution is one call of a program that computes up to
    `steps_per_execution` steps.

    Args:
      iterator: Keras's iterator over the data.
      first: The first item of the execution, which was already read from the
        iterator. In Keras 3.16 it may contain all batches of the execution.
      num_steps: Number of batches in an execution.
    """
    if num_steps == 1:
        return [first]
    if not SUPER_BATCHES:
        return list(chain([first], islice(iterator, num_steps - 1)))
    if isinstance(first, _PARTIAL):
        return list(first)
    stacked = jax.tree.map(np.asarray, first)
    count = len(jax.tree.leaves(stacked)[0])
    return [jax.tree.map(lambda a, k=k: a[k], stacked) for k in range(count)]


_COUNTS = "object_name_uids"


@contextlib.contextmanager
def fresh_names() -> Iterator[None]:
    """Restarts Keras's numbering of unnamed objects while the block runs.

    Otherwise a function that creates a model would give its layers different
    names each time it is called.
    """
    with restore_names():
        global_state.set_global_attribute(_COUNTS, collections.defaultdict(int))
        yield


@contextlib.contextmanager
def restore_names() -> Iterator[None]:
    """Restores Keras's counts of automatic names when the block ends."""
    before = global_state.get_global_attribute(_COUNTS)
    if before is not None:
        before = before.copy()
    try:
        yield
    finally:
        global_state.set_global_attribute(_COUNTS, before)

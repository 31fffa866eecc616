"""The data arguments of `fit`, `evaluate` and `predict`, and their parts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from keras_strategies._types import Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopData:
    """The data that a loop was given: arguments of Keras's `get_data_adapter`.

    Attributes:
      x: Inputs: a nest of arrays, or a dataset of batches.
      y: Targets, beside arrays.
      sample_weight: A weight for each row, beside arrays.
      class_weight: Weights by class, given to the rows of each.
      batch_size: Rows of a global batch, of arrays.
      shuffle: Whether rows of arrays are put in another order each epoch.
      steps_per_epoch: Steps of an epoch; None for a whole pass.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    class_weight: Any = None
    batch_size: int | None = None
    shuffle: Any = False
    steps_per_epoch: int | None = None


class FeedAdapter(DataAdapter):
    """An adapter of Keras whose steps are all that Keras need know."""

    @property
    def has_partial_batch(self) -> bool | None:
        """Whether the last batch is shorter, if known."""
        return None

    @property
    def partial_batch_size(self) -> int | None:
        """Rows of the shorter last batch, if any."""
        return None


def batch_weights(
    y: Tree, sample_weight: Tree, class_weight: Mapping[int, float] | None
) -> Tree:
    """The sample weights of `train_on_batch`, with its class weights.

    Returns:
      Weights of shape (rows,), a nest of them, or None.
    """
    if class_weight is None:
        return sample_weight
    if sample_weight is not None:
        raise ValueError(
            "Arguments `sample_weight` and `class_weight` cannot be given "
            "together. Received both. Multiply the class weights into "
            "`sample_weight`."
        )
    return data_adapter_utils.class_weight_to_sample_weights(y, class_weight)


def hold_out(call: Any) -> None:
    """Splits off the last rows for validation, where a call of fit says so.

    Args:
      call: Its arguments by name, and `set`.

    Raises:
      ValueError: its `validation_split` is no fraction.
    """
    fraction = call["validation_split"]
    if fraction and not 0 < fraction < 1:
        raise ValueError(
            "`validation_split` is the fraction of rows held out for "
            f"validation, in [0, 1). Received: validation_split={fraction!r}. "
            "Pass 0.2 for a fifth of them."
        )
    if fraction and call["validation_data"] is None:
        data = call["x"], call["y"], call["sample_weight"]
        parts: Any = array_slicing.train_validation_split(data, fraction)
        (x, y, weight), held_out = parts
        call.set(x=x, y=y, sample_weight=weight)
        call.set(validation_data=held_out, validation_split=0.0)

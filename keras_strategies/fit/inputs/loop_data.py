"""The data arguments of `fit`, `evaluate` and `predict`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from keras_strategies._types import Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopData:
    """The data passed to `fit`, `evaluate` or `predict`.

    Attributes:
      x: The inputs: a nest of arrays, or a dataset of batches.
      y: The targets, if `x` is a nest of arrays.
      sample_weight: A weight for each row, if `x` is a nest of arrays.
      class_weight: Maps a class to the weight of the rows of that class.
      batch_size: The number of rows of a global batch, if `x` is a nest of
        arrays.
      shuffle: Whether to shuffle the rows of arrays in each epoch.
      steps_per_epoch: The number of steps in an epoch. None if an epoch is a
        full pass over the data.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    class_weight: Any = None
    batch_size: int | None = None
    shuffle: Any = False
    steps_per_epoch: int | None = None


class FeedAdapter(DataAdapter):
    """A Keras data adapter that does not report a shorter last batch."""

    @property
    def has_partial_batch(self) -> bool | None:
        """Whether the last batch is shorter: always None, for unknown."""
        return None

    @property
    def partial_batch_size(self) -> int | None:
        """Number of rows in a shorter last batch: always None, for unknown."""
        return None


def compute_batch_weights(
    y: Tree, sample_weight: Tree, class_weight: Mapping[int, float] | None
) -> Tree:
    """Computes the sample weights of `train_on_batch` from class weights.

    Returns:
      Weights of shape (rows,), or a nest of such arrays. Without class weights,
      the unchanged `sample_weight`, which may be None.
    """
    if class_weight is None:
        return sample_weight
    if sample_weight is not None:
        raise ValueError(
            "Arguments `sample_weight` and `class_weight` cannot be passed "
            "together. Multiply `sample_weight` by the class "
            "weights, and pass only the product as `sample_weight`."
        )
    return data_adapter_utils.class_weight_to_sample_weights(y, class_weight)


def split_validation(call: Any) -> None:
    """Splits off the last rows for validation, if fit has `validation_split`.

    Args:
      call: The `Call` of `fit`. Its data and `validation_data` are replaced.

    Raises:
      ValueError: if `validation_split` is not in [0, 1).
    """
    fraction = call["validation_split"]
    if fraction and not 0 < fraction < 1:
        raise ValueError(
            "`validation_split` must be a fraction of the rows, in [0, 1). "
            f"Received: validation_split={fraction!r}. Pass for example 0.2 to "
            "validate on a fifth of the rows."
        )
    if fraction and call["validation_data"] is None:
        data = call["x"], call["y"], call["sample_weight"]
        parts: Any = array_slicing.train_validation_split(data, fraction)
        (x, y, weight), held_out = parts
        call.set(x=x, y=y, sample_weight=weight)
        call.set(validation_data=held_out, validation_split=0.0)

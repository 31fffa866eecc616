"""Partitioners, which choose the variables and dimensions to shard.

References:
  - Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models (2020): https://arxiv.org/abs/1910.02054
  - Zhao et al., PyTorch FSDP (2023), on groups that each store all shards:
    https://arxiv.org/abs/2304.11277
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras

from keras_strategies.cluster.checks import check_number

MIN_SIZE = 2**14
"""The default `min_size`: variables with fewer entries are not sharded."""

Dimension = int | None


@dataclasses.dataclass(frozen=True)
class FullySharded:
    """A partitioner that shards weights, their gradients and slots.

    Pass it as the `variable_partitioner` of a strategy. This is ZeRO-3, or
    fully sharded data parallelism. A step gathers a weight where a layer reads
    it. Results equal those with replicated variables. A variable is sharded
    along the first dimension whose size is a multiple of `shards` and that no
    `layout_map` shards over a replica's cores.

    Args:
      shards: The number of replicas in a group. Consecutive replicas form a
        group. Each group stores all variables, and each of its replicas stores
        one shard of each. With None, the replicas of a process form a group,
        because they are close to each other. If each process has only one
        replica, all replicas form a group. On TPUs, the replicas of a slice
        form a group or, in a large slice, the replicas of a box of at most 64
        chips. A 3-D slice of 64 devices or more is split in any case.
      min_size: The smallest number of entries of a sharded variable; smaller
        variables are replicated.
      reduce_dtype: The float dtype in which gradients of sharded variables are
        sent and summed. "bfloat16" halves the bytes, but sums are rounded to
        its 8 significant bits. None for the dtype of the gradients.

    Raises:
      TypeError, ValueError: if `shards` or `min_size` is not an integer of at
        least 1, or `reduce_dtype` is not a float dtype.

    Example:
      ```python
      strategy = ks.MirroredStrategy(
          variable_partitioner=ks.experimental.FullySharded()
      )
      ```

    References:
      https://arxiv.org/abs/1910.02054 (ZeRO)
    """

    shards: int | None = None
    min_size: int = MIN_SIZE
    reduce_dtype: str | None = None

    def __post_init__(self) -> None:
        cure = "Leave it out to shard over all replicas of a process."
        check_number("shards", self.shards, cure, least=1)
        cure = "Pass 1 to shard every variable that can be sharded."
        check_number(
            "min_size", self.min_size, cure, least=1, is_optional=False
        )
        if self.reduce_dtype is not None:
            _check_float(self.reduce_dtype)


@dataclasses.dataclass(frozen=True)
class SlotsOnly(FullySharded):
    """A partitioner that shards gradients and slots; weights are replicated.

    Pass it as the `variable_partitioner` of a strategy. This is ZeRO-2. A step
    gathers each weight once, after the weight's update.

    Args:
      shards: See `FullySharded`.
      min_size: See `FullySharded`.
      reduce_dtype: See `FullySharded`.

    Example:
      ```python
      strategy = ks.MirroredStrategy(
          variable_partitioner=ks.experimental.SlotsOnly()
      )
      ```

    References:
      https://arxiv.org/abs/1910.02054 (ZeRO)
    """


@dataclasses.dataclass(frozen=True)
class Replicated:
    """A partitioner that shards nothing, and sums gradients in a given dtype.

    Pass it as the `variable_partitioner` of a strategy. Without a partitioner,
    gradients are summed in the dtype of the variables, such as float32.

    Args:
      reduce_dtype: The float dtype in which gradients are sent and summed. With
        "bfloat16" half the bytes are sent, and sums are rounded to its 8
        significant bits. Accumulated gradients are added up in float32, and
        rounded when they are sent.

    Raises:
      ValueError: if `reduce_dtype` is not a float dtype.

    Example:
      ```python
      strategy = ks.MirroredStrategy(
          variable_partitioner=ks.experimental.Replicated("bfloat16")
      )
      ```
    """

    reduce_dtype: str

    def __post_init__(self) -> None:
        _check_float(self.reduce_dtype)

    def __call__(
        self, path: str, shape: tuple[int, ...], dtype: str
    ) -> Dimension:
        """Returns None: no variable is sharded."""
        return None


PartitionerLike = FullySharded | Callable[..., Any]
"""The types that strategies accept as `variable_partitioner`."""


def _check_float(reduce_dtype: object) -> None:
    try:
        dtype = keras.backend.standardize_dtype(reduce_dtype)
    except (TypeError, ValueError):
        dtype = None
    if dtype not in ("bfloat16", "float16", "float32", "float64"):
        raise ValueError(
            "`reduce_dtype` must be a float dtype, in which gradients are "
            f"summed. Received: {reduce_dtype!r} of type "
            f"{type(reduce_dtype).__name__}. Pass 'bfloat16', or None to use "
            "the dtype of the gradients."
        )

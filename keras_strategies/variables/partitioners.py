"""Partitioners, which choose the variables and dimensions to shard.

References:
  - Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models (2020): https://arxiv.org/abs/1910.02054
  - Zhao et al., PyTorch FSDP (2023), on groups that each store all shards:
    https://arxiv.org/abs/2304.11277
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_strategies.cluster.checks import check_number
from keras_strategies.spmd.mesh import ReplicaMesh, standardize_reduce_dtype

MIN_SIZE = 2**14
"""The default `min_size`: variables with fewer entries are not sharded."""

Dimension = int | None

_TABLES = ("embeddings", "lora_embeddings_a")
"""Names of matrices whose rows are looked up, in Keras's `Embedding` and in the
classes derived from it."""


@dataclasses.dataclass(frozen=True)
class FullySharded:
    """A partitioner that shards weights, their gradients and slots.

    Pass it as the `variable_partitioner` of a strategy. This is ZeRO-3, or
    fully sharded data parallelism. A step gathers a weight where a layer reads
    it. Results equal those with replicated variables. A variable is sharded
    along the first dimension whose size is a multiple of `shards` and that no
    `layout_map` shards over a replica's cores. A table (a matrix with the name
    `embeddings`) is sharded along the last such dimension instead, so that its
    rows can be looked up without gathering it.

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
      offload: "optimizer" to store optimizer slots and accumulated gradients of
        weights with at least `min_size` entries in the memory of the host. A
        step moves them to the devices and back. None to store them on the
        devices.

    Raises:
      TypeError, ValueError: if `shards` or `min_size` is not an integer of at
        least 1, `reduce_dtype` is not a float dtype, or `offload` is neither
        "optimizer" nor None.

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
    offload: str | None = None

    def __post_init__(self) -> None:
        _check_options(self)
        fix = "Leave it out to shard over all replicas of a process."
        check_number("shards", self.shards, fix, minimum=1)
        fix = "Pass 1 to shard every variable that can be sharded."
        check_number(
            "min_size", self.min_size, fix, minimum=1, is_optional=False
        )


@dataclasses.dataclass(frozen=True)
class SlotsOnly(FullySharded):
    """A partitioner that shards gradients and slots; weights are replicated.

    Pass it as the `variable_partitioner` of a strategy. This is ZeRO-2. A step
    gathers each weight once, after the weight's update.

    Args:
      shards: See `FullySharded`.
      min_size: See `FullySharded`.
      reduce_dtype: See `FullySharded`.
      offload: See `FullySharded`.

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

    Pass it as the `variable_partitioner` of a strategy.

    Args:
      reduce_dtype: The float dtype in which gradients are sent and summed; see
        `FullySharded`. Accumulated gradients are rounded when they are sent.
      offload: "optimizer" to store optimizer slots in the memory of the host,
        a copy for each device; see `FullySharded`.

    Raises:
      ValueError: if `reduce_dtype` is not a float dtype, or `offload` is
        neither "optimizer" nor None.

    Example:
      ```python
      strategy = ks.MirroredStrategy(
          variable_partitioner=ks.experimental.Replicated("bfloat16")
      )
      ```
    """

    reduce_dtype: str | None = None
    offload: str | None = None

    def __post_init__(self) -> None:
        _check_options(self)

    def __call__(
        self, path: str, shape: tuple[int, ...], dtype: str
    ) -> Dimension:
        """Returns None: no variable is sharded."""
        return None


PartitionerLike = FullySharded | Callable[..., Any]
"""The types that strategies accept as `variable_partitioner`."""


class Partitioner:
    """A strategy's `variable_partitioner`, bound to its replicas.

    Args:
      partitioner: A `FullySharded` or `SlotsOnly`; or a function of a path,
        a shape and a dtype.
      mesh: The mesh of the strategy's replicas.

    Attributes:
      original: The argument `partitioner`.
      shards: The number of replicas over which a variable is sharded.
      has_replicated_weights: Whether only gradients and slots are sharded.
      sum_dtype: The dtype in which gradients are summed; None for the dtype of
        the gradients.

    Raises:
      TypeError: if `partitioner` is not a partitioner.
    """

    def __init__(self, partitioner: PartitionerLike, mesh: ReplicaMesh) -> None:
        _check_partitioner(partitioner)
        self.original = partitioner
        self.has_replicated_weights = isinstance(partitioner, SlotsOnly)
        shards = getattr(partitioner, "shards", None)
        is_known = isinstance(partitioner, FullySharded)
        self.sum_dtype = partitioner.reduce_dtype if is_known else None
        own = mesh.replicas_per_process
        default = own if own > 1 else mesh.num_replicas
        # The mesh of the strategy checks that they divide the replicas.
        self.shards = shards or mesh.shards or default

    def choose_dimension(
        self,
        path: str,
        shape: tuple[int, ...],
        dtype: str,
        over_cores: Sequence[str | None] = (),
    ) -> Dimension:
        """Returns the dimension along which to shard a variable, or None.

        Args:
          path: The variable's path.
          shape: Its shape, of any rank.
          dtype: Its dtype.
          over_cores: For each dimension, the mesh axis of cores over which it
            is sharded, or None. Trailing dimensions whose axis is None may be
            omitted.

        Raises:
          TypeError: if the partitioner returned something other than a
            dimension or None.
          ValueError: if the dimension does not exist, is not a multiple of
            the number of shards, or is sharded over a replica's cores.
          Exception: if a user-defined function raises it.
        """
        if self.shards == 1 or not shape:
            return None
        partitioner = self.original
        if isinstance(partitioner, FullySharded):
            if math.prod(shape) < partitioner.min_size:
                return None
            return self._find_dimension(path, shape, over_cores)
        try:
            dim = partitioner(path, shape, dtype)
        except Exception as error:
            error.add_note(
                f"`variable_partitioner` was called for variable {path!r} of "
                f"shape {shape}."
            )
            raise
        if dim is None:
            return None
        self._check_answer(dim, path, shape, over_cores)
        return int(dim)

    @property
    def shards_any(self) -> bool:
        """Whether it may shard any variable."""
        return not isinstance(self.original, Replicated)

    def describe(self) -> str:
        """Returns its name, with the number of shards."""
        return self.name + (f" over {self.shards}" if self.shards_any else "")

    def offloads(self, weight: keras.Variable) -> bool:
        """Returns whether a weight's slots are in the memory of the host."""
        min_size = getattr(self.original, "min_size", MIN_SIZE)
        is_large = math.prod(weight.shape) >= min_size
        return is_large and bool(getattr(self.original, "offload", None))

    @property
    def is_function(self) -> bool:
        """Whether the partitioner is a user-defined function."""
        return not isinstance(self.original, FullySharded | Replicated)

    @property
    def name(self) -> str:
        """The partitioner's name, with its options but without `shards`."""
        return name_partitioner(self.original, omitted="shards")

    def explain_replicated(
        self, shape: tuple[int, ...], over_cores: Sequence[Any] = ()
    ) -> str | None:
        """Returns a word on why a variable is not sharded (docs/sharding.md).

        Args:
          shape: The variable's shape, of any rank.
          over_cores: See `choose_dimension`.

        Returns:
          The reason. None for a scalar, for a variable that is sharded, and if
          a user-defined function chose it.
        """
        partitioner = self.original
        if not shape or not isinstance(partitioner, FullySharded):
            return None
        if math.prod(shape) < partitioner.min_size:
            return "small"
        if self._find_dimension("", shape, over_cores) is None:
            return "indivisible"
        return "weight" if self.has_replicated_weights else None

    def _find_dimension(
        self, path: str, shape: tuple[int, ...], over_cores: Sequence[Any] = ()
    ) -> Dimension:
        """Returns the first dimension that fits; the columns, for a table."""
        free = [
            dim
            for dim in range(len(shape))
            if self._fits(dim, shape, over_cores)
        ]
        is_table = len(shape) == 2 and path.split("/")[-1] in _TABLES
        return next(iter(free[::-1] if is_table else free), None)

    def _fits(
        self, dim: int, shape: tuple[int, ...], over_cores: Sequence[Any]
    ) -> bool:
        is_divisible = shape[dim] > 0 and shape[dim] % self.shards == 0
        return is_divisible and not any(over_cores[dim : dim + 1])

    def _check_answer(
        self,
        dim: Any,
        path: str,
        shape: tuple[int, ...],
        over_cores: Sequence[Any],
    ) -> None:
        if isinstance(dim, bool) or not hasattr(dim, "__index__"):
            raise TypeError(
                "`variable_partitioner` must return the dimension along which "
                f"to shard a variable, or None. Received: {dim!r} of type "
                f"{type(dim).__name__} for variable {path!r}. Return an "
                "integer or None."
            )
        in_range = 0 <= dim < len(shape)
        if not in_range or not self._fits(dim, shape, over_cores):
            raise ValueError(
                "A variable must be sharded along one of its dimensions, whose "
                "size is a multiple of the number of shards, and which no "
                "`layout_map` shards over cores. Received: "
                f"`variable_partitioner` returned {dim!r} for variable "
                f"{path!r} of shape {shape} and axes {tuple(over_cores)} of "
                f"cores, with {self.shards} shards. Return such a dimension, "
                "or None to replicate the variable."
            )


def list_options(partitioner: Any) -> dict[str, Any]:
    """Returns the options of a partitioner that are not the defaults."""
    return {
        field.name: value
        for field in dataclasses.fields(partitioner)
        if (value := getattr(partitioner, field.name)) != field.default
    }


def name_partitioner(partitioner: Any, omitted: str = "") -> str:
    """Returns a partitioner's name with its options, except an omitted one."""
    kind = type(partitioner)
    if not isinstance(partitioner, FullySharded | Replicated):
        return getattr(partitioner, "__name__", kind.__name__)
    options = list_options(partitioner).items()
    given = [f"{name}={v!r}" for name, v in options if name != omitted]
    return f"{kind.__name__}({', '.join(given)})"


def _check_options(partitioner: FullySharded | Replicated) -> None:
    """Checks `offload`, and stores `reduce_dtype` as a standard name."""
    if partitioner.offload not in (None, "optimizer"):
        raise ValueError(
            "`offload` must be 'optimizer' or None. Received: "
            f"{partitioner.offload!r}. Pass 'optimizer' to store optimizer "
            "slots in the memory of the host."
        )
    dtype = standardize_reduce_dtype(partitioner.reduce_dtype)
    object.__setattr__(partitioner, "reduce_dtype", dtype)


def _check_partitioner(partitioner: object) -> None:
    """Raises TypeError unless an object can be a strategy's partitioner."""
    is_known = callable(partitioner) or isinstance(partitioner, FullySharded)
    if isinstance(partitioner, type) or not is_known:
        raise TypeError(
            "`variable_partitioner` must be an object or a function. Received: "
            f"{partitioner!r} of type {type(partitioner).__name__}. Pass a "
            "partitioner with parentheses, such as "
            "`ks.experimental.FullySharded()`, or a function of a variable's "
            "path, shape and dtype that returns a dimension or None."
        )

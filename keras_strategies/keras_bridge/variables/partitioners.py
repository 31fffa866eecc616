"""Partitioners: which variables the replicas divide, and along what.

References:
  - Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models (2020): https://arxiv.org/abs/1910.02054
  - Zhao et al., PyTorch FSDP (2023), on groups that hold copies:
    https://arxiv.org/abs/2304.11277
"""

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.cluster.checks import check_number

MIN_SIZE = 2**14
"""Entries of the smallest variable that is divided, if nothing else is said."""

Dimension = int | None


@dataclasses.dataclass(frozen=True)
class FullySharded:
    """Divides weights, their gradients and the optimizer's slots.

    For `variable_partitioner` of a strategy: ZeRO-3, or fully sharded data
    parallelism. A step gathers a weight where a layer reads it, and the
    numbers are those of whole variables. A variable is divided along its first
    dimension that `shards` divides, and that a `layout_map` does not divide
    over a replica's cores.

    Args:
      shards: How many replicas divide the variables: they are divided in
        groups of so many replicas, which follow each other, and every group
        holds all. None: the replicas of a process, which are close to each
        other, or all where a process has one; on TPUs those of a slice, or of
        a box of 64 chips of a large one.
      min_size: Variables with fewer entries stay whole.
      reduce_dtype: The float dtype in which gradients of divided variables
        travel and are summed, such as "bfloat16": half the bytes, and sums
        that are rounded to its 8 bits. None: the gradients' own.

    Raises:
      TypeError, ValueError: they are no numbers of at least 1, or no float
        dtype.

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
        cure = "Leave it out for all replicas of a process."
        check_number("shards", self.shards, cure, least=1)
        cure = "Pass 1 to divide all that can be divided."
        check_number(
            "min_size", self.min_size, cure, least=1, is_optional=False
        )
        if self.reduce_dtype is not None:
            _check_float(self.reduce_dtype)


@dataclasses.dataclass(frozen=True)
class SlotsOnly(FullySharded):
    """Divides the optimizer's slots and the gradients; weights stay whole.

    For `variable_partitioner` of a strategy: ZeRO-2. A step gathers each
    weight once, when it was updated.

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


PartitionerLike = FullySharded | Callable[..., Any]
"""What strategies take as `variable_partitioner`."""


class Partitioner:
    """A strategy's `variable_partitioner`, for its replicas.

    Args:
      partitioner: `FullySharded`, `SlotsOnly`, or a function: of the path,
        shape and dtype of a variable, or as tf's of `shape` and `dtype`.
      mesh: The strategy's replicas.

    Attributes:
      shards: How many replicas divide a variable.
      has_replicated_weights: Whether slots alone are divided.
      sum_dtype: The dtype in which gradients are summed; None for theirs.

    Raises:
      TypeError: it is no partitioner.
      ValueError: its shards do not divide the replicas.
    """

    def __init__(self, partitioner: PartitionerLike, mesh: ReplicaMesh) -> None:
        _check_partitioner(partitioner)
        self._partitioner = partitioner
        self.has_replicated_weights = isinstance(partitioner, SlotsOnly)
        shards = getattr(partitioner, "shards", None)
        self.sum_dtype: str | None = None
        if isinstance(partitioner, FullySharded):
            self.sum_dtype = partitioner.reduce_dtype
        num_replicas, of_process = mesh.num_replicas, mesh.replicas_per_process
        default = of_process if of_process > 1 else num_replicas
        self.shards = shards or mesh.shards or default
        if num_replicas % self.shards:
            raise ValueError(
                "Shards are divided over groups of equally many replicas. "
                f"Received: shards={self.shards} of {num_replicas} replicas. "
                "Choose a number that divides them."
            )
        self._is_named = not isinstance(partitioner, FullySharded) and (
            _is_of_tf(partitioner)
        )

    def dimension(
        self,
        path: str,
        shape: tuple[int, ...],
        dtype: str,
        over_cores: Sequence[str | None] = (),
    ) -> Dimension:
        """The dimension of a variable that is divided; None: whole.

        Args:
          path: The variable's path.
          shape: Its shape, of any rank.
          dtype: Its dtype.
          over_cores: For each dimension (or for the first ones) the axis of a
            replica's cores that divide it, or None.

        Raises:
          TypeError: the partitioner returned something else.
          Exception: what a function of the caller's raises.
          ValueError: a dimension that is not there, that the shards do not
            divide, or that a replica's cores divide.
        """
        if self.shards == 1 or not shape:
            return None
        partitioner = self._partitioner
        if isinstance(partitioner, FullySharded):
            if math.prod(shape) < partitioner.min_size:
                return None
            return self._first(shape, over_cores)
        try:
            if self._is_named:
                answer = partitioner(shape=shape, dtype=dtype)
            else:
                answer = partitioner(path, shape, dtype)
        except Exception as error:
            error.add_note(
                f"`variable_partitioner` was asked about variable {path!r} of "
                f"shape {shape}."
            )
            raise
        dim = self._checked(answer, path, shape)
        if dim is not None and any(over_cores[dim : dim + 1]):
            raise ValueError(
                "A dimension is divided over the replicas, or over a replica's "
                f"cores. Received: {answer!r} for variable {path!r} of shape "
                f"{shape}, whose dimension {dim} `layout_map` divides over "
                f"{over_cores[dim]!r}. Return another dimension, or None."
            )
        return dim

    @property
    def is_function(self) -> bool:
        """Whether a function of the caller's says what is divided."""
        return not isinstance(self._partitioner, FullySharded)

    @property
    def name(self) -> str:
        """The partitioner, as its caller wrote it."""
        partitioner = self._partitioner
        if isinstance(partitioner, FullySharded):
            dtype = self.sum_dtype
            rest = "" if dtype is None else f", reduce_dtype={dtype!r}"
            size = f"min_size={partitioner.min_size:,}"
            return f"{type(partitioner).__name__}({size}{rest})"
        return getattr(partitioner, "__name__", type(partitioner).__name__)

    def why_replicated(
        self, shape: tuple[int, ...], over_cores: Sequence[Any] = ()
    ) -> tuple[str, str] | None:
        """Why no replicas divide a variable, in a word and in a line.

        Args:
          shape: Its shape, of any rank; nothing is to be said of a scalar.
          over_cores: See `dimension`.
        """
        partitioner = self._partitioner
        if not shape:
            return None
        if self.shards == 1:
            return "1 shard", "A replica is a group by itself."
        if not isinstance(partitioner, FullySharded):
            return "chosen", f"{self.name} returned None for it."
        if math.prod(shape) < partitioner.min_size:
            least = f"{partitioner.min_size:,}"
            return "small", f"It has fewer entries than min_size={least}."
        if self._first(shape) is None:
            return (
                "indivisible",
                f"No dimension is a multiple of the {self.shards} shards.",
            )
        if self._first(shape, over_cores) is None:
            return (
                "over cores",
                "Cores divide the one dimension that is a multiple of the "
                f"{self.shards} shards.",
            )
        if self.has_replicated_weights:
            return "weight", "Slots alone are divided."
        return None

    def _first(
        self, shape: tuple[int, ...], over_cores: Sequence[Any] = ()
    ) -> Dimension:
        free = (
            dim
            for dim, size in enumerate(shape)
            if self._fits(size) and not any(over_cores[dim : dim + 1])
        )
        return next(free, None)

    def _fits(self, size: int) -> bool:
        return size > 0 and size % self.shards == 0

    def _checked(
        self, answer: Any, path: str, shape: tuple[int, ...]
    ) -> Dimension:
        if answer is None:
            return None
        dim = answer
        if isinstance(answer, list | tuple):
            counts = list(answer)
            dims = [d for d, count in enumerate(counts) if count != 1]
            if not dims and len(counts) == len(shape):
                return None
            is_one = len(dims) == 1 and len(counts) == len(shape)
            dim = dims[0] if is_one and counts[dims[0]] == self.shards else -1
        elif isinstance(answer, bool) or not hasattr(answer, "__index__"):
            raise TypeError(
                "A partitioner returns the dimension of a variable that is "
                f"divided, or None. Received: {answer!r} of type "
                f"{type(answer).__name__} for variable {path!r}. Return a "
                "whole number."
            )
        if not 0 <= dim < len(shape) or not self._fits(shape[dim]):
            raise ValueError(
                "A variable is divided along one of its dimensions, whose "
                f"size is a multiple of the shards. Received: {answer!r} for "
                f"variable {path!r} of shape {shape}, {self.shards} shards. "
                "Return such a dimension, or None to leave it whole."
            )
        return int(dim)


def _check_partitioner(partitioner: object) -> None:
    if not callable(partitioner) and not isinstance(partitioner, FullySharded):
        raise TypeError(
            "`variable_partitioner` says which variables the replicas divide. "
            f"Received: {partitioner!r} of type {type(partitioner).__name__}. "
            "Pass `ks.experimental.FullySharded()`, `SlotsOnly()`, or a "
            "function of a variable's path, shape and dtype that returns a "
            "dimension or None."
        )
    cls = partitioner if isinstance(partitioner, type) else type(partitioner)
    if cls.__module__.startswith("tensorflow"):
        raise TypeError(
            "Partitioners are those of `ks.experimental`. Received: tf's "
            f"{cls.__name__}, which counts shards of parameter servers. Pass "
            "`ks.experimental.FullySharded()`, with `min_size` in entries."
        )
    if cls is partitioner:
        raise TypeError(
            "`variable_partitioner` must be an object or a function. "
            f"Received: the class {cls.__name__}. Write `{cls.__name__}()`, "
            "with parentheses."
        )


def _check_float(reduce_dtype: object) -> None:
    try:
        dtype = keras.backend.standardize_dtype(reduce_dtype)
    except (TypeError, ValueError):
        dtype = None
    if dtype not in ("bfloat16", "float16", "float32", "float64"):
        raise ValueError(
            "`reduce_dtype` is the float dtype in which gradients are summed. "
            f"Received: {reduce_dtype!r} of type {type(reduce_dtype).__name__}."
            " Pass 'bfloat16', or None for the gradients' own."
        )


def _is_of_tf(partitioner: Callable[..., Any]) -> bool:
    """Whether it takes `shape` and `dtype` alone, as tf's do.

    Raises:
      TypeError: it takes neither those nor (path, shape, dtype).
    """
    try:
        signature = inspect.signature(partitioner)
    except ValueError:
        return False
    try:
        signature.bind("path", (1,), "float32")
        return False
    except TypeError:
        pass
    try:
        signature.bind(shape=(1,), dtype="float32")
    except TypeError as error:
        raise TypeError(
            "A partitioner is a function of a variable's path, shape and "
            f"dtype. Received: {partitioner!r} with the arguments "
            f"{signature}. Write `def partitioner(path, shape, dtype)`."
        ) from error
    return True


def bound_partitioner(
    partitioner: PartitionerLike | None, mesh: ReplicaMesh
) -> tuple[Partitioner | None, ReplicaMesh]:
    """A strategy's partitioner, and its mesh with the groups' size."""
    if partitioner is None:
        return None, mesh
    found = Partitioner(partitioner, mesh)
    return found, dataclasses.replace(mesh, shards=found.shards)

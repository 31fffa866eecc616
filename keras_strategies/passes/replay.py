"""Traces a function whose replicas take different branches of a program.

Replicas with different numbers of rows run different branches of one program,
and a collective inside a branch would wait forever for the other replicas. The
result of a collective may depend on the shapes of all replicas' arrays. So the
function is traced (replayed) repeatedly for each number of rows, each time up
to the first collective for which these shapes are not yet available. The
complete trace is then cut at its collectives (`collective_cut`), including
those of gradients.
"""

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from keras_strategies._types import Array
from keras_strategies.passes.specs import Axis
from keras_strategies.passes.traces import is_tracing

Reduce = Callable[[list[Any]], list[Any]]


@dataclasses.dataclass(frozen=True)
class Concatenation:
    """A collective that concatenates the arrays of all replicas.

    Attributes:
      axis: The replica axis.
      dim: The dimension along which the arrays are concatenated; not negative.
    """

    axis: Axis
    dim: int

    def __call__(self, operands: list[Any]) -> list[Any]:
        """Gathers the array of the operands, which all have its shape."""
        (array,) = operands
        if not array.shape[self.dim]:
            # The array is empty on all replicas. XLA rejects empty operands.
            return [array]
        return [jax.lax.all_gather(array, self.axis, axis=self.dim, tiled=True)]

    def find_sizes(self, shapes: list[tuple[int, ...]]) -> list[int]:
        """Returns the size in `dim` of each replica's array.

        Args:
          shapes: The shape of each replica's array.

        Raises:
          ValueError: if the shapes differ in a dimension other than `dim`.
        """
        dim = self.dim
        if len({s[:dim] + s[dim + 1 :] for s in shapes}) > 1:
            raise ValueError(
                "The replicas' arrays must have equal sizes in all dimensions "
                "except the concatenated one. Received: arrays of shapes "
                f"{shapes}, concatenated along dimension {dim}. Make the sizes "
                "in the other dimensions equal."
            )
        return [s[dim] for s in shapes]


def ragged_concatenation(axis: Axis, dim: int, sizes: list[int]) -> Reduce:
    """Returns a collective that concatenates arrays of different sizes.

    It is implemented as a sum of `place_part`. So all replicas' programs have
    the same collective, with operands of the same shape.
    """

    def concatenate(operands: list[Any]) -> list[Any]:
        (array,) = operands
        part = array.astype("int8") if array.dtype == bool else array
        part = place_part(part, dim, sizes, jax.lax.axis_index(axis))
        return [jax.lax.psum(part, axis).astype(array.dtype)]

    return concatenate


def place_part(
    array: Array, dim: int, sizes: list[int], replica: Array | int
) -> jax.Array:
    """Places a replica's array at its position in an array of zeros.

    Args:
      array: The array.
      dim: The dimension along which arrays are concatenated; not negative.
      sizes: The size of each replica's array in `dim`.
      replica: The id of the replica.
    """
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    shape = list(array.shape)
    shape[dim] = sum(sizes)
    start = jnp.array(starts)[replica]
    zeros = jnp.zeros(shape, array.dtype)
    return jax.lax.dynamic_update_slice_in_dim(zeros, array, start, dim)


@dataclasses.dataclass(eq=False)
class Reached(BaseException):
    """The exception that ends a replay at a collective that is not yet known.

    No earlier replay has reached this collective. The class is not an
    `Exception`, so that user code and Keras layers do not catch it.

    Attributes:
      reduce: The function that computes the collective.
      shapes: The shapes and dtypes of the arrays that this replica passed to
        it.
    """

    reduce: Reduce
    shapes: list[jax.ShapeDtypeStruct]


class Replay:
    """A trace that ends at the first collective that is not yet known.

    Args:
      known: The collectives that earlier replays reached, adapted to the shapes
        of all replicas' arrays, in the order of the calls.
    """

    def __init__(self, known: list[Reduce]) -> None:
        self._known = iter(known)
        self._has_ended = False

    def collective(self, reduce: Reduce, operands: list[Any]) -> list[Any]:
        """Computes the next collective if it is known, else ends the replay.

        Raises:
          Reached: if the collective is not in `known`.
        """
        known = next(self._known, None)
        if known is not None:
            return known(operands)
        self._has_ended = True
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands]
        raise Reached(reduce, shapes)

    def check_not_swallowed(self) -> None:
        """Raises RuntimeError if the function caught `Reached` and went on."""
        if self._has_ended:
            raise RuntimeError(
                "A step, or a function passed to `run`, must not catch "
                "BaseException, which ends its traces at collectives if a "
                "batch cannot be divided equally among the replicas. The "
                "function caught it (`except:`). Catch `Exception` instead."
            )


class Alone:
    """Stand-ins for collectives, computed by one replica without the others.

    The results have the right shapes but not the right values. This class is
    used to build models.

    Args:
      num_replicas: Number of replicas.
    """

    replica = 0

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas

    def collective(self, reduce: Reduce, operands: list[Any]) -> list[Any]:
        """Returns the operands in place of the collective's results.

        For a concatenation, returns the operand repeated once for each replica.
        """
        if isinstance(reduce, Concatenation):
            copies = operands * self._num_replicas
            return [jnp.concatenate(copies, reduce.dim)]
        return list(operands)


class Side(Protocol):
    """An object that computes a replica's collectives, instead of JAX."""

    def collective(self, reduce: Reduce, operands: list[Any]) -> list[Any]:
        """Returns the results of the next collective."""
        ...


class _Current(threading.local):
    side: Side | None = None


current = _Current()
"""Its attribute `side` is this thread's `Side`, or None if JAX computes the
thread's collectives."""


@contextlib.contextmanager
def replay_scope(side: Side | None) -> Iterator[None]:
    """Makes `side` compute this thread's collectives while a block runs."""
    before = current.side
    current.side = side
    # `separate_trace` is used only while JAX traces. At other times, the axis
    # that it adds would make JAX believe that it is tracing.
    is_other = side is not None and is_tracing()
    name = f"ks.replay.{next(_numbers)}"
    try:
        with separate_trace(name) if is_other else contextlib.nullcontext():
            yield
    finally:
        current.side = before


_numbers = itertools.count()


def separate_trace(name: str) -> contextlib.AbstractContextManager[Any]:
    """Makes JAX use a separate cache of traces while a `with` block runs.

    Otherwise JAX would reuse an earlier trace of a user's jitted function,
    although the function is now called for other replicas.

    Args:
      name: Name of the cache, which all blocks with the same name share.
    """
    from jax._src import core

    return core.extend_axis_env_nd([(name, 1)])

"""Collectives of a function whose replicas take different branches.

Replicas with different numbers of rows run different branches of one program,
and a collective in a branch would wait forever for the other replicas. A
collective's result depends on the shapes of all replicas' arrays, so the
function is traced repeatedly, each time up to its next collective. The
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

from keras_strategies._core.jaxprs.specs import Axis
from keras_strategies._core.jaxprs.traces import is_tracing
from keras_strategies._types import Array

Reduce = Callable[[list[Any]], list[Any]]


@dataclasses.dataclass(frozen=True)
class Concatenation:
    """A collective that concatenates one array of each replica.

    Attributes:
      axis: The replica axis.
      dim: The dimension, not negative.
      sizes: Each replica's size in that dimension, if they differ; the arrays
        are then padded at the end to the largest size.
    """

    axis: Axis
    dim: int
    sizes: tuple[int, ...] | None = None

    def __call__(self, operands: list[Any]) -> list[Any]:
        (array,) = operands
        if not array.shape[self.dim]:
            # Empty on all replicas; XLA rejects empty operands.
            return [array]
        if self.sizes is None:
            tiled = jax.lax.all_gather(
                array, self.axis, axis=self.dim, tiled=True
            )
            return [tiled]
        each = jax.lax.all_gather(array, self.axis, axis=0)
        parts = [
            jax.lax.slice_in_dim(each[k], 0, size, axis=self.dim)
            for k, size in enumerate(self.sizes)
        ]
        return [jnp.concatenate(parts, self.dim)]

    def with_shapes(self, shapes: list[tuple[int, ...]]) -> "Concatenation":
        """Returns this concatenation for arrays of different sizes.

        Args:
          shapes: The shape of each replica's array.

        Raises:
          ValueError: if they differ in another dimension than `dim`.
        """
        dim = self.dim
        if len({s[:dim] + s[dim + 1 :] for s in shapes}) > 1:
            raise ValueError(
                "Arrays must have equal shapes except in the dimension in "
                "which they are concatenated. Received: shapes "
                f"{shapes} of the replicas, and dimension {dim}. Make the "
                "other dimensions equal."
            )
        return dataclasses.replace(self, sizes=tuple(s[dim] for s in shapes))

    def pad(self, array: Array) -> jax.Array:
        """Pads a replica's array to the size of the largest one."""
        most = max(self.sizes or (0,))
        missing = [(0, 0)] * array.ndim
        missing[self.dim] = (0, max(most - array.shape[self.dim], 0))
        return jnp.pad(array, missing)


def uneven_concatenation(
    axis: Axis, dim: int, sizes: tuple[int, ...]
) -> Reduce:
    """Makes a concatenation of arrays that differ in size along `dim`.

    It is a sum of arrays that are zero outside of the replica's part, so that
    all replicas' programs have the same collective.

    Args:
      axis: The replica axis.
      dim: The dimension, not negative.
      sizes: Each replica's size in that dimension.
    """
    starts = [sum(sizes[:k]) for k in range(len(sizes))]

    def concatenate(operands: list[Any]) -> list[Any]:
        (array,) = operands
        shape = list(array.shape)
        shape[dim] = sum(sizes)
        is_bool = array.dtype == bool
        part = array.astype("int8") if is_bool else array
        start = jnp.array(starts)[jax.lax.axis_index(axis)]
        result = jnp.zeros(shape, part.dtype)
        result = jax.lax.dynamic_update_slice_in_dim(result, part, start, dim)
        result = jax.lax.psum(result, axis)
        return [result.astype(bool) if is_bool else result]

    return concatenate


class Reached(BaseException):
    """Raised to end a replay at a collective that is not known yet.

    Not an `Exception`, so that user code and Keras layers do not catch it.

    Attributes:
      reduce: The collective.
      shapes: The shapes of this replica's arrays.
    """

    def __init__(
        self, reduce: Reduce, shapes: list[jax.ShapeDtypeStruct]
    ) -> None:
        super().__init__()
        self.reduce = reduce
        self.shapes = shapes


class Replay:
    """One replay, which knows the collectives that earlier replays reached.

    Args:
      known: The collectives for the shapes of all replicas, in the order of
        the calls.
    """

    def __init__(self, known: list[Reduce]) -> None:
        self._known = known
        self._position = 0
        self._has_ended = False

    def collective(self, reduce: Reduce, operands: list[Any]) -> list[Any]:
        """Computes the next collective if it is known, else ends the replay.

        Raises:
          Reached: if the collective is not known.
        """
        position = self._position
        self._position += 1
        if position < len(self._known):
            return self._known[position](operands)
        self._has_ended = True
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands]
        raise Reached(reduce, shapes)

    def check_not_swallowed(self) -> None:
        """Raises RuntimeError if the function went on after the end."""
        if self._has_ended:
            raise RuntimeError(
                "A step, or a function passed to `run`, must not catch "
                "BaseException: with an uneven batch an exception ends it at "
                "each collective. Received: one that caught it (`except:` or "
                "`except BaseException:`). Catch `Exception` instead."
            )


class Alone:
    """One replica's side of collectives without the other replicas.

    The results have the right shapes but not the right values. It is used to
    build models.

    Args:
      num_replicas: Number of replicas.
    """

    replica = 0

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas

    def collective(self, reduce: Reduce, operands: list[Any]) -> list[Any]:
        """Returns the operands; concatenates copies for a concatenation."""
        if isinstance(reduce, Concatenation):
            copies = operands * self._num_replicas
            return [jnp.concatenate(copies, reduce.dim)]
        return list(operands)


class Side(Protocol):
    """One replica's side of collectives that are not computed directly."""

    def collective(self, reduce: Reduce, operands: list[Any]) -> list[Any]:
        """Returns the results of the next collective."""
        ...


class _Current(threading.local):
    side: Side | None = None


_current = _Current()


def collective(reduce: Reduce, operands: list[Any]) -> list[Any]:
    """Calls `reduce(operands)`, or passes it to this thread's side.

    Args:
      reduce: A collective over arrays.
      operands: This replica's arrays.
    """
    side = _current.side
    if side is None:
        return reduce(operands)
    return side.collective(reduce, [jnp.asarray(o) for o in operands])


def current_side() -> Side | None:
    """Returns the side that handles this thread's collectives, or None."""
    return _current.side


@contextlib.contextmanager
def replay_scope(side: Side | None) -> Iterator[None]:
    """Passes this thread's collectives to `side` within a block."""
    before = _current.side
    _current.side = side
    # Only inside a trace: an additional axis makes JAX believe that it is
    # tracing.
    is_other = side is not None and is_tracing()
    name = f"ks.replay.{next(_numbers)}"
    try:
        with separate_trace(name) if is_other else contextlib.nullcontext():
            yield
    finally:
        _current.side = before


_numbers = itertools.count()


def separate_trace(name: str) -> contextlib.AbstractContextManager[Any]:
    """Separates JAX's cache of traces within a block from that outside.

    JAX would otherwise reuse the trace of a user's jitted function, although
    the replicas that it depends on are different ones here.

    Args:
      name: Name of the cache; blocks with the same name share it.
    """
    from jax._src import core

    return core.extend_axis_env_nd([(name, 1)])

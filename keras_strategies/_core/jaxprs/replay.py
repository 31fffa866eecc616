"""Collectives of a function whose replicas take different branches.

Replicas with different numbers of rows run different branches of one program,
and a collective in a branch would wait for ever for the others. A collective's
result depends on the shapes of all replicas' arrays, so the function is traced
again and again, each time up to its next collective. The whole trace is then
cut at its collectives (`collective_cut`), those of gradients included.
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
from keras_strategies._core.jaxprs.traces import is_traced
from keras_strategies._types import Array

Reduce = Callable[[list[Any]], list[Any]]


@dataclasses.dataclass(frozen=True)
class Concatenation:
    """A collective that concatenates one array of each replica.

    Attributes:
      axis: The replica axis.
      dim: The dimension, not negative.
      sizes: Each replica's size there, if they differ; the arrays are padded
        to the largest at their ends.
    """

    axis: Axis
    dim: int
    sizes: tuple[int, ...] | None = None

    def __call__(self, operands: list[Any]) -> list[Any]:
        (array,) = operands
        if not array.shape[self.dim]:
            # Nothing of every replica; XLA takes no such operand.
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

    def of_shapes(self, shapes: list[tuple[int, ...]]) -> "Concatenation":
        """This one, for arrays of these shapes, one of each replica.

        Raises:
          ValueError: they differ in another dimension.
        """
        dim = self.dim
        if len({s[:dim] + s[dim + 1 :] for s in shapes}) > 1:
            raise ValueError(
                "Arrays to be concatenated differ in that dimension alone. "
                f"Received: shapes {shapes} of the replicas, and dimension "
                f"{dim}. Make the others alike."
            )
        return dataclasses.replace(self, sizes=tuple(s[dim] for s in shapes))

    def padded(self, array: Array) -> jax.Array:
        """A replica's array, as large as the largest."""
        most = max(self.sizes or (0,))
        missing = [(0, 0)] * array.ndim
        missing[self.dim] = (0, max(most - array.shape[self.dim], 0))
        return jnp.pad(array, missing)


def uneven_concatenation(
    axis: Axis, dim: int, sizes: tuple[int, ...]
) -> Reduce:
    """Makes a concatenation of arrays that differ in size along `dim`.

    A sum of arrays that are zero but for a replica's own part, so that a
    program of each replica has the same collective.

    Args:
      axis: The replica axis.
      dim: The dimension, not negative.
      sizes: Each replica's size there.
    """
    starts = [sum(sizes[:k]) for k in range(len(sizes))]

    def concatenate(operands: list[Any]) -> list[Any]:
        (array,) = operands
        shape = list(array.shape)
        shape[dim] = sum(sizes)
        is_bool = array.dtype == bool
        part = array.astype("int8") if is_bool else array
        start = jnp.array(starts)[jax.lax.axis_index(axis)]
        whole = jnp.zeros(shape, part.dtype)
        whole = jax.lax.dynamic_update_slice_in_dim(whole, part, start, dim)
        whole = jax.lax.psum(whole, axis)
        return [whole.astype(bool) if is_bool else whole]

    return concatenate


class Reached(BaseException):
    """Ends a replay at a collective that is not known yet.

    No `Exception`: user code and Keras's layers let it pass.

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
    """One replay, with the collectives that earlier ones have reached.

    Args:
      known: The collectives for the shapes of all replicas, in the order of
        the calls.
    """

    def __init__(self, known: list[Reduce]) -> None:
        self._known = known
        self._position = 0
        self._has_ended = False

    def collective(self, reduce: Reduce, operands: list[Any]) -> list[Any]:
        """The result of the next collective, or the end of this replay."""
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
                "With an uneven batch a step, or a function given to `run`, is "
                "run up to each collective and ended by an exception there. "
                "Received: one that caught it (`except:` or `except "
                "BaseException:`). Catch `Exception` instead."
            )


class Alone:
    """A replica's side of collectives that nobody else joins.

    They return what has the shapes that they would return: a model is built
    with it, where values are of no interest.

    Args:
      num_replicas: Number of replicas.
    """

    replica = 0

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas

    def collective(self, reduce: Reduce, operands: list[Any]) -> list[Any]:
        """The operands, or copies of them where they are concatenated."""
        if isinstance(reduce, Concatenation):
            copies = operands * self._num_replicas
            return [jnp.concatenate(copies, reduce.dim)]
        return list(operands)


class Side(Protocol):
    """One replica's side of collectives that are not computed on the spot."""

    def collective(self, reduce: Reduce, operands: list[Any]) -> list[Any]:
        """The result of the next collective."""
        ...


class _Current(threading.local):
    side: Side | None = None


_current = _Current()


def collective(reduce: Reduce, operands: list[Any]) -> list[Any]:
    """Calls `reduce(operands)`, or what this thread's collectives go through.

    Args:
      reduce: A collective over arrays.
      operands: This replica's arrays.
    """
    side = _current.side
    if side is None:
        return reduce(operands)
    return side.collective(reduce, [jnp.asarray(o) for o in operands])


def current_side() -> Side | None:
    """Whom this thread's collectives go through, or None."""
    return _current.side


@contextlib.contextmanager
def replay_scope(side: Side | None) -> Iterator[None]:
    """Sends this thread's collectives through `side` for a block."""
    before = _current.side
    _current.side = side
    # Outside of a trace JAX would take itself to be in one.
    is_other = side is not None and is_traced()
    name = f"ks.replay.{next(_numbers)}"
    try:
        with own_trace(name) if is_other else contextlib.nullcontext():
            yield
    finally:
        _current.side = before


_numbers = itertools.count()


def own_trace(name: str) -> contextlib.AbstractContextManager[Any]:
    """Keeps what JAX traces in a block apart from what it traces elsewhere.

    It would answer a jitted function of the user's, which asks for other
    replicas, with the trace that it made where these were others.

    Args:
      name: Blocks of one name share what was traced.
    """
    from jax._src import core

    return core.extend_axis_env_nd([(name, 1)])

"""Collectives of a function whose replicas take different branches.

Replicas with different numbers of rows run different branches of one program,
and a collective in a branch would wait for ever for the others. So the
function is traced again and again: each time it runs up to its next
collective, whose operand leaves the branch; it is reduced outside, and the
function is replayed with the result known.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from keras_strategies._core.jaxprs.specs import Axis

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

    def padded(self, array: Any) -> Any:
        """A replica's array, as large as the largest."""
        most = max(self.sizes or (0,))
        missing = [(0, 0)] * array.ndim
        missing[self.dim] = (0, max(most - array.shape[self.dim], 0))
        return jnp.pad(array, missing)


class Reached(BaseException):
    """Ends a replay at a collective whose result is not known yet.

    No `Exception`: user code and Keras's layers let it pass.

    Attributes:
      reduce: The collective.
      operands: This replica's arrays.
    """

    def __init__(self, reduce: Reduce, operands: list[Any]) -> None:
        super().__init__()
        self.reduce = reduce
        self.operands = operands


class Replay:
    """One replay, with the results of the collectives before.

    Args:
      known: The results, in the order of the calls.

    Attributes:
      operands: This replica's arrays of those collectives.
    """

    def __init__(self, known: list[list[Any]]) -> None:
        self._known = known
        self.operands: list[list[Any]] = []
        self._position = 0
        self._has_ended = False
        self._state = get_opaque_trace_state()

    def collective(self, reduce: Reduce, operands: list[Any]) -> list[Any]:
        """The result of the next collective, or the end of this replay."""
        if get_opaque_trace_state() != self._state:
            raise RuntimeError(
                "Replicas with different numbers of rows cannot communicate "
                "under a transformation of JAX (a gradient, a loop, a "
                "branch, `jit`). Received: a collective inside of one, in a "
                "function given to `run` with an uneven batch. Call it outside "
                "of the transformation, or make the batch even "
                "(`drop_remainder`)."
            )
        position = self._position
        self._position += 1
        if position < len(self._known):
            self.operands.append(list(operands))
            return list(self._known[position])
        self._has_ended = True
        raise Reached(reduce, list(operands))

    def check_not_swallowed(self) -> None:
        """Raises RuntimeError if the function went on after the end."""
        if self._has_ended:
            raise RuntimeError(
                "A function given to `run` is run up to each collective with "
                "an uneven batch, and ended by an exception there. Received: "
                "a function that caught it (`except:` or `except "
                "BaseException:`). Catch `Exception` instead."
            )


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
    try:
        yield
    finally:
        _current.side = before

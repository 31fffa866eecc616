"""Runs a function for several replicas in lockstep, in separate threads.

Only one replica runs at a time. It runs up to its next collective, then the
next replica runs. When all replicas have reached the collective, they continue
one after another, and each computes it from all replicas' operands.
Collectives are differentiable: the backward pass of a collective is itself a
collective.
"""

import functools
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from keras_strategies.passes.replay import (
    Concatenation,
    Reduce,
    place_part,
    replay_scope,
)
from keras_strategies.passes.specs import Axis

_SHAPES = "a collective (Concatenation)"
END = "the function's end"
"""The name of the exchange after the user's function has returned."""
_DONE = "the end of all writes"
_STOP: Any = object()


class Aborted(BaseException):
    """The exception that ends a replica after another replica has failed."""


class Lockstep:
    """The replicas that run a function in lockstep.

    Args:
      num_replicas: Number of replicas.
      axis: Name of the replica axis in collectives.

    Attributes:
      reached: A queue of what the replicas reach: a place and a value, or an
        error.
    """

    def __init__(self, num_replicas: int, axis: Axis) -> None:
        self.axis = axis
        self.reached = queue.SimpleQueue[Any]()
        self._answers = [queue.SimpleQueue[Any]() for _ in range(num_replicas)]

    def run(self, fn: Callable[[int], Any]) -> list[Any]:
        """Calls `fn(replica)` once for each replica.

        Returns:
          The results, in the order of the replicas.

        Raises:
          Exception: the first exception that a replica raised.
          RuntimeError: if the replicas reached different collectives.
        """

        def call(replica: int) -> None:
            try:
                self.wait(replica)
                turn = Turn(self, replica)
                with replay_scope(turn):
                    turn.meet(fn(replica), _DONE)
            except Aborted:
                pass
            except BaseException as error:
                self.reached.put(error)

        count = len(self._answers)
        with ThreadPoolExecutor(count, thread_name_prefix="replica") as pool:
            pool.map(call, range(count))
            try:
                reached = self._run_all(None)
                while {kind for kind, _ in reached} != {_DONE}:
                    reached = self._run_all(reached)
            finally:
                for answers in self._answers:
                    answers.put(_STOP)
        return [value for _, value in reached]

    def _run_all(self, answer: object) -> list[Any]:
        """Runs one replica after another, each up to its next `meet`."""
        reached: list[Any] = []
        for answers in self._answers:
            answers.put(answer)
            reached.append(self.reached.get())
            if isinstance(reached[-1], BaseException):
                raise reached[-1]
        return reached

    def wait(self, replica: int) -> Any:
        """Waits until a replica's turn; returns what all have reached."""
        answer = self._answers[replica].get()
        if answer is _STOP:
            # For a function that catches `Aborted`, and goes on.
            self._answers[replica].put(_STOP)
            raise Aborted
        return answer


class Turn:
    """The collectives of one of the replicas that run in lockstep.

    Implements `replay.Side`.

    Args:
      lockstep: The lockstep that the replica belongs to.
      replica: The id of this replica.
    """

    def __init__(self, lockstep: Lockstep, replica: int) -> None:
        self._lockstep = lockstep
        self.replica = replica

    def meet(self, value: object, where: str = END) -> list[Any]:
        """Exchanges values of any type; returns the values of all replicas.

        Raises:
          RuntimeError: if other replicas called `meet` with another `where` (a
            description of the place in the code).
        """
        self._lockstep.reached.put((where, value))
        reached = self._lockstep.wait(self.replica)
        places = [place for place, _ in reached]
        if len(set(places)) > 1:
            raise RuntimeError(
                "All replicas must call the same collectives in the same order "
                "(`all_reduce`, `merge_call`, an optimizer's `apply`, a write "
                "of an aggregated variable). Received: replicas that reached "
                f"{places}. Call the same collectives on every replica."
            )
        return [value for _, value in reached]

    def collective(self, reduce: Reduce, operands: list[Any]) -> list[Any]:
        """Computes a collective and returns this replica's results."""
        axis = self._lockstep.axis
        if isinstance(reduce, Concatenation):
            shapes = self.meet(operands[0].shape, _SHAPES)
            if len(set(shapes)) > 1:
                (array,), sizes = operands, reduce.find_sizes(shapes)
                part = array.astype("int8") if array.dtype == bool else array
                part = place_part(part, reduce.dim, sizes, self.replica)
                add_up = functools.partial(jax.lax.psum, axis_name=axis)
                (total,) = self.collective(add_up, [part])
                return [total.astype(array.dtype)]
        function = getattr(reduce, "func", reduce)
        name = getattr(function, "__qualname__", type(function).__name__)
        name = f"a collective ({name})"
        reduce_all = jax.vmap(reduce, axis_name=axis)

        def forward(arrays: list[Any]) -> tuple[list[Any], list[Any]]:
            """Returns this replica's results and all replicas' operands."""
            stacked = self._stack(arrays, name)
            return self._take(reduce_all(stacked)), stacked

        def backward(stacked: list[Any], cotangents: list[Any]) -> Any:
            """Returns the gradient of the sum of all replicas' losses."""
            cotangents = self._stack(cotangents, f"the gradient of {name}")
            _, pull_back = jax.vjp(reduce_all, stacked)
            return (self._take(pull_back(cotangents)[0]),)

        if not any(isinstance(a, Tracer) for a in operands):
            return forward(operands)[0]
        exchange = jax.custom_vjp(lambda arrays: forward(arrays)[0])
        exchange.defvjp(forward, backward)
        return exchange(operands)

    def _stack(self, arrays: list[Any], where: str) -> list[Any]:
        """Stacks each array of all replicas."""
        if any(isinstance(array, Tracer) for array in arrays):
            raise RuntimeError(
                "In debug mode, replicas must not communicate inside functions "
                "that JAX traces (`jit`, `scan`, `cond`, a second gradient). "
                "Call the collective outside of the function, or turn debug "
                "mode off."
            )
        values = self.meet(arrays, where)
        shapes = [[(a.shape, str(a.dtype)) for a in each] for each in values]
        if any(s != shapes[0] for s in shapes):
            raise ValueError(
                "The arrays that replicas pass to a collective must have the "
                "same shapes and dtypes on all replicas. Received, for each "
                f"replica: {shapes}. Make the shapes and dtypes match, or "
                "reduce over the rows first."
            )
        return [_stack_column(column) for column in zip(*values, strict=True)]

    def _take(self, columns: list[Any]) -> list[Any]:
        return [column[self.replica, ...] for column in columns]


def _stack_column(column: Sequence[Any]) -> Any:
    # The tangents of integers are arrays of NumPy, without bytes.
    is_empty = column[0].dtype == jax.dtypes.float0
    return np.stack(column) if is_empty else jnp.stack(column)

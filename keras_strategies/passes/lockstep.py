"""Runs a function for several replicas in lockstep, in separate threads.

Only one replica runs at a time. It runs up to its next collective, then the
next replica runs. When all replicas have reached the collective, it is computed
from all replicas' operands, and the replicas continue one after another.
Collectives are differentiable: the backward pass of a collective is itself a
collective.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from keras_strategies._types import Array
from keras_strategies.passes.replay import (
    Concatenation,
    Reduce,
    replay_scope,
)
from keras_strategies.passes.specs import Axis

_SHAPES = "a collective (Concatenation)"
END = "the function's end"
"""The name of the exchange after the user's function has returned."""
_NOTHING: Any = object()


class Aborted(BaseException):
    """The exception that ends a replica after another replica has failed."""


class Lockstep:
    """The replicas that run a function in lockstep.

    Args:
      num_replicas: Number of replicas.
      axis: Name of the replica axis in collectives.
    """

    def __init__(self, num_replicas: int, axis: Axis) -> None:
        self.num_replicas = num_replicas
        self.axis = axis
        self._turn = 0
        self._changed = threading.Condition()
        self._posted: list[Any] = [_NOTHING] * num_replicas
        self._answers: list[Any] = [_NOTHING] * num_replicas
        self._error: BaseException | None = None

    def run(self, fn: Callable[[int], Any]) -> list[Any]:
        """Calls `fn(replica)` once for each replica.

        Returns:
          The results, in the order of the replicas.

        Raises:
          Exception: the first exception that a replica raised.
          RuntimeError: if the replicas reached different collectives.
        """
        results: list[Any] = [None] * self.num_replicas

        def one(replica: int) -> None:
            try:
                self._wait_for_turn(replica)
                with replay_scope(Turn(self, replica)):
                    results[replica] = fn(replica)
            except Aborted:
                pass
            except BaseException as error:
                # `_end` wakes the other replicas, which then raise `Aborted`.
                self._error = self._error or error
            finally:
                self._end(replica)

        threads = [
            threading.Thread(target=one, args=(i,), name=f"replica_{i}")
            for i in range(self.num_replicas)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return results

    def exchange(
        self,
        replica: int,
        kind: str,
        value: object,
        combine: Callable[[list[Any]], list[Any]],
    ) -> Any:
        """Waits for the values of all replicas and combines them.

        Args:
          replica: The id of the calling replica.
          kind: A description of the exchange, equal on all replicas.
          value: The replica's value.
          combine: A function that takes the values of all replicas and returns
            a list with one answer per replica.

        Returns:
          This replica's entry in the result of `combine`.

        Raises:
          RuntimeError: if other replicas called `exchange` with another `kind`.
        """
        with self._changed:
            self._posted[replica] = (kind, value)
            # When a replica arrives here, the next replica gets the turn. The
            # last replica to arrive computes all answers, and replica 0
            # continues.
            if all(v is not _NOTHING for v in self._posted):
                _check_kinds([kind for kind, _ in self._posted])
                values = [value for _, value in self._posted]
                self._posted = [_NOTHING] * self.num_replicas
                self._answers = list(combine(values))
                self._turn = 0
            else:
                self._turn = replica + 1
            self._changed.notify_all()
        self._wait_for_turn(replica, for_answer=True)
        answer, self._answers[replica] = self._answers[replica], _NOTHING
        return answer

    def _wait_for_turn(self, replica: int, *, for_answer: bool = False) -> None:
        def is_over() -> bool:
            has_answer = self._answers[replica] is not _NOTHING
            is_next = self._turn == replica and (has_answer or not for_answer)
            return is_next or self._error is not None

        with self._changed:
            self._changed.wait_for(is_over)
            if self._error is not None:
                raise Aborted

    def _end(self, replica: int) -> None:
        with self._changed:
            self._turn = replica + 1
            self._changed.notify_all()


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
        count = self._lockstep.num_replicas
        return self._lockstep.exchange(
            self.replica, where, value, lambda values: [values] * count
        )

    def collective(self, reduce: Reduce, operands: list[Any]) -> list[Any]:
        """Computes a collective and returns this replica's results."""
        if isinstance(reduce, Concatenation):
            shapes = self.meet(operands[0].shape, _SHAPES)
            if len(set(shapes)) > 1:
                reduce = reduce.with_shapes(shapes)
                operands = [reduce.pad(operands[0])]
        if not any(isinstance(a, Tracer) for a in operands):
            return self._forward(reduce, operands)[0]

        @jax.custom_vjp
        def exchange(arrays: list[Any]) -> list[Any]:
            return self._forward(reduce, arrays)[0]

        exchange.defvjp(
            lambda arrays: self._forward(reduce, arrays),
            lambda stacked, cotangents: (
                self._backward(reduce, stacked, cotangents),
            ),
        )
        return exchange(operands)

    def _forward(
        self, reduce: Reduce, arrays: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Returns this replica's results and all replicas' operands."""
        _check_concrete(arrays)

        def combine(values: list[list[Any]]) -> list[Any]:
            _check_shapes(values)
            stacked = _stack(values)
            results = jax.vmap(reduce, axis_name=self._lockstep.axis)(stacked)
            return [(result, stacked) for result in self._parts(results)]

        return self._lockstep.exchange(
            self.replica, _name(reduce), arrays, combine
        )

    def _backward(
        self, reduce: Reduce, stacked: list[Any], cotangents: list[Any]
    ) -> list[Any]:
        """Returns the gradient with respect to this replica's operands.

        It is the gradient of the sum of all replicas' losses.
        """
        _check_concrete(cotangents)
        mapped = jax.vmap(reduce, axis_name=self._lockstep.axis)
        floats = [k for k, a in enumerate(stacked) if _is_float(a)]

        def select_floats(values: list[Any]) -> list[Any]:
            operands = list(stacked)
            for k, value in zip(floats, values, strict=True):
                operands[k] = value
            results = mapped(operands)
            return [results[k] for k in floats]

        def combine(values: list[list[Any]]) -> list[Any]:
            _, pull = jax.vjp(select_floats, [stacked[k] for k in floats])
            return self._parts(pull(_stack(values))[0])

        gradients = self._lockstep.exchange(
            self.replica,
            f"the gradient of {_name(reduce)}",
            [cotangents[k] for k in floats],
            combine,
        )
        zeros = [np.zeros(a.shape[1:], jax.dtypes.float0) for a in stacked]
        for k, value in zip(floats, gradients, strict=True):
            zeros[k] = value
        return zeros

    def _parts(self, columns: Sequence[Any]) -> list[list[Any]]:
        """Splits stacked arrays into one list of entries per replica."""
        count = self._lockstep.num_replicas
        return [[column[i] for column in columns] for i in range(count)]


def _is_float(array: Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


def _name(reduce: object) -> str:
    function = getattr(reduce, "func", reduce)
    name = getattr(function, "__qualname__", type(function).__name__)
    return f"a collective ({name})"


def _check_kinds(kinds: list[str]) -> None:
    if len(set(kinds)) > 1:
        raise RuntimeError(
            "All replicas must call the same collectives in the same order "
            "(`all_reduce`, `merge_call`, an optimizer's `apply`, a write of "
            f"an aggregated variable). Received: replicas that reached {kinds}."
            " Call the same collectives on every replica."
        )


def _stack(values: list[list[Any]]) -> list[Any]:
    return [jnp.stack(column) for column in zip(*values, strict=True)]


def _check_concrete(arrays: list[Any]) -> None:
    if any(isinstance(array, Tracer) for array in arrays):
        raise RuntimeError(
            "In debug mode, replicas must not communicate inside functions "
            "that JAX traces (`jit`, `scan`, `cond`, a second gradient). "
            "Call the collective outside of the function, or turn debug mode "
            "off."
        )


def _check_shapes(values: list[list[Any]]) -> None:
    shapes = [[(a.shape, str(a.dtype)) for a in arrays] for arrays in values]
    if any(s != shapes[0] for s in shapes):
        raise ValueError(
            "The arrays that replicas pass to a collective must have the same "
            "shapes and dtypes on all replicas. Received, for each replica: "
            f"{shapes}. Make the shapes and dtypes match, or reduce over the "
            "rows first."
        )

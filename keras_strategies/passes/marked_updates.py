"""Marks optimizer updates in a traced step so that it can be cut there.

An update may combine the entries of its arrays in any way (norms, factored
slots, orthogonalization), so its result would be wrong if it ran on each shard
separately inside a mapped function. If the step is cut at its updates, they are
computed outside of the mapped function on global sharded arrays, and XLA
divides the work over the devices.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from keras_strategies.passes import replay
from keras_strategies.passes.specs import Spec
from keras_strategies.passes.stages import (
    with_consts_as_inputs,
)

MAX = "max"
"""The reduction of a "gradient" that is its variable's new value.

See `overwrite_with_gradient` in Keras.
"""

Reduction = Spec | Literal["max"]
"""The spec of a gradient's sum, or `MAX` for its replicated maximum."""

# The prefix contains a dot, so no user-defined function can have such a name.
_PREFIX = "ks.optimizer_update_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """A marked optimizer update.

    It computes new values from captured arrays, gradients and the old values.

    Attributes:
      traced: The jaxpr of the update. Its inputs are the captured arrays (which
        it reads from the surrounding code), then the reduced gradients, then
        the values.
      num_captured: Number of captured arrays.
      gradients: How each gradient is reduced over the replicas.
      values: The spec of each value (weight or optimizer slot).
      divisor: The number by which the sums of the gradients over the replicas
        are divided before the update.
      on_replicated: A function that is called if the step is not cut at the
        update, for example because the update is inside a branch or a loop.
    """

    traced: ClosedJaxpr
    num_captured: int
    gradients: tuple[Reduction, ...]
    values: tuple[Spec, ...]
    divisor: int
    on_replicated: Callable[[], None]

    def __call__(self, operands: Sequence[Any]) -> list[Any]:
        """Computes the new values from the inputs of `traced`."""
        return jaxpr_as_fun(self.traced)(*operands)


class _Collected(threading.local):
    updates: dict[str, Update] | None = None


_collected = _Collected()


@contextlib.contextmanager
def collect_updates() -> Iterator[dict[str, Update]]:
    """Yields a dict that collects the updates marked in a `with` block."""
    before, updates = _collected.updates, dict[str, Update]()
    _collected.updates = updates
    try:
        yield updates
    finally:
        _collected.updates = before


def collect(updates: Mapping[str, Update]) -> None:
    """Adds the updates of a trace that is computed in a collecting block."""
    if _collected.updates is not None:
        _collected.updates.update(updates)


def is_collecting() -> bool:
    """Returns whether this thread traces a step that can be cut at updates.

    A step cannot be cut at its updates while replicas are replayed
    (`replay.py`) or run in lockstep (`lockstep.py`), because the replicas then
    synchronize at each collective.
    """
    return _collected.updates is not None and replay.current.side is None


def mark_update(
    update: Callable[[list[Any], list[Any]], list[Any]],
    reduce: Callable[[list[Any]], list[Any]],
    gradients: list[Any],
    values: list[Any],
    *,
    reductions: Sequence[Reduction],
    specs: Sequence[Spec],
    divisor: int,
    on_replicated: Callable[[], None],
) -> list[Any]:
    """Computes `update(reduce(gradients), values)` as one marked equation.

    Args:
      update: The optimizer's update, which returns new values for `values`.
      reduce: A function that reduces the gradients over the replicas. Used only
        if the step is not cut at this update.
      gradients: This replica's gradients.
      values: The weights and optimizer slots, as full arrays.
      reductions: See `Update.gradients`.
      specs: See `Update.values`.
      divisor: See `Update.divisor`.
      on_replicated: See `Update.on_replicated`.

    Returns:
      The new values. Empty, without an equation, if `update` returns further
      values.
    """
    assert _collected.updates is not None
    name = f"{_PREFIX}{len(_collected.updates)}"
    traced = _trace(update, gradients, values)
    if len(traced.out_avals) > len(values):
        return []
    captured = traced.consts
    marked = Update(
        traced=ClosedJaxpr(with_consts_as_inputs(traced), []),
        num_captured=len(captured),
        gradients=tuple(reductions),
        values=tuple(specs),
        divisor=divisor,
        on_replicated=on_replicated,
    )
    _collected.updates[name] = marked

    def compute(
        captured: list[Any], gradients: list[Any], values: list[Any]
    ) -> list[Any]:
        return marked([*captured, *reduce(gradients), *values])

    compute.__name__ = compute.__qualname__ = name
    return jax.jit(compute)(captured, gradients, values)


def _trace(
    update: Callable[..., Any], gradients: list[Any], values: list[Any]
) -> ClosedJaxpr:
    def compute(gradients: list[Any], values: list[Any]) -> list[Any]:
        return update(gradients, values)

    compute.__name__ = compute.__qualname__ = "ks.optimizer_update"
    # As one equation, which is not traced again where the jaxpr is computed.
    return jax.make_jaxpr(jax.jit(compute))(gradients, values)


def find_update(
    equation: JaxprEqn, updates: dict[str, Update]
) -> Update | None:
    """Returns the marked update that an equation calls, or None."""
    return updates.get(equation.params.get("name", ""))

"""Updates by optimizers, marked in a traced step so that it can be cut there.

An update mixes entries of its arrays as it likes (norms, factored slots,
orthogonalization), so on parts of them inside of a mapped function it would be
another one. Where a step is cut at it, it is computed outside, on global
arrays that are divided over the devices, and XLA divides the work.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun

from keras_strategies._core.jaxprs.replay import current_side
from keras_strategies._core.jaxprs.specs import Spec
from keras_strategies._core.jaxprs.stages import with_consts_as_inputs

MAX = "max"
"""The reduction of a gradient that takes its variable's place."""

Reduction = Spec | Literal["max"]
"""How a gradient's sum is divided; or its maximum, whole."""

# With a dot, as no function of a user has it.
_PREFIX = "ks.optimizer_update_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """A marked update: `(consts, gradients, values) -> new values`.

    Attributes:
      traced: The update of reduced gradients; its first inputs are what it
        captured, then the gradients, then the values.
      num_captured: How many arrays it captured.
      gradients: How each gradient is reduced.
      values: Where each value lies.
      divisor: What sums are divided by.
      on_replicated: Called if the step is not cut at it: it is inside of a
        branch or a loop.
    """

    traced: ClosedJaxpr
    num_captured: int
    gradients: tuple[Reduction, ...]
    values: tuple[Spec, ...]
    divisor: int
    on_replicated: Callable[[], None]

    def __call__(self, operands: Sequence[Any]) -> list[Any]:
        """The new values, of what was captured, reduced gradients, values."""
        return jaxpr_as_fun(self.traced)(*operands)


class _Collected(threading.local):
    updates: dict[str, Update] | None = None


_collected = _Collected()


@contextlib.contextmanager
def collected_updates() -> Iterator[dict[str, Update]]:
    """Collects the updates, by name, that are marked in a block's traces."""
    before = _collected.updates
    _collected.updates = updates = {}
    try:
        yield updates
    finally:
        _collected.updates = before


def is_collecting() -> bool:
    """Whether this thread traces a step that can be cut at updates.

    Replicas that do not run one program alike (`replay.py`) meet at each
    collective instead.
    """
    return _collected.updates is not None and current_side() is None


def marked_update(
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
    """Computes `update(reduce(gradients), values)`, as one marked equation.

    Args:
      update: The optimizer's update; it returns new values for `values`.
      reduce: Reduces the gradients over the replicas, where the step is not
        cut.
      gradients: This replica's own.
      values: Weights and slots, whole.
      reductions: See `Update.gradients`.
      specs: See `Update.values`.
      divisor: See `Update.divisor`.
      on_replicated: See `Update.on_replicated`.
    """
    assert _collected.updates is not None
    traced = jax.make_jaxpr(update)(gradients, values)
    captured = traced.consts
    note = Update(
        traced=ClosedJaxpr(with_consts_as_inputs(traced), []),
        num_captured=len(captured),
        gradients=tuple(reductions),
        values=tuple(specs),
        divisor=divisor,
        on_replicated=on_replicated,
    )
    name = f"{_PREFIX}{len(_collected.updates)}"
    _collected.updates[name] = note

    def whole(
        captured: list[Any], gradients: list[Any], values: list[Any]
    ) -> list[Any]:
        return note([*captured, *reduce(gradients), *values])

    whole.__name__ = whole.__qualname__ = name
    return jax.jit(whole)(captured, gradients, values)


def update_of(equation: JaxprEqn, updates: dict[str, Update]) -> Update | None:
    """The marked update that an equation calls, or None."""
    if equation.primitive.name not in ("jit", "pjit"):
        return None
    return updates.get(equation.params["name"])

"""Marks optimizer updates in a traced step so that it can be cut there.

An update may combine the entries of its arrays in any way (norms, factored
slots, orthogonalization), so its result would be wrong if it ran on each shard
separately inside a mapped function. If the step is cut at its updates, they are
computed outside of the mapped function on global sharded arrays, and XLA
divides the work over the devices.
"""

import contextlib
import dataclasses
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from keras_strategies.passes import replay
from keras_strategies.passes.specs import Spec
from keras_strategies.passes.stages import (
    all_equations,
    with_consts_as_inputs,
)
from keras_strategies.passes.traces import is_user_code

MAX = "max"
"""The reduction of a "gradient" that is its variable's new value.

See `overwrite_with_gradient` in Keras.
"""

Reduction = Spec | Literal["max"]
"""The spec of a gradient's sum, or `MAX` for its replicated maximum."""

# The prefix contains a dot, so no user-defined function can have such a name.
_PREFIX = "ks.optimizer_update_"
_INNER = "ks.optimizer_update"


# JAX names a function that it traces by its repr, which would be the jaxpr.
@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
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
      key: The objects that the update computes with. Another trace of the same
        step does not trace an update with the same objects again, unless the
        update contains user code.
    """

    traced: ClosedJaxpr
    num_captured: int
    gradients: tuple[Reduction, ...]
    values: tuple[Spec, ...]
    divisor: int
    key: Sequence[object]

    def __call__(self, operands: Sequence[Any]) -> list[Any]:
        """Computes the new values from the inputs of `traced`."""
        return jaxpr_as_fun(self.traced)(*operands)


class _Collected(threading.local):
    """The updates of the trace that a thread makes.

    Attributes:
      updates: Those that are marked in it, by name, or None.
      known: The updates of an earlier trace of the same step, by name, whose
        jaxprs may be used again.
    """

    updates: dict[str, Update] | None = None
    known: Mapping[str, Update] = MappingProxyType({})


collected = _Collected()


@contextlib.contextmanager
def collect_updates() -> Iterator[dict[str, Update]]:
    """Yields a dict that collects the updates marked in a `with` block."""
    before, updates = collected.updates, dict[str, Update]()
    collected.updates = updates
    try:
        yield updates
    finally:
        collected.updates = before


def collect(updates: Mapping[str, Update]) -> None:
    """Adds the updates of a trace that is computed in a collecting block."""
    if collected.updates is not None:
        collected.updates.update(updates)


def is_collecting() -> bool:
    """Returns whether this thread traces a step that can be cut at updates.

    A step cannot be cut at its updates while replicas are replayed
    (`replay.py`) or run in lockstep (`lockstep.py`), because the replicas then
    synchronize at each collective.
    """
    return collected.updates is not None and replay.current.side is None


def mark_update(
    update: Callable[[list[Any], list[Any]], list[Any]],
    reduce: Callable[[list[Any]], list[Any]],
    gradients: list[Any],
    values: list[Any],
    *,
    reductions: Sequence[Reduction],
    specs: Sequence[Spec],
    divisor: int,
    key: Sequence[object],
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
      key: See `Update.key`.

    Returns:
      The new values. Empty, without an equation, if `update` returns further
      values.
    """
    assert collected.updates is not None
    name = f"{_PREFIX}{len(collected.updates)}"
    traced = _find_known(name, key, [*gradients, *values])
    traced = traced or _trace(update, gradients, values)
    if len(traced.out_avals) > len(values):
        return []
    captured = traced.consts
    marked = Update(
        traced=ClosedJaxpr(with_consts_as_inputs(traced), []),
        num_captured=len(captured),
        gradients=tuple(reductions),
        values=tuple(specs),
        divisor=divisor,
        key=key,
    )
    collected.updates[name] = marked

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

    compute.__name__ = compute.__qualname__ = _INNER
    # As one equation, which is not traced again where the jaxpr is computed.
    return jax.make_jaxpr(jax.jit(compute))(gradients, values)


def _find_known(
    name: str, key: Sequence[object], operands: list[Any]
) -> ClosedJaxpr | None:
    """Returns the jaxpr of the same update in an earlier trace of the step."""
    known = collected.known.get(name)
    if known is None or known.num_captured or len(known.key) != len(key):
        return None
    is_same = all(map(operator.is_, known.key, key))
    is_same &= not any(map(is_user_code, all_equations(known.traced)))
    shapes = list(map(jax.typeof, operands))
    return known.traced if is_same and known.traced.in_avals == shapes else None


def is_same_update(equations: Sequence[Any]) -> bool:
    """Returns whether equations of two traces compute one known update."""
    if len(equations) < 2:
        return False
    jaxprs = [e.params.get("jaxpr") for e in equations]
    is_update = equations[0].params.get("name") == _INNER
    return is_update and all(jaxpr is jaxprs[0] for jaxpr in jaxprs)

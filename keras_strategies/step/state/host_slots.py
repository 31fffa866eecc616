"""Steps whose slots are on the host: XLA moves them around the update.

A slot is moved to the devices where an equation first reads it, and its new
value is moved back where it is computed. XLA would start all these copies with
the step. So each waits for an earlier slot that is on the host again: a few
slots are on the devices at a time, and copies run beside updates.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from keras_strategies._types import Tree
from keras_strategies.passes.stages import (
    compute_equations,
    get_shape,
    read_value,
    with_consts_as_inputs,
)
from keras_strategies.variables.host_memory import is_in_host_memory

_WINDOW = 4
"""The number of slots that may be on the devices: those of two weights, with an
optimizer like Adam."""


def keep_slots_on_host(step: Callable[..., Any]) -> Callable[..., Any]:
    """Lets a step take and return slots in the memory of the host.

    Args:
      step: A function whose second result begins with the new values of its
        first argument. It computes in the memory of the devices.
    """

    def call(*args: Tree) -> Any:
        leaves, structure = jax.tree.flatten(args)
        if not any(map(is_in_host_memory, leaves)):
            return step(*args)
        shapes = jax.tree.unflatten(structure, map(get_shape, leaves))
        traced, results = jax.make_jaxpr(step, return_shape=True)(*shapes)
        before = len(jax.tree.leaves(results[:1]))
        state = [is_in_host_memory(x) for x in jax.tree.leaves(args[0])]
        kept = [False] * len(traced.jaxpr.outvars)
        kept[before : before + len(state)] = state
        outputs = _compute_kept(traced, leaves, kept)
        return jax.tree.unflatten(jax.tree.structure(results), outputs)

    return call


@dataclasses.dataclass(eq=False)
class _Slot:
    """A value in the memory of the host.

    Attributes:
      value: The value on the host.
      copy: The value on the devices, or None if it was not moved there.
    """

    value: Any
    copy: Any = None


def _compute_kept(
    traced: ClosedJaxpr, values: Sequence[Any], kept: Sequence[bool]
) -> list[Any]:
    """Computes a function of arrays, of which some are on the host.

    Args:
      traced: The function.
      values: The arrays.
      kept: For each result, whether it is returned on the host.
    """
    moves = _Moves()
    inputs = [_Slot(x) if is_in_host_memory(x) else x for x in values]
    results = moves.compute(traced, inputs, [() if k else None for k in kept])
    outputs = [
        (moves.load(x) if not k else x)
        if isinstance(x, _Slot)
        else (moves.store(x) if k else x)
        for x, k in zip(results, kept, strict=True)
    ]
    return [x.value if isinstance(x, _Slot) else x for x in outputs]


class _Moves:
    """Computes functions, and moves slots between the host and the devices."""

    def __init__(self) -> None:
        self._stored: list[_Slot] = []
        # The values of a function, and the last one that it computed.
        self._last: tuple[dict[Any, Any], Any] | None = None

    def compute(
        self, traced: ClosedJaxpr, inputs: Sequence[Any], kept: Sequence[Any]
    ) -> list[Any]:
        """Computes a function.

        Args:
          traced: The function.
          inputs: Its inputs: arrays or slots.
          kept: For each result, a tuple if it is stored on the host: of its
            sharding, or empty. Otherwise None.

        Returns:
          The results: arrays or slots.
        """
        jaxpr = with_consts_as_inputs(traced)
        inputs = [*traced.consts, *inputs]
        values: dict[Any, Any] = dict(zip(jaxpr.invars, inputs, strict=True))
        wanted = {
            v: want
            for v, want in zip(jaxpr.outvars, kept, strict=True)
            if want is not None and not isinstance(v, Literal)
        }
        for equation in reversed(jaxpr.eqns):
            if equation.primitive.name == "sharding_constraint":
                (result,), (operand,) = equation.outvars, equation.invars
                if result in wanted and not isinstance(operand, Literal):
                    wanted[operand] = (equation.params["sharding"],)
        for equation in jaxpr.eqns:
            operands = [read_value(v, values) for v in equation.invars]
            wants = [wanted.get(v) for v in equation.outvars]
            results = self._apply(equation, operands, wants, jaxpr)
            for variable, value in zip(equation.outvars, results, strict=True):
                values[variable] = value
                if not isinstance(value, _Slot) and value.ndim:
                    self._last = values, variable
        return [read_value(v, values) for v in jaxpr.outvars]

    def _apply(
        self,
        equation: JaxprEqn,
        operands: list[Any],
        wants: list[Any],
        jaxpr: Any,
    ) -> list[Any]:
        name = equation.primitive.name
        if any(isinstance(x, _Slot) for x in operands):
            if name == "sharding_constraint":
                # The slot has this sharding.
                return operands
            if name in ("jit", "pjit"):
                return self.compute(equation.params["jaxpr"], operands, wants)
            if name == "cond":
                return self._branch(equation, operands, wants)
        loaded = [self.load(x) if isinstance(x, _Slot) else x for x in operands]
        values = {
            v: x
            for v, x in zip(equation.invars, loaded, strict=True)
            if not isinstance(v, Literal)
        }
        results = compute_equations(
            jaxpr, [equation], equation.outvars, values.__getitem__
        )
        return [
            x if want is None else self.store(x, *want)
            for x, want in zip(results, wants, strict=True)
        ]

    def _branch(
        self, equation: JaxprEqn, operands: list[Any], wants: list[Any]
    ) -> list[Any]:
        """Computes a conditional whose branches move what they need."""
        kept = [want is not None for want in wants]
        index, *others = (
            x.value if isinstance(x, _Slot) else x for x in operands
        )

        def make(branch: ClosedJaxpr) -> Callable[..., list[Any]]:
            return lambda *arrays: _compute_kept(branch, arrays, kept)

        branches = list(map(make, equation.params["branches"]))
        results = jax.lax.switch(index, branches, *others)
        slots = [
            _Slot(x) if k else x for x, k in zip(results, kept, strict=True)
        ]
        self._stored += [x for x in slots if isinstance(x, _Slot)]
        return slots

    def load(self, slot: _Slot) -> Any:
        """Returns the slot's value on the devices."""
        if slot.copy is None:
            value = slot.value
            if len(self._stored) >= _WINDOW:
                first = self._stored[-_WINDOW]
                value, first.value = jax.lax.optimization_barrier(
                    (value, first.value)
                )
            elif self._last is not None:
                values, key = self._last
                value, values[key] = jax.lax.optimization_barrier(
                    (value, values[key])
                )
            slot.copy = jax.device_put(value, jax.memory.Space.Device)
        return slot.copy

    def store(self, value: Any, sharding: Any = None) -> _Slot:
        """Moves a new value of a slot to the host."""
        if sharding is not None:
            value = jax.lax.with_sharding_constraint(value, sharding)
        slot = _Slot(jax.device_put(value, jax.memory.Space.Host), value)
        self._stored.append(slot)
        return slot

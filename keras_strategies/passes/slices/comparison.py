"""Compares the operations of a function on the slices of stacked arrays.

Operations are compared by value numbering. While they are compared, a value is
its number, or a slice of the stack with that number.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jax.sharding import PartitionSpec

from keras_strategies._types import Array
from keras_strategies.passes.collective_cut import find_called_jaxpr
from keras_strategies.passes.sharded_calls import PLAIN_CALLS
from keras_strategies.passes.specs import stacks, unstacks
from keras_strategies.passes.stages import (
    equations_in,
    has_effects,
    names_in,
    references,
    update_values,
)
from keras_strategies.passes.value_numbers import ValueNumbers

BARRIER = "optimization_barrier"
_DRAWS = names_in("random_bits rng_bit_generator rng_uniform")


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice of a stacked array along its first dimension.

    Attributes:
      stack: The stacked array, or its number.
      index: The index of the slice.
      count: The number of slices of the stack.
    """

    stack: Any
    index: int
    count: int

    @property
    def place(self) -> tuple[int, int]:
        """The index, and the number of slices."""
        return self.index, self.count


Value = int | Slice
"""A value's number, or a slice of the stack with a number."""


@dataclasses.dataclass(frozen=True, eq=False)
class Operation:
    """An equation of a function.

    Attributes:
      jaxpr: The function.
      equation: The equation.
      operands: Its operands.
      results: Its results. If they are slices and it is neither a barrier nor
        a mapped function, the equation is computed on stacks.
      program: The operations of a mapped function, else None.
    """

    jaxpr: Jaxpr
    equation: JaxprEqn
    operands: list[Value]
    results: list[Value]
    program: "Program | None" = None

    def compute(self, *operands: Array) -> list[Any]:
        """Computes the equation; a result that nothing reads is None."""
        pairs = zip(self.equation.invars, operands, strict=True)
        values = {v: x for v, x in pairs if not isinstance(v, Literal)}
        update_values(self.jaxpr, [self.equation], values)
        return list(map(values.get, self.equation.outvars))


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The operations of a function, with called functions inlined.

    Attributes:
      inputs: Its inputs.
      operations: Its operations, in their order.
      outputs: Its outputs.
    """

    inputs: list[Value]
    operations: list[Operation]
    outputs: list[Value]


class Comparison:
    """A comparison of the operations on the slices of stacks.

    Attributes:
      constants: The values of constants, by number.
      numbers: The numbers of values.
    """

    def __init__(self) -> None:
        self.constants: dict[int, Any] = {}
        self.numbers = ValueNumbers()
        # For each operation on slices of a number of slices: their indices.
        self._indices: dict[tuple[Any, int], set[int]] = {}
        # The operations that are not the same for all slices.
        self._partial: set[tuple[Any, int]] = set()
        # How often each equation with an effect occurred.
        self._occurrences: Counter[int] = Counter()

    def compare(self, traced: ClosedJaxpr, inputs: list[Value]) -> Program:
        """Finds the operations of a function.

        An operation is computed on a stack if it is the same for all slices of
        the stack.

        Args:
          traced: The function.
          inputs: Its inputs.
        """
        while True:
            self._indices.clear()
            self._occurrences.clear()
            program = self._compare(traced.jaxpr, traced.consts, inputs)
            found = self._indices.items()
            partial = {key for key, each in found if len(each) < key[1]}
            if not partial:
                return program
            # If these are computed on slices, others may become partial.
            self._partial |= partial

    def _compare(
        self, jaxpr: Jaxpr, consts: Sequence[Any], inputs: list[Value]
    ) -> Program:
        operations: list[Operation] = []
        outputs = self._inline(jaxpr, consts, inputs, operations)
        return Program(inputs, operations, outputs)

    def _inline(
        self,
        jaxpr: Jaxpr,
        consts: Sequence[Any],
        inputs: Sequence[Value],
        operations: list[Operation],
    ) -> list[Value]:
        """Appends a function's operations to a list; returns its outputs."""
        known: dict[Any, Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, const in zip(jaxpr.constvars, consts, strict=True):
            number = self.numbers.number_object(const)
            self.constants[number] = const
            known[variable] = number

        def look_up(variable: Any) -> Value:
            if not isinstance(variable, Literal):
                return known[variable]
            number = self.numbers.number_literal(variable)
            self.constants[number] = variable.val
            return number

        for equation in jaxpr.eqns:
            operands = list(map(look_up, equation.invars))
            results = self._find_results(jaxpr, equation, operands, operations)
            known.update(zip(equation.outvars, results, strict=True))
        return list(map(look_up, jaxpr.outvars))

    def _find_results(
        self,
        jaxpr: Jaxpr,
        equation: JaxprEqn,
        operands: list[Value],
        operations: list[Operation],
    ) -> list[Value]:
        """Appends an equation's operations to a list; returns its results."""
        slices = [x for x in operands if isinstance(x, Slice)]
        if stacks(equation) and _are_all_slices(operands):
            return [slices[0].stack]
        if unstacks(equation) and not slices:
            (stack,) = operands
            count = len(equation.outvars)
            return [Slice(stack, i, count) for i in range(count)]
        name, program = equation.primitive.name, None
        if has_effects(equation) or references(equation):
            results = self._number_alone(equation)
        elif name == BARRIER:
            results = self._number_barrier(operands)
        elif len({x.place for x in slices}) == 1 and not _draws(equation):
            results = self._number_slices(jaxpr, equation, operands)
        elif slices and name in PLAIN_CALLS:
            called: Any = find_called_jaxpr(equation)
            return self._inline(called[0], called[1], operands, operations)
        elif slices and name == "shard_map":
            results, program = self._compare_mapped(equation, operands)
        else:
            results = self.numbers.number_results(jaxpr, equation, operands)
        operations.append(
            Operation(jaxpr, equation, operands, results, program)
        )
        return results

    def _number_alone(self, equation: JaxprEqn) -> list[Value]:
        """Returns the results of an equation that equals no other.

        A function that is called twice contains the equation twice.
        """
        number = self.numbers.number_object(equation)
        self._occurrences[number] += 1
        key = "alone", number, self._occurrences[number]
        return self.numbers.number_each(key, len(equation.outvars))

    def _number_slices(
        self, jaxpr: Jaxpr, equation: JaxprEqn, operands: Sequence[Value]
    ) -> list[Value]:
        """Returns the results of an operation on slices with one index."""
        of = next(x for x in operands if isinstance(x, Slice))
        number_results = self.numbers.number_results
        on_stacks = [
            ("slice", x.stack) if isinstance(x, Slice) else x for x in operands
        ]
        stacks = number_results(jaxpr, equation, [*on_stacks, of.count])
        key = tuple(stacks), of.count
        if key in self._partial:
            return number_results(jaxpr, equation, operands)
        self._indices.setdefault(key, set()).add(of.index)
        return [Slice(stack, *of.place) for stack in stacks]

    def _number_barrier(self, operands: Sequence[Value]) -> list[Value]:
        """Returns the results of a barrier, one for each operand."""
        whole = _find_whole_stacks((x, None) for x in operands)
        key = BARRIER, tuple(operands)
        return [
            Slice(self.numbers.number((key, x.stack)), *x.place)
            if isinstance(x, Slice) and (x.stack, None) in whole
            else self.numbers.number((key, x))
            for x in operands
        ]

    def _compare_mapped(
        self, equation: JaxprEqn, operands: list[Value]
    ) -> tuple[list[Value], Program]:
        """Compares the operations of a function mapped over the replicas."""
        params = equation.params
        place = self.numbers.number_object(equation)
        packed = Packed.of(operands, params["in_specs"])
        numbers = self.numbers.number_each(place, len(packed.values))
        inputs = packed.unpack(numbers)
        program = self._compare(params["jaxpr"], (), inputs)
        outputs = Packed.of(program.outputs, params["out_specs"])
        key = place, tuple(operands)
        numbers = self.numbers.number_each(key, len(outputs.values))
        return outputs.unpack(numbers), program


@dataclasses.dataclass(frozen=True)
class Packed:
    """Operands or results of a mapped function, with stacks for slices.

    Attributes:
      values: The stacks, and the other values.
      specs: Their specs.
      places: For each operand or result, its position in `values`; and for a
        slice of a stack in `values`, the slice's `place`, else None.
    """

    values: list[Value]
    specs: list[PartitionSpec]
    places: list[tuple[int, tuple[int, int] | None]]

    @classmethod
    def of(
        cls, values: Sequence[Value], specs: Sequence[PartitionSpec]
    ) -> "Packed":
        """Packs values.

        The slices of a stack with the same spec become the stack, if all slices
        are among them.

        Args:
          values: The values.
          specs: Their specs.
        """
        whole = _find_whole_stacks(zip(values, specs, strict=True))
        positions: dict[Any, int] = {}
        places: list[Any] = []
        for value, spec in zip(values, specs, strict=True):
            entering, place = value, None
            if isinstance(value, Slice) and (value.stack, spec) in whole:
                entering, place = value.stack, value.place
                spec = PartitionSpec(None, *spec)
            position = positions.setdefault((entering, spec), len(positions))
            places.append((position, place))
        packed, packed_specs = ([key[k] for key in positions] for k in (0, 1))
        return cls(packed, packed_specs, places)

    def unpack(self, values: Sequence[Any]) -> list[Any]:
        """Returns the operands or results, from values in place of `values`."""
        return [
            values[i] if place is None else Slice(values[i], *place)
            for i, place in self.places
        ]


def _draws(equation: JaxprEqn) -> bool:
    """Returns whether an equation draws random numbers.

    A stack of keys may draw others than each key alone (`rbg` keys).
    """
    return any(
        each.primitive.name in _DRAWS
        for each in (equation, *equations_in(equation))
    )


def _are_all_slices(values: Sequence[Value]) -> bool:
    """Returns whether values are all slices of one stack, in their order."""
    first = values[0]
    return isinstance(first, Slice) and list(values) == [
        Slice(first.stack, i, first.count) for i in range(first.count)
    ]


def _find_whole_stacks(
    values: Iterable[tuple[Value, Any]],
) -> set[tuple[int, Any]]:
    """Finds the stacks all of whose slices are among values, with one spec.

    Args:
      values: Pairs of a value and its spec.

    Returns:
      Pairs of a stack and the spec.
    """
    found: dict[tuple[int, Any, int], set[int]] = {}
    for value, spec in values:
        if isinstance(value, Slice):
            key = value.stack, spec, value.count
            found.setdefault(key, set()).add(value.index)
    return {key[:2] for key, each in found.items() if len(each) == key[2]}

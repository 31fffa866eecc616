"""Computes equal operations on all slices of stacked arrays as one operation.

A function of many arrays of the same shape, such as an optimizer update of the
weights of equal blocks, contains the same operations once for each array. If
these arrays are the slices of a stack, each such operation is computed once, on
the stack (`jax.vmap`).
"""

from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec

from keras_strategies._types import Array
from keras_strategies.passes.slices.comparison import (
    BARRIER,
    Comparison,
    Operation,
    Packed,
    Program,
    Slice,
    Value,
)
from keras_strategies.passes.stages import has_effects

Mapper = Callable[..., Callable[..., Any]]
"""A function that maps another over the replicas, with `in_specs` and
`out_specs`."""


def batch_slices(
    traced: ClosedJaxpr, inputs: Sequence[Array | Slice], mapper: Mapper
) -> list[Array | Slice]:
    """Computes a traced function, whose inputs may be slices.

    Args:
      traced: The function.
      inputs: Its inputs.
      mapper: Maps functions over the replicas, as `traced` does.

    Returns:
      The outputs. Those that the same operations compute from all slices of a
      stack are slices, too.
    """
    stacks = [x.stack if isinstance(x, Slice) else x for x in inputs]
    arrays = {id(array): array for array in stacks}
    comparison = Comparison()
    numbers = comparison.numbers.number_each("input", len(arrays))
    number_by_array = dict(zip(arrays, numbers, strict=True))
    values: list[Value] = [
        _map_stack(lambda array: number_by_array[id(array)], x) for x in inputs
    ]
    program = comparison.compare(traced, values)
    known = dict(zip(numbers, arrays.values(), strict=True))
    evaluation = _Evaluation(mapper, comparison.constants, known)
    evaluation.compute(program)
    return [_map_stack(evaluation.value, x) for x in program.outputs]


def _map_stack(fn: Callable[[Any], Any], value: Any) -> Any:
    """Applies a function to a value, or to the stack of a slice."""
    if isinstance(value, Slice):
        return Slice(fn(value.stack), *value.place)
    return fn(value)


class _Evaluation:
    """The values of a function's operations.

    Args:
      mapper: See `batch_slices`.
      constants: The values of constants, by number.
      inputs: The values of the inputs, by number.
    """

    def __init__(
        self, mapper: Mapper, constants: dict[Any, Any], inputs: dict[Any, Any]
    ) -> None:
        self._mapper = mapper
        self._constants = constants
        self._values = ChainMap(inputs, constants)

    def compute(self, program: Program) -> None:
        """Computes all operations of a function."""
        for operation in program.operations:
            numbers = list(map(_read_number, operation.results))
            is_known = all(number in self._values for number in numbers)
            if not is_known or has_effects(operation.equation):
                values = self._compute(operation)
                self._values.update(zip(numbers, values, strict=True))

    def value(self, value: Value) -> Any:
        """Returns a value as an array."""
        if isinstance(value, Slice) and value not in self._values:
            stack = self._values[value.stack]
            self._values[value] = jax.lax.index_in_dim(
                stack, value.index, keepdims=False
            )
        return self._values[value]

    def _compute(self, operation: Operation) -> Sequence[Any]:
        if operation.program is not None:
            return self._compute_mapped(operation, operation.program)
        if operation.equation.primitive.name == BARRIER:
            return self._compute_barrier(operation)
        if any(isinstance(x, Slice) for x in operation.results):
            return self._compute_on_stacks(operation)
        return operation.compute(*map(self.value, operation.operands))

    def _compute_on_stacks(self, operation: Operation) -> Sequence[Any]:
        operands = [self.value(_read_number(x)) for x in operation.operands]
        if operation.equation.primitive.name == "sharding_constraint":
            # JAX's rule would let XLA choose how to shard the new dimension.
            sharding = operation.equation.params["sharding"]
            spec = PartitionSpec(None, *sharding.spec)
            sharding = NamedSharding(sharding.mesh, spec)
            return [jax.lax.with_sharding_constraint(operands[0], sharding)]
        axes = [0 if isinstance(x, Slice) else None for x in operation.operands]
        return jax.vmap(operation.compute, axes)(*operands)

    def _compute_barrier(self, operation: Operation) -> list[Any]:
        pairs = zip(operation.operands, operation.results, strict=True)
        entering = [
            _read_number(x) if isinstance(result, Slice) else x
            for x, result in pairs
        ]
        distinct = list(dict.fromkeys(entering))
        leaving = jax.lax.optimization_barrier(list(map(self.value, distinct)))
        values = dict(zip(distinct, leaving, strict=True))
        return [values[x] for x in entering]

    def _compute_mapped(
        self, operation: Operation, program: Program
    ) -> list[Any]:
        params = operation.equation.params
        packed = Packed.of(operation.operands, params["in_specs"])
        outputs = Packed.of(program.outputs, params["out_specs"])
        numbers = dict.fromkeys(map(_read_number, program.inputs))

        def compute(*arrays: Array) -> list[Any]:
            inputs = dict(zip(numbers, arrays, strict=True))
            inner = _Evaluation(self._mapper, self._constants, inputs)
            inner.compute(program)
            return [jnp.asarray(inner.value(x)) for x in outputs.values]

        results = self._mapper(
            compute, in_specs=tuple(packed.specs), out_specs=outputs.specs
        )(*map(self.value, packed.values))
        return [results[i] for i, _ in outputs.places]


def _read_number(value: Value) -> int:
    """Returns a value's number; of a slice, its stack's."""
    return value.stack if isinstance(value, Slice) else value

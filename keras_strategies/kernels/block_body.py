"""One of a model's equal blocks, as the body of a loop over the blocks."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import jax
import keras
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from keras import tree
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask

from keras_strategies._types import Array
from keras_strategies.hooks.on_read import is_on_read
from keras_strategies.hooks.variable_writes import is_user_defined
from keras_strategies.hooks.variables_used import InnerScope
from keras_strategies.keras_bridge.step_context import current_step
from keras_strategies.kernels.equal_blocks import Blocks
from keras_strategies.passes.stages import has_effects


def compute_call(
    node: Any,
    values: MutableMapping[int, Any],
    operation_fn: Callable[[Any], Callable[..., Any]],
) -> None:
    """Computes a call in a graph, and adds its outputs to `values`.

    Args:
      node: The call.
      values: The values of symbolic tensors, by the tensors' ids.
      operation_fn: The function that prepares an operation for its call.
    """
    args, kwargs = node.arguments.fill_in(values)
    outputs = tree.flatten(operation_fn(node.operation)(*args, **kwargs))
    values.update(zip(map(id, node.output_tensors), outputs, strict=False))


@dataclasses.dataclass(frozen=True, eq=False)
class BlockCalls:
    """A run of equal blocks, of which each can be computed for any input.

    Attributes:
      blocks: The blocks.
      nodes: The calls in the graph, by the ids of their operations.
      values: The values of symbolic tensors that are computed before the
        blocks, by the tensors' ids.
      operation_fn: The function that prepares an operation for its call.
    """

    blocks: Blocks
    nodes: Mapping[int, Any]
    values: MutableMapping[int, Any]
    operation_fn: Callable[[Any], Callable[..., Any]]

    def compute(self, number: int, value: Array) -> Array:
        """Computes one block for an input, and returns the block's output.

        Args:
          number: The block's number.
          value: The input. In the graph, it is the output of the previous
            block.
        """
        new = {self.blocks.tensors[number]: value}
        values = collections.ChainMap(new, self.values)
        for operation in self.blocks.segments[number]:
            compute_call(self.nodes[id(operation)], values, self.operation_fn)
        return values[self.blocks.tensors[number + 1]]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TracedBlock:
    """One of the blocks, traced alone.

    Attributes:
      jaxpr: The trace, a function of the input, its mask if it has one, and
        the values of the block's variables.
      structure: The structure of the results.
      written: The indices of the variables that the block writes.
      problem: The reason why the block cannot be the body of a loop, or "".
    """

    jaxpr: ClosedJaxpr
    structure: Any
    written: list[int]
    problem: str

    def __call__(self, carry: Any, values: list[Any]) -> Any:
        """Computes the block.

        Args:
          carry: The input, and its mask or None.
          values: The values of the block's variables.

        Returns:
          The output and its mask or None, and the values that are written to
          variables.
        """
        results = jaxpr_as_fun(self.jaxpr)(*jax.tree.leaves((carry, values)))
        return jax.tree.unflatten(self.structure, results)


def trace_block(
    calls: BlockCalls,
    number: int,
    variables: list[keras.Variable],
    carry: Any,
    values: list[Any],
) -> TracedBlock:
    """Traces one of the blocks.

    Args:
      calls: The blocks.
      number: The block's number.
      variables: The block's variables.
      carry: See `TracedBlock.__call__`. Only shapes matter.
      values: See `TracedBlock.__call__`. Only shapes matter.
    """
    problem, written = "", []

    def compute(carry: Any, values: list[Any]) -> tuple[Any, list[Any]]:
        nonlocal problem, written
        value, mask = carry
        if mask is not None:
            set_keras_mask(value, mask)
        with InnerScope(zip(variables, values, strict=True)) as inner:
            num_losses = len(inner.losses)
            output = calls.compute(number, value)
        _forget(calls, number, inner.losses[num_losses:])
        new_carry = output, get_keras_mask(output)
        written = [i for i, v in enumerate(variables) if v in inner.written]
        own = [variables[i] for i in written]
        if len(inner.losses) > num_losses:
            problem = "a block adds a loss"
        elif _describe_carry(new_carry) != _describe_carry(carry):
            problem = "a block changes the shape, dtype or mask of its input"
        elif len(own) < len(inner.written) or not all(map(_is_plain, own)):
            problem = "a block writes a shared or user-defined variable"
        return new_carry, [inner.get_current_value(v) for v in own]

    jaxpr, shapes = jax.make_jaxpr(compute, return_shape=True)(carry, values)
    if any(map(has_effects, jaxpr.jaxpr.eqns)):
        problem = problem or "a block prints, or calls back into Python"
    layers = _iter_layers(calls, number)
    if any(isinstance(v, Tracer) for x in layers for v in vars(x).values()):
        problem = problem or "a layer of a block keeps an array"
    return TracedBlock(
        jaxpr=jaxpr,
        structure=jax.tree.structure(shapes),
        written=written,
        problem=problem,
    )


def _forget(calls: BlockCalls, number: int, losses: list[Any]) -> None:
    """Clears the ids of losses that a trace of a block added."""
    ids = set(map(id, losses))
    for layer in _iter_layers(calls, number) if ids else ():
        layer._loss_ids.difference_update(ids)


def _iter_layers(calls: BlockCalls, number: int) -> Iterator[keras.Layer]:
    for operation in calls.blocks.segments[number]:
        if isinstance(operation, keras.Layer):
            yield from operation._flatten_layers()


def _is_plain(variable: keras.Variable) -> bool:
    """Returns whether no rule combines what replicas write to a variable."""
    step = current_step()
    rules = () if step is None else step.notes.metric_rules
    return not (
        is_user_defined(variable)
        or is_on_read(variable)
        or hasattr(variable, "_ks_merge")
        or variable in rules
    )


def _describe_carry(carry: Any) -> list[Any]:
    """Returns the shapes and dtypes of a value and its mask, or None."""
    return [None if x is None else (x.shape, str(x.dtype)) for x in carry]

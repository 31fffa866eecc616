"""Computes equal blocks of a model in one loop (`jax.lax.scan`).

While a step is traced, the calls of the first two blocks in a marked model's
graph are recorded instead of computed. The second block's calls are then the
body of a loop over all blocks, whose variables' values are stacked. The loop's
result takes the place of the last block's output.
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
from keras import tree
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.ops.function import Function

from keras_strategies._core.attributes import temporary_attribute
from keras_strategies._core.identity import IdentitySet
from keras_strategies._core.jaxprs.sharded_calls import stack_values
from keras_strategies._core.jaxprs.traces import is_tracing
from keras_strategies._types import Array, Tree
from keras_strategies.keras_bridge.hooks.on_read import is_on_read
from keras_strategies.keras_bridge.hooks.variable_writes import is_user_defined
from keras_strategies.keras_bridge.hooks.variables_used import InnerScope
from keras_strategies.keras_bridge.layers.equal_blocks import (
    Blocks,
    find_all_blocks,
    find_blocks_of,
    get_graph,
)
from keras_strategies.keras_bridge.patches import Patches
from keras_strategies.keras_bridge.step_context import current_step

_MARK = "_ks_scans_blocks"


def scan_blocks(model: keras.Model) -> list[list[str]]:
    """Makes a strategy's steps compute a model's equal blocks in one loop.

    A program then contains one block instead of all: it is compiled in the time
    of one block, and its size does not grow with the number of blocks. Results
    are those of the unrolled model. Weights keep their names and shapes. The
    runs of equal blocks are found in the model's graph and in those of its
    nested models: at least 4 parts with the same configuration, each of which
    reads one output of the previous part.

    Args:
      model: A built functional or sequential model. Models that are called
        outside of a strategy's steps are computed as before.

    Returns:
      For each run, the names of the layers at the end of the blocks.

    Raises:
      ValueError: if the model has no equal blocks.

    Example:
      ```python
      strategy = ks.MirroredStrategy()
      with strategy.scope():
          blocks = [keras.layers.Dense(64, "tanh") for _ in range(8)]
          model = keras.Sequential([keras.Input((64,)), *blocks])
          ks.experimental.scan_blocks(model)
          model.compile("adam", "mse")
      ```

    References:
      https://docs.jax.dev/en/latest/_autosummary/jax.lax.scan.html
    """
    runs = list(find_all_blocks(model))
    if not runs:
        raise ValueError(
            "`scan_blocks` must be called with a functional or sequential "
            "model that has at least 4 equal blocks, one after another. "
            f"Received: {model.name!r} of type {type(model).__name__}, whose "
            "graph has no such blocks. Create the blocks with the same "
            "arguments, or leave the model unrolled."
        )
    for blocks in runs:
        vars(get_graph(blocks.model))[_MARK] = True
    return [[op.name for op, _ in blocks.trunks] for blocks in runs]


@contextlib.contextmanager
def scanning_blocks() -> Iterator[None]:
    """Computes marked blocks in loops while the block, which traces, runs."""
    with _patches.hold(), temporary_attribute(_thread, "is_in_step", True):
        yield


def unrolled_blocks() -> contextlib.AbstractContextManager[None]:
    """Leaves blocks unrolled in the traces of this thread, for a block."""
    return temporary_attribute(_thread, "is_unrolled", True)


class _Thread(threading.local):
    is_in_step = False
    is_unrolled = False


_thread = _Thread()


def _wrap_graph(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run_graph(graph: Any, *args: Any, **kwargs: Any) -> Tree:
        is_wanted = _thread.is_in_step and not _thread.is_unrolled
        is_scanned = _MARK in vars(graph) and is_wanted and is_tracing()
        if is_scanned and get_stateless_scope():
            # Found again, because a layer may have been frozen since.
            runs = find_blocks_of(graph)
            if not runs:
                _warn(graph, "they are not equal any more")
            for blocks in runs:
                run = _GraphRun(blocks, kwargs["operation_fn"])
                kwargs["operation_fn"] = run.choose
        return original(graph, *args, **kwargs)

    return run_graph


_patches = Patches(lambda: [(Function, "_run_through_graph", _wrap_graph)])


class _NotScanned(Exception):
    """Raised by a block that a loop cannot compute."""


class _Token:
    """Stands for a tensor inside of the blocks.

    Attributes:
      value: Its value, if blocks are computed one by one after all.
    """

    value: Any = None


class _Call:
    """A recorded call of an operation.

    Attributes:
      operation: The operation.
      arguments: Its positional and keyword arguments; tensors of the blocks are
        tokens.
      outputs: The tokens of its outputs.
    """

    def __init__(self, operation: Any, args: Any, kwargs: Any) -> None:
        self.operation = operation
        self.arguments = args, kwargs
        self.outputs = tree.map_structure(lambda _: _Token(), operation.output)


class _GraphRun:
    """One run through the graph of a model with equal blocks.

    Args:
      blocks: The blocks.
      operation_fn: The function that prepares an operation for its call.
    """

    def __init__(
        self, blocks: Blocks, operation_fn: Callable[..., Any]
    ) -> None:
        self._blocks = blocks
        self._operation_fn = operation_fn
        self._part_of = {
            id(operation): number
            for number, segment in enumerate(blocks.segments)
            for operation in segment
        }
        self._calls: list[_Call] = []
        self._result: Any = None
        self._is_unrolled = False

    def choose(self, operation: Any) -> Callable[..., Any]:
        """Returns what is called in an operation's place."""
        number = self._part_of.get(id(operation))
        if number is None:
            return self._operation_fn(operation)
        if self._is_unrolled:
            return functools.partial(self._call, operation)
        if number > 1:
            return functools.partial(self._skip, operation)
        return functools.partial(self._record, operation)

    def _record(self, operation: Any, *args: Any, **kwargs: Any) -> Tree:
        call = _Call(operation, args, kwargs)
        self._calls.append(call)
        size = len(self._blocks.segments[0])
        if len(self._calls) == 2 * size:
            try:
                self._result = self._scan(
                    self._calls[:size], self._calls[size:]
                )
            except _NotScanned as reason:
                self._unroll(str(reason))
        return call.outputs

    def _skip(self, operation: Any, *args: Any, **kwargs: Any) -> Tree:
        outputs = tree.map_structure(lambda _: _Token(), operation.output)
        last, index = self._blocks.trunks[-1]
        if operation is not last:
            return outputs
        leaves = _flatten(outputs)
        leaves[index] = self._result
        return tree.pack_sequence_as(outputs, leaves)

    def _unroll(self, reason: str) -> None:
        _warn(self._blocks.model, reason)
        self._is_unrolled = True
        for call in self._calls:
            args, kwargs = call.arguments
            values = self._call(call.operation, *args, **kwargs)
            for token, value in zip(
                _flatten(call.outputs), _flatten(values), strict=True
            ):
                token.value = value

    def _call(self, operation: Any, *args: Any, **kwargs: Any) -> Tree:
        given: Any = tree.map_structure(
            lambda x: x.value if isinstance(x, _Token) else x, (args, kwargs)
        )
        return self._operation_fn(operation)(*given[0], **given[1])

    def _scan(self, first: Sequence[_Call], second: Sequence[_Call]) -> Array:
        """Computes all blocks in a loop and returns the last trunk."""
        operation, index = self._blocks.trunks[0]
        (maker,) = [c for c in first if c.operation is operation]
        trunk = _flatten(maker.outputs)[index]
        (entering,) = {
            id(a): a
            for one, other in zip(first, second, strict=True)
            for a, b in zip(
                _flatten(one.arguments),
                _flatten(other.arguments),
                strict=True,
            )
            if b is trunk
        }.values()
        scope: Any = get_stateless_scope()
        columns = _find_variables(self._blocks)
        inner_variables = [column[1] for column in columns]
        stacked = [
            stack_values([_read(scope, v) for v in column])
            for column in columns
        ]
        written: list[Any] = []

        def block(carry: Any, slices: list[Any]) -> tuple[Any, list[Any]]:
            value, mask = carry
            if mask is not None:
                set_keras_mask(value, mask)
            pairs = zip(inner_variables, slices, strict=True)
            with InnerScope(pairs) as inner:
                num_losses = len(inner.losses)
                output = self._compute(second, {id(trunk): value})
            if len(inner.losses) > num_losses:
                self._forget(inner.losses[num_losses:])
                raise _NotScanned("a block adds a loss")
            new_carry = output, get_keras_mask(output)
            if _describe(new_carry) != _describe(carry):
                raise _NotScanned(
                    "the output of a block, or its mask, has another shape or "
                    "dtype than the block's input"
                )
            written[:] = [v for v in inner_variables if v in inner.written]
            if len(written) < len(inner.written):
                raise _NotScanned("blocks write a variable that they share")
            if not all(map(_is_plain, written)):
                raise _NotScanned("a block writes a variable of its own")
            return new_carry, [inner.get_current_value(v) for v in written]

        carry = entering, get_keras_mask(entering)
        (result, mask), new = jax.lax.scan(block, carry, stacked)
        columns = [c for c in columns if c[1] in IdentitySet(written)]
        for values, column in zip(new, columns, strict=True):
            for update in zip(column, list(values), strict=True):
                scope.add_update(update)
        if mask is not None:
            set_keras_mask(result, mask)
        return result

    def _forget(self, losses: list[Any]) -> None:
        """Clears the ids of losses that an aborted trace added."""
        ids = set(map(id, losses))
        for operation in self._blocks.segments[1]:
            if isinstance(operation, keras.Layer):
                for layer in operation._flatten_layers():
                    layer._loss_ids.difference_update(ids)

    def _compute(
        self, calls: Sequence[_Call], values: dict[int, Array]
    ) -> Array:
        """Computes one block's calls and returns the block's trunk."""

        def value_of(argument: Any) -> Any:
            is_token = isinstance(argument, _Token)
            return values[id(argument)] if is_token else argument

        for call in calls:
            given: Any = tree.map_structure(value_of, call.arguments)
            outputs = self._operation_fn(call.operation)(*given[0], **given[1])
            values |= zip(
                map(id, _flatten(call.outputs)),
                _flatten(outputs),
                strict=True,
            )
        operation, index = self._blocks.trunks[1]
        (maker,) = [c for c in calls if c.operation is operation]
        return values[id(_flatten(maker.outputs)[index])]


def _warn(model: keras.Model, reason: str) -> None:
    warnings.warn(
        f"The equal blocks of {model.name!r} are computed one by one, not in a "
        f"loop: {reason}.",
        UserWarning,
        stacklevel=2,
    )


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


def _flatten(nest: Tree) -> list[Any]:
    return list(tree.flatten(nest) or ())


def _describe(carry: Any) -> list[Any]:
    return [None if x is None else (x.shape, str(x.dtype)) for x in carry]


def _read(scope: keras.StatelessScope, variable: keras.Variable) -> Array:
    """Returns a variable's value in a scope, in the variable's dtype."""
    value = scope.get_current_value(variable)
    return variable._value if value is None else value


def _find_variables(blocks: Blocks) -> list[list[keras.Variable]]:
    """Returns, for each variable of a block, that variable in all blocks.

    Variables that all blocks share are left out.
    """
    rows = []
    for segment in blocks.segments:
        of_segment = [v for op in segment for v in getattr(op, "variables", ())]
        rows.append(list({id(v): v for v in of_segment}.values()))
    if len(set(map(len, rows))) > 1:
        raise _NotScanned("blocks share some of their variables")
    columns = []
    for column in map(list, zip(*rows, strict=True)):
        different = len(set(map(id, column)))
        if different == len(column):
            columns.append(column)
        elif different > 1:
            raise _NotScanned("some of the blocks share a variable")
    return columns

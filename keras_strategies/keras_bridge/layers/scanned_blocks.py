"""Computes equal blocks of a model in one loop (`jax.lax.scan`).

While a step is traced, the calls of a run of blocks in a marked model's graph
are recorded instead of computed. Each block is then traced alone. If all
compute the same values and gradients from their inputs and variables, the first
block's calls are the body of a loop over all blocks, whose variables' values
are stacked. Otherwise the blocks are computed one by one.
"""

import contextlib
import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import keras
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.ops.function import Function

from keras_strategies._core.attributes import temporary_attribute
from keras_strategies._core.identity import IdentitySet
from keras_strategies._core.jaxprs.equal_functions import compute_same
from keras_strategies._core.jaxprs.sharded_calls import stack_values
from keras_strategies._core.jaxprs.traces import is_tracing
from keras_strategies._types import Array, Tree
from keras_strategies.keras_bridge.hooks.on_read import is_on_read
from keras_strategies.keras_bridge.hooks.variable_writes import is_user_defined
from keras_strategies.keras_bridge.hooks.variables_used import InnerScope
from keras_strategies.keras_bridge.layers.block_calls import (
    BlockCalls,
    flatten,
    resolve,
)
from keras_strategies.keras_bridge.layers.equal_blocks import (
    Blocks,
    find_all_blocks,
    find_blocks_of,
    get_graph,
    iter_functional_parts,
)
from keras_strategies.keras_bridge.patches import Patches
from keras_strategies.keras_bridge.step_context import current_step

_MARK = "_ks_scans_blocks"
_REASONS = "_ks_reasons_against_scans"
_RUNS = "_ks_runs_of_blocks"


def scan_blocks(model: keras.Model) -> list[list[str]]:
    """Makes a strategy's steps compute a model's equal blocks in one loop.

    A program then contains one block instead of all, so it is smaller and
    compiles faster. Results are those of the unrolled model, up to rounding.
    Weights keep their names and shapes. The function finds runs of equal blocks
    in the model's graph and in the graphs of its nested models. A run is at
    least 4 blocks with the same configuration, each of which reads one output
    of the previous block. If a step's trace shows that blocks differ after all
    (for example in a constant), they are computed one by one, with a warning.

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


def find_columns(model: keras.Model) -> list[list[keras.Variable]]:
    """Finds the variables that loops over a model's blocks stack.

    Returns:
      For each variable of a marked block, that variable in all blocks.
    """
    columns: list[list[keras.Variable]] = []
    for part in iter_functional_parts(model):
        # Most models are not marked, and need no search.
        is_marked = _MARK in vars(get_graph(part))
        for blocks in find_blocks_of(part) if is_marked else ():
            with contextlib.suppress(_NotScanned):
                columns += _find_variables(blocks)
    return columns


def are_scanned(blocks: Blocks) -> bool:
    """Returns whether `scan_blocks` marked the graph of some blocks."""
    return _MARK in vars(get_graph(blocks.model))


class _Thread(threading.local):
    is_in_step = False


_thread = _Thread()


def _wrap_graph(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def run_graph(graph: Any, inputs: Tree, *args: Any, **kwargs: Any) -> Tree:
        is_wanted = _thread.is_in_step and is_tracing()
        is_scanned = _MARK in vars(graph) and is_wanted
        is_symbolic = any(
            isinstance(x, keras.KerasTensor) for x in flatten(inputs)
        )
        if not is_scanned or is_symbolic or get_stateless_scope() is None:
            return original(graph, inputs, *args, **kwargs)
        runs = _find_runs(graph)
        if not runs:
            _warn(graph, "they are not equal any more")
        # Keras 3.15 passes a function, Keras 3.16 none.
        operation_fn = kwargs.pop("operation_fn", _return_operation)
        calls_of: dict[int, BlockCalls] = {}
        for blocks in runs:
            operations = itertools.chain(*blocks.segments)
            calls = BlockCalls(blocks, operation_fn)
            calls_of |= dict.fromkeys(map(id, operations), calls)

        def choose(operation: Any) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Tree:
                args, kwargs = resolve((args, kwargs))
                calls = calls_of.get(id(operation))
                if calls is None:
                    return operation_fn(operation)(*args, **kwargs)
                outputs = calls.record(operation, args, kwargs)
                if calls.is_complete:
                    _compute(graph, calls)
                return outputs

            return call

        kwargs["operation_fn"] = choose
        return resolve(original(graph, inputs, *args, **kwargs))

    return run_graph


def _find_runs(graph: Any) -> list[Blocks]:
    """Finds the blocks again, because a layer may have been frozen since."""
    if not _is_repeated() or _RUNS not in vars(graph):
        vars(graph)[_RUNS] = find_blocks_of(graph)
    return vars(graph)[_RUNS]


def _is_repeated() -> bool:
    """Returns whether the step is traced again with other numbers of rows."""
    step = current_step()
    return step is not None and (step.facts.is_probe or step.facts.is_twin)


def _return_operation(operation: Any) -> Any:
    return operation


_patches = Patches(lambda: [(Function, "_run_through_graph", _wrap_graph)])


class _NotScanned(Exception):
    """Raised if a loop cannot compute blocks."""


def _compute(graph: Any, calls: BlockCalls) -> None:
    """Computes all blocks of a run in a loop, or else one by one."""
    # The blocks were compared in the first trace.
    is_repeated = _is_repeated()
    reasons = vars(graph).setdefault(_REASONS, {})
    key = tuple(id(operation) for operation, _ in calls.blocks.trunks)
    try:
        if is_repeated and reasons.get(key):
            raise _NotScanned(reasons[key])
        _scan(calls, is_checked=not (is_repeated and key in reasons))
        reasons[key] = ""
    except _NotScanned as error:
        reasons[key] = str(error)
        if not is_repeated:
            _warn(calls.blocks.model, reasons[key])
        calls.compute_all()


def _scan(calls: BlockCalls, *, is_checked: bool) -> None:
    """Computes all blocks of a run in a loop.

    Args:
      calls: The recorded calls.
      is_checked: Whether to check that the blocks compute the same.

    Raises:
      _NotScanned: if a loop cannot compute the blocks.
    """
    scope: Any = get_stateless_scope()
    columns = _find_variables(calls.blocks)
    values = [[_read(scope, v) for v in column] for column in columns]
    bodies = [
        _Body(calls, number, [column[number] for column in columns])
        for number in range(len(calls.blocks))
    ]
    carry = calls.entering, get_keras_mask(calls.entering)
    if is_checked:
        _check_equal(bodies, carry, [column[0] for column in values])
    stacked = list(map(stack_values, values))
    (result, mask), new = jax.lax.scan(
        bodies[0].compute, carry, stacked, length=len(bodies)
    )
    written = [c for c in columns if c[0] in bodies[0].written]
    for column, slices in zip(written, new, strict=True):
        for update in zip(column, list(slices), strict=True):
            scope.add_update(update)
    if mask is not None:
        set_keras_mask(result, mask)
    calls.set_result(result)


class _Body:
    """One of the blocks, as the body of a loop.

    Args:
      calls: The recorded calls of the blocks.
      number: The block's number.
      variables: The block's variables.

    Attributes:
      written: The variables that the last call wrote.
    """

    def __init__(
        self, calls: BlockCalls, number: int, variables: list[keras.Variable]
    ) -> None:
        self._calls = calls
        self._number = number
        self._variables = variables
        self.written = IdentitySet()

    def compute(self, carry: Any, values: list[Any]) -> tuple[Any, list[Any]]:
        """Computes the block.

        Args:
          carry: The input, and its mask or None.
          values: The values of the block's variables.

        Returns:
          The output and its mask or None, and the values that were written to
          variables.

        Raises:
          _NotScanned: if the block cannot be the body of a loop.
        """
        value, mask = carry
        if mask is not None:
            set_keras_mask(value, mask)
        with InnerScope(zip(self._variables, values, strict=True)) as inner:
            num_losses = len(inner.losses)
            output = self._calls.compute(self._number, value)
        if len(inner.losses) > num_losses:
            self._forget(inner.losses[num_losses:])
            raise _NotScanned("a block adds a loss")
        new_carry = output, get_keras_mask(output)
        if _describe(new_carry) != _describe(carry):
            raise _NotScanned(
                "the output of a block, or its mask, has another shape or "
                "dtype than the block's input"
            )
        written = [v for v in self._variables if v in inner.written]
        if len(written) < len(inner.written):
            raise _NotScanned("blocks write a variable that they share")
        if not all(map(_is_plain, written)):
            raise _NotScanned("a block writes a variable of its own")
        self.written = IdentitySet(written)
        return new_carry, [inner.get_current_value(v) for v in written]

    def _forget(self, losses: list[Any]) -> None:
        """Clears the ids of losses that an aborted trace added."""
        ids = set(map(id, losses))
        for operation in self._calls.blocks.segments[self._number]:
            if isinstance(operation, keras.Layer):
                for layer in operation._flatten_layers():
                    layer._loss_ids.difference_update(ids)


def _check_equal(
    bodies: Sequence[_Body], carry: Any, values: list[Any]
) -> None:
    """Checks that all blocks compute the same from inputs and variables.

    Raises:
      _NotScanned: if they differ, or cannot be traced alone.
    """
    try:
        are_equal = compute_same([b.compute for b in bodies], carry, values)
    except _NotScanned:
        raise
    except Exception as error:
        raise _NotScanned(
            "a block cannot be computed without the others "
            f"({type(error).__name__}: {error})"
        ) from error
    if not are_equal:
        raise _NotScanned("blocks differ in their operations or constants")


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

"""Computes equal blocks of a model in one loop (`jax.lax.scan`).

On TPUs, this is the default for 8 or more blocks. While a step is
traced, each block of a run in a model's graph is traced alone. If all compute
the same values and gradients from their inputs and variables, the first block's
calls are the body of a loop over all blocks, whose variables' values are
stacked. Otherwise the blocks are computed one by one.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import keras
from jax.extend.core import ClosedJaxpr
from keras import tree
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.ops.function import Function

from keras_strategies._types import Array, Tree
from keras_strategies.keras_bridge.patches import Patch, replacement
from keras_strategies.keras_bridge.step_context import current_step
from keras_strategies.kernels.block_body import (
    BlockCalls,
    TracedBlock,
    compute_call,
    trace_block,
)
from keras_strategies.kernels.equal_blocks import (
    Blocks,
    find_all_blocks,
    find_equal_blocks,
    get_graph,
    iter_calls,
    iter_functional_parts,
    list_variables,
)
from keras_strategies.kernels.mapped_kernels import current_trace
from keras_strategies.passes.specs import stack_values
from keras_strategies.passes.traces import is_tracing
from keras_strategies.passes.value_numbers import compute_same
from keras_strategies.spmd.mesh import ReplicaMesh

_MARK = "_ks_scans_blocks"
_RUNS = "_ks_runs_of_blocks"
_PLATFORMS = ("tpu",)
_MIN_BLOCKS = 8
"""The smallest number of blocks that are computed in a loop by default."""


def scan_blocks(model: keras.Model, is_scanned: bool = True) -> list[list[str]]:
    """Makes a strategy's steps compute a model's equal blocks in one loop.

    On TPUs, steps do so by default for runs of at least 8 equal blocks
    that can be computed in a loop.

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
      is_scanned: False to compute the model's blocks one by one, on all
        devices.

    Returns:
      For each run, the names of the layers at the end of the blocks.

    Raises:
      ValueError: if the model has no equal blocks, unless `is_scanned` is
        False.

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
    if not is_scanned:
        for part in iter_functional_parts(model):
            vars(get_graph(part))[_MARK] = False
    runs = list(find_all_blocks(model))
    if not runs and is_scanned:
        raise ValueError(
            "`scan_blocks` must be called with a functional or sequential "
            "model that has at least 4 equal blocks, one after another. "
            f"Received: {model.name!r} of type {type(model).__name__}, whose "
            "graph has no such blocks. Create the blocks with the same "
            "arguments, or leave the model unrolled."
        )
    for blocks in runs:
        graph = get_graph(blocks.model)
        vars(graph)[_MARK] = is_scanned
        vars(graph).pop(_RUNS, None)
    return [[block[-1].name for block in run.segments] for run in runs]


def find_columns(
    model: keras.Model, mesh: ReplicaMesh
) -> list[list[keras.Variable]]:
    """Finds the variables that loops over a model's blocks stack.

    Returns:
      For each variable of a block in a loop, that variable in all blocks.
    """
    columns: list[list[keras.Variable]] = []
    for part in iter_functional_parts(model):
        for blocks in _find_runs(get_graph(part), mesh):
            columns += _find_variables(blocks)[0]
    return columns


def find_block_patches() -> Iterator[Patch]:
    """Yields the patch by which steps compute equal blocks in loops."""
    yield Function, "_run_through_graph", _run_through_graph


@replacement
def _run_through_graph(
    original: Callable[..., Any],
    graph: Any,
    inputs: Tree,
    *args: Any,
    **kwargs: Any,
) -> Tree:
    trace, given = current_trace(), tree.flatten(inputs)
    is_symbolic = any(isinstance(x, keras.KerasTensor) for x in given)
    is_step = is_tracing() and get_stateless_scope() is not None
    runs = []
    if trace is not None and is_step and not is_symbolic:
        runs = _find_runs(graph, trace.mesh)
        if not runs and vars(graph).get(_MARK):
            _warn(graph, "they are not equal any more")
    if not runs:
        return original(graph, inputs, *args, **kwargs)
    # Keras 3.15 passes a function, Keras 3.16 none.
    operation_fn = kwargs.get("operation_fn", lambda operation: operation)
    return _run_graph(graph, runs, given, operation_fn)


def _run_graph(
    graph: Any,
    runs: list[Blocks],
    inputs: list[Any],
    operation_fn: Callable[..., Any],
) -> Tree:
    """Computes a graph like Keras, but its runs of blocks in loops."""
    blocks_by_first = {id(blocks.segments[0][0]): blocks for blocks in runs}
    nodes = {id(node.operation): node for node in iter_calls(graph)}
    values = dict(zip(map(id, graph.inputs), inputs, strict=False))
    computed: set[int] = set()
    for node in iter_calls(graph):
        blocks = blocks_by_first.get(id(node.operation))
        if blocks is not None:
            calls = BlockCalls(blocks, nodes, values, operation_fn)
            # Keras's layers may take masks off the tensors that they read.
            masks = [(x, get_keras_mask(x)) for x in values.values()]
            result = _compute(graph, calls)
            if result is not None:
                values[blocks.tensors[-1]] = result
                computed.update(map(id, itertools.chain(*blocks.segments)))
            else:
                _restore_masks(masks)
        if id(node.operation) not in computed:
            compute_call(node, values, operation_fn)
    outputs = [values[id(tensor)] for tensor in graph.outputs]
    return tree.pack_sequence_as(graph._outputs_struct, outputs)


def _restore_masks(masks: list[tuple[Any, Any]]) -> None:
    for tensor, mask in masks:
        if get_keras_mask(tensor) is not mask:
            set_keras_mask(tensor, mask)


def _find_runs(graph: Any, mesh: ReplicaMesh) -> list[Blocks]:
    """Finds the blocks of a graph that are computed in loops.

    They are searched again if a layer was frozen or unfrozen since.
    """
    is_marked = vars(graph).get(_MARK)
    if not (mesh.platform in _PLATFORMS if is_marked is None else is_marked):
        return []
    trainable = [v.trainable for v in graph.variables]
    found = vars(graph).get(_RUNS)
    if found is None or found[0] != trainable:
        found = vars(graph)[_RUNS] = trainable, find_equal_blocks(graph)
    minimum = 0 if is_marked else _MIN_BLOCKS
    return [blocks for blocks in found[1] if len(blocks) >= minimum]


def _compute(graph: Any, calls: BlockCalls) -> Array | None:
    """Computes all blocks of a run in a loop.

    Returns:
      The output of the last block; None if the blocks must be computed one by
      one.
    """
    step, blocks, result = current_step(), calls.blocks, None
    is_repeated = step is not None and step.facts.is_retrace
    if not is_repeated:
        blocks.reason = None
    # Otherwise the blocks were compared in the first trace.
    if not blocks.reason:
        result, blocks.reason = _scan(calls, is_checked=blocks.reason is None)
    if blocks.reason and vars(graph).get(_MARK) and not is_repeated:
        _warn(blocks.model, blocks.reason)
    return result


def _scan(calls: BlockCalls, *, is_checked: bool) -> tuple[Array | None, str]:
    """Computes all blocks of a run in a loop, if there can be one.

    Args:
      calls: The blocks.
      is_checked: Whether to check that the blocks compute the same.

    Returns:
      The output of the last block and ""; or None and the reason why the blocks
      must be computed one by one.
    """
    columns, reason = _find_variables(calls.blocks)
    if reason:
        return None, reason
    scope: Any = get_stateless_scope()
    values = [[_read(scope, v) for v in column] for column in columns]
    entering = calls.values[calls.blocks.tensors[0]]
    carry = entering, get_keras_mask(entering)

    def trace(number: int) -> TracedBlock:
        variables = [column[number] for column in columns]
        like = [column[0] for column in values]
        return trace_block(calls, number, variables, carry, like)

    body, reason = _find_body(trace, len(calls.blocks) if is_checked else 1)
    if body is None or reason:
        return None, reason
    (result, mask), new = jax.lax.scan(
        body, carry, list(map(stack_values, values)), length=len(calls.blocks)
    )
    for i, slices in zip(body.written, new, strict=True):
        for update in zip(columns[i], list(slices), strict=True):
            scope.add_update(update)
    if mask is not None:
        set_keras_mask(result, mask)
    return result, ""


def _find_body(
    trace: Callable[[int], TracedBlock], count: int
) -> tuple[TracedBlock | None, str]:
    """Traces the first blocks, and checks that they compute the same.

    Args:
      trace: A function that traces the block of a number.
      count: The number of blocks to trace.

    Returns:
      The first block, and "" or the reason why a loop cannot compute them.
    """
    traced: list[TracedBlock] = []

    def trace_until_problem() -> Iterator[ClosedJaxpr]:
        for number in range(count):
            traced.append(trace(number))
            if traced[-1].problem:
                return
            yield traced[-1].jaxpr

    try:
        are_equal = compute_same(trace_until_problem())
    except Exception as error:
        return None, (
            "a block cannot be computed without the others "
            f"({type(error).__name__}: {error})"
        )
    different = "blocks differ in their operations or constants"
    return traced[0], traced[-1].problem or ("" if are_equal else different)


def _warn(model: keras.Model, reason: str) -> None:
    warnings.warn(
        f"The equal blocks of {model.name!r} are computed one by one, not in a "
        f"loop: {reason}.",
        stacklevel=2,
    )


def _read(scope: keras.StatelessScope, variable: keras.Variable) -> Array:
    """Returns a variable's value in a scope, in the variable's dtype."""
    value = scope.get_current_value(variable)
    return variable._value if value is None else value


def _find_variables(blocks: Blocks) -> tuple[list[list[keras.Variable]], str]:
    """Finds, for each variable of a block, that variable in all blocks.

    Returns:
      The variables without those that all blocks share, and "". If blocks share
      others, an empty list, and the reason against a loop.
    """
    rows = list(map(list_variables, blocks.segments))
    columns = list(map(list, zip(*rows, strict=False)))
    counts = [len(set(map(id, column))) for column in columns]
    are_uneven = len(set(map(len, rows))) > 1
    if are_uneven or any(1 < count < len(rows) for count in counts):
        return [], "some of the blocks share a variable"
    different = zip(columns, counts, strict=True)
    return [column for column, count in different if count > 1], ""

"""TensorFlow's names for datasets, graph nodes, their inputs and attributes.

All code that depends on these names is in this module.
tests/contract/test_tf_nodes_contract.py checks each name against the installed
TensorFlow.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from keras_strategies._types import Dataset
from keras_strategies.data.options import SHARD_HINT
from keras_strategies.data.tfdata.tf_graph import (
    Graph,
    Node,
    Scope,
    find_sink,
    get_kind,
    iterate_inputs,
    list_called,
    list_scopes,
    list_upstream,
    tensorflow,
)


def _kinds(names: str) -> frozenset[str]:
    return frozenset(f"{name}Dataset" for name in names.split())


# Classes of datasets that do not shuffle, do not shard and read no files.
PLAIN = _kinds(
    "_TensorSlice _Tensor _Range _Batch _ParallelBatch _PaddedBatch _Map "
    "_ParallelMap _Filter _Prefetch _Options _Repeat _Take _Skip _Zip "
    "_Concatenate _Unbatch"
)
# Classes of datasets that form batches, and classes that do not regroup the
# rows of batches.
BATCH_CLASSES = _kinds("_Batch _ParallelBatch _PaddedBatch")
KEEP_BATCHES = _kinds(
    "_Map _ParallelMap _Prefetch _Options _Repeat _Shuffle _Take _Skip _Filter "
    "Cache"
)

# Operations in graphs, without their version: the file readers before which
# TensorFlow can insert a shard, and all file readers.
SPLIT_READERS = _kinds("TFRecord TextLine FixedLengthRecord")
READERS = SPLIT_READERS | _kinds("CSV LMDB Sql")
# Operations that treat each element (a row or a batch) independently.
EACH = _kinds(
    "Map ParallelMap Prefetch Options Model Cache Repeat Shuffle "
    "ShuffleAndRepeat Concatenate MaxIntraOpParallelism PrivateThreadPool "
    "AssertNext ParseExample FlatMap Interleave ParallelInterleave "
    "LegacyParallelInterleave"
)
EACH_ROW = _kinds("Filter ParallelFilter")
BATCHES = _kinds("Batch ParallelBatch PaddedBatch MapAndBatch")
COUNTING = _kinds("Take Skip TakeWhile Shard Window")
DOUBTS = {
    "TakeDataset": "`take` counts rows of all files together",
    "SkipDataset": "`skip` counts rows of all files together",
    "ShardDataset": "it already has a `shard`",
    "ZipDataset": "`zip` would pair different rows than in a single process",
    "FilterDataset": "`filter` after `batch` depends on a batch's rows",
}

# Operations that shuffle: the index of the first of their two seed inputs, and
# the index of the input that is a seed generator (None without one).
SEED_INPUTS: dict[str, tuple[int, int | None]] = {
    "ShuffleDataset": (2, None),
    "ShuffleDatasetV3": (2, 4),
    "ShuffleAndRepeatDataset": (2, None),
    "ShuffleAndRepeatDatasetV2": (2, 5),
    "RandomDataset": (0, None),
    "RandomDatasetV2": (0, 2),
}
_DRAWS = re.compile(r"\w*(Shuffle|Random|Sampl)\w*Dataset(V\d+)?")
# Ops that generate random numbers in mapped functions. They may change the
# values of rows, but do not add or remove rows.
_RANDOM_OP = re.compile(
    "(Random|Stateful|TruncatedNormal|Parameterized|Multinomial|SampleDist"
    "|PyFunc|EagerPyFunc)(?!.*Dataset)"
)
# The index of each named input, for operations that do not shuffle.
INPUTS = {
    "RepeatDataset": {"count": 1},
    "ShardDataset": {"num_shards": 1, "index": 2},
    "CacheDatasetV2": {"filename": 1, "cache": 2},
}
RESHUFFLE_ATTRS = ("reshuffle_each_iteration", "rerandomize_each_iteration")


def is_plain(dataset: Dataset, *, with_functions: bool = True) -> bool:
    """Returns whether a dataset certainly has no shuffle, shard or file reader.

    Such a dataset need not be converted to a graph, which would contain copies
    of all its arrays.

    Args:
      dataset: The dataset.
      with_functions: Whether a dataset that calls the user's functions may
        count as plain.
    """
    return all(
        type(part).__name__ in PLAIN
        and getattr(part, "_deterministic", None) != "false"
        and (with_functions or not part._functions())
        for part in iterate_inputs(dataset)
    )


def guess_batch_size(dataset: Dataset) -> int | None:
    """Returns the batch size of the last `batch`.

    Assumes that functions mapped over batches do not change it.
    """
    while True:
        kind = type(dataset).__name__
        if kind in BATCH_CLASSES:
            return int(dataset._batch_size)
        inputs = dataset._inputs()
        if kind not in KEEP_BATCHES or len(inputs) != 1:
            return None
        (dataset,) = inputs


def find_shuffles(
    graph: Graph,
) -> Iterator[tuple[Scope, Node, int, int | None]]:
    """Yields the nodes of a graph that shuffle.

    Yields:
      The scope, the node, and the two indices of its inputs in SEED_INPUTS.

    Raises:
      RuntimeError: if a node that is not in SEED_INPUTS shuffles.
    """
    for scope in list_scopes(graph):
        for node in scope.nodes:
            if node.op in SEED_INPUTS:
                yield scope, node, *SEED_INPUTS[node.op]
            elif _DRAWS.fullmatch(node.op):
                raise RuntimeError(
                    "The order of this tf.data pipeline cannot be reproduced, "
                    f"because {node.op!r} of TensorFlow "
                    f"{tensorflow().__version__} is unknown. Use "
                    "`dataset.shuffle`, `ks.data.files` or grain."
                )


def read_seeds(graph: Graph) -> list[list[int | None]]:
    """Returns the two seeds of each shuffle.

    The value 0 means that a seed is not set, and None that it is unknown. After
    `tf.random.set_seed`, TensorFlow also sets the seeds of shuffles that the
    user has given none. These seeds depend on the random operations that the
    process has created before.
    """
    values = [
        [scope.value(node, first + i) for i in (0, 1)]
        for scope, node, first, _ in find_shuffles(graph)
    ]
    return [[v if v is None else int(v) for v in pair] for pair in values]


def draws_order(graph: Graph) -> bool:
    """Returns whether a dataset shuffles or is otherwise randomly ordered."""
    return any(True for _ in find_shuffles(graph))


def is_reshuffled(node: Node) -> bool:
    """Returns whether a shuffle has a different order in each iterator."""
    for name in RESHUFFLE_ATTRS:
        if name in node.attr:
            return node.attr[name].b
    return True


def has_draws_above(graph: Graph, node: Node) -> bool:
    """Returns whether a node depends, directly or not, on one that shuffles."""
    above = list_called(graph, list_upstream(Scope(graph.node), node))
    return any(other.op in SEED_INPUTS for other in above)


def count_draws(graph: Graph) -> dict[str, int]:
    """Counts how often each dataset node is iterated over in an epoch.

    The count is 0 for nodes whose rows a later node caches.
    """
    top = Scope(graph.node)
    draws = {}
    waiting = [(find_sink(top), 1)]
    while waiting:
        node, count = waiting.pop()
        draws[node.name] = count
        if get_kind(node) == "CacheDataset":
            count = 0  # The cache reads its inputs in the first epoch only.
        elif get_kind(node) == "RepeatDataset":
            times = top.value(node, INPUTS["RepeatDataset"]["count"])
            count *= 1 if times is None else max(int(times), 1)
        waiting += [(source, count) for source in top.datasets(node)]
    return draws


def repeats_forever(top: Scope, node: Node) -> bool:
    """Returns whether a node's elements are repeated forever."""
    above = [
        n for n in list_upstream(top, node) if get_kind(n) == "RepeatDataset"
    ]
    repeats = (top.value(n, INPUTS["RepeatDataset"]["count"]) for n in above)
    return any(times is not None and times < 0 for times in repeats)


def drops_remainder(top: Scope, node: Node) -> bool:
    """Returns whether a node that batches rows drops a smaller last batch."""
    # `drop_remainder` is the last input of each of these operations, apart from
    # control inputs.
    drops: np.ndarray | None = top.value(node, len(node.input) - 1)
    return drops is not None and drops.dtype == bool and bool(drops)


def pads_to_longest(node: Node) -> bool:
    """Returns whether a node pads rows to the longest row in their batch."""
    shapes = node.attr["output_shapes"].list.shape
    return get_kind(node) == "PaddedBatchDataset" and any(
        dim.size == -1 for shape in shapes for dim in shape.dim[1:]
    )


def has_variables(graph: Graph) -> bool:
    """Returns whether a graph's functions use variables.

    The graph contains copies of these variables.
    """
    return any(node.op == "VarHandleOp" for node in graph.node)


def changes_rows(graph: Graph) -> bool:
    """Returns whether a row's values may differ each time that it is read."""
    scopes = [scope for scope in list_scopes(graph) if scope.caller is not None]
    return any(
        get_kind(scope.caller) != "GeneratorDataset"
        and any(_RANDOM_OP.match(node.op) for node in scope.nodes)
        for scope in scopes
    )


def find_shards(graph: Graph) -> list[tuple[Scope, Node, Any]]:
    """Returns the scope, node and number of shards of each `shard`.

    The number is None if it is not a constant.
    """
    place = INPUTS["ShardDataset"]["num_shards"]
    return [
        (scope, node, scope.value(node, place))
        for scope in list_scopes(graph)
        for node in scope.nodes
        if get_kind(node) == "ShardDataset"
    ]


def find_hints(graph: Graph) -> list[tuple[Scope, Node]]:
    """Returns the nodes of `shard(SHARD_HINT, ...)`."""
    return [(s, n) for s, n, count in find_shards(graph) if count == SHARD_HINT]


def feed_hints(graph: Graph, num_processes: int, process_index: int) -> None:
    """Turns each `shard(SHARD_HINT, ...)` into this process's shard."""
    inputs = INPUTS["ShardDataset"]
    for scope, node in find_hints(graph):
        scope.feed(node, inputs["num_shards"], num_processes)
        scope.feed(node, inputs["index"], process_index)


def find_file_shards(graph: Graph) -> list[Node]:
    """Returns the shards that TensorFlow inserted before file readers."""
    name = "require_non_empty"
    return [n for n in graph.node if name in n.attr and n.attr[name].b]


def make_deterministic(nodes: Iterable[Node]) -> None:
    """Makes parallel operations yield their elements in a fixed order."""
    for node in nodes:
        if "deterministic" in node.attr:
            node.attr["deterministic"].s = b"true"
        if "sloppy" in node.attr:
            node.attr["sloppy"].b = False

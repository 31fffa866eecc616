"""Splitting tf.data datasets by the files that they read."""

import dataclasses
from typing import Any

from keras_strategies._types import Dataset
from keras_strategies.data.tfdata.tf_graph import (
    Graph,
    Node,
    Scope,
    build_part,
    find_sink,
    get_kind,
    list_called,
    list_functions,
    list_upstream,
    tensorflow,
    write_graph,
)
from keras_strategies.data.tfdata.tf_nodes import (
    BATCHES,
    COUNTING,
    DOUBTS,
    EACH,
    EACH_ROW,
    READERS,
    SPLIT_READERS,
    drops_remainder,
    find_file_shards,
    pads_to_longest,
    repeats_forever,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileSplit:
    """The result of splitting a dataset by the files that it reads.

    Attributes:
      dataset: The dataset that reads only this process's files; None if the
        dataset cannot be split.
      graph: The graph of that dataset.
      obstacle: The reason why the dataset cannot be split, as the end of a
        sentence: "because ..."; None if it can be split.
      doubt: The reason why the datasets of all processes together may not yield
        the same rows as the original dataset; None if they certainly do.
    """

    dataset: Any = None
    graph: Graph | None = None
    obstacle: str | None = None
    doubt: str | None = None


def reads_files(graph: Graph) -> bool:
    """Returns whether a dataset contains an operation that reads files."""
    return any(
        get_kind(node) in READERS for node in list_called(graph, graph.node)
    )


def split_by_files(
    dataset: Dataset, graph: Graph, num_processes: int, process_index: int
) -> FileSplit:
    """Splits a dataset by its files with TensorFlow, and checks the result."""
    tf = tensorflow()
    try:
        part = _rewrite(dataset, num_processes, process_index)
    except tf.errors.OpError:
        why = _find_doubt(graph, set()) or "not all of its rows come from files"
        return FileSplit(obstacle=why)
    graph_of_part = write_graph(part)
    # `dataset` could be converted to a graph, so `part` can be, too.
    assert graph_of_part is not None
    shards = find_file_shards(graph_of_part)
    top = Scope(graph_of_part.node)
    names = {shard.name for shard in shards}
    for shard in shards:
        (source,) = top.datasets(shard)
        if any(above.name in names for above in list_upstream(top, source)):
            return FileSplit(obstacle="a part of it would be split twice")
        part_of_files = build_part(graph_of_part, source)
        count = _count_elements(part_of_files, num_processes)
        if count < num_processes:
            files = f"{count} file{'s' * (count != 1)}"
            why = f"it reads {files}, too few for {num_processes} processes"
            return FileSplit(obstacle=why)
    if not shards:
        return FileSplit(obstacle="it reads no files that can be split")
    return FileSplit(
        dataset=part,
        graph=graph_of_part,
        doubt=_find_doubt(graph_of_part, names) or _find_shuffle_doubt(graph),
    )


def _rewrite(
    dataset: Dataset, num_processes: int, process_index: int
) -> Dataset:
    tf = tensorflow()
    leaves = tf.nest.flatten(dataset.element_spec)
    specs = [leaf for leaf in leaves if isinstance(leaf, tf.TensorSpec)]
    variant = tf.raw_ops.AutoShardDataset(
        input_dataset=tf.data.experimental.to_variant(dataset),
        num_workers=num_processes,
        index=process_index,
        auto_shard_policy=int(tf.data.experimental.AutoShardPolicy.FILE),
        num_replicas=0,
        output_types=[spec.dtype for spec in specs],
        output_shapes=[spec.shape for spec in specs],
    )
    return tf.data.experimental.from_variant(variant, dataset.element_spec)


def _find_doubt(graph: Graph, shards: set[str]) -> str | None:
    """Returns why operations after the shards may lose or change rows, or None.

    An operation is safe if it treats each row or batch independently, so that
    it does not matter which files the other rows come from.
    """
    top = Scope(graph.node)
    waiting = [(find_sink(top), False)]
    while waiting:
        node, is_batched = waiting.pop()
        kind = get_kind(node)
        if node.name in shards or (not shards and _is_reader(graph, node)):
            continue
        if kind in BATCHES:
            if is_batched:
                return "it is batched twice"
            if (why := _find_batch_doubt(top, node)) is not None:
                return why
            is_batched = True
        elif kind == "UnbatchDataset":
            is_batched = False
        elif kind not in EACH and not (is_batched and kind in EACH_ROW):
            default = f"it contains `{kind}`"
            return DOUBTS.get(kind.removeprefix("Parallel"), default)
        waiting += [(source, is_batched) for source in top.datasets(node)]
    return None


def _is_reader(graph: Graph, node: Node) -> bool:
    names = set(list_functions(node))
    bodies = (f for f in graph.library.function if f.signature.name in names)
    inner = [n for body in bodies for n in body.node_def]
    return any(
        get_kind(n) in SPLIT_READERS for n in list_called(graph, [node, *inner])
    )


def _find_batch_doubt(top: Scope, node: Node) -> str | None:
    if drops_remainder(top, node) and not repeats_forever(top, node):
        return "`drop_remainder=True` would drop the last rows of each process"
    if pads_to_longest(node):
        return "`padded_batch` pads the batches of each process differently"
    return None


def _find_shuffle_doubt(graph: Graph) -> str | None:
    """Returns why rows may be lost if a shard precedes a shuffle, or None.

    When TensorFlow splits a dataset, it inserts its shard before a shuffle of
    file names.
    """
    top = Scope(graph.node)
    for node in graph.node:
        if get_kind(node) in COUNTING and any(
            get_kind(above).startswith("Shuffle")
            for above in list_upstream(top, node)
        ):
            name = get_kind(node).removesuffix("Dataset").lower()
            return f"`{name}` comes after a `shuffle`"
    return None


def _count_elements(dataset: Dataset, limit: int) -> int:
    """Counts a dataset's elements; may stop at `limit` if there are more."""
    tf = tensorflow()
    count = int(dataset.cardinality())
    if count == tf.data.UNKNOWN_CARDINALITY:
        return sum(1 for _ in dataset.take(limit))
    return limit if count == tf.data.INFINITE_CARDINALITY else count

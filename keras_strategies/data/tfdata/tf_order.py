"""Shuffling of tf.data datasets that depends only on the seed and the epoch.

A dataset that shuffles has a different order in each iteration and, if it has
no seed, also in each process. Here the dataset is rebuilt from its graph in
each epoch, with seeds for that epoch.
"""

from typing import Any

import numpy as np

from keras_strategies._types import Array, Dataset
from keras_strategies.data.tfdata.tf_graph import (
    Graph,
    Node,
    Scope,
    build_dataset,
    find_sink,
    get_kind,
    list_called,
    list_upstream,
    read_constant,
    tensorflow,
    write_graph,
)
from keras_strategies.data.tfdata.tf_nodes import (
    INPUTS,
    count_draws,
    feed_hints,
    find_file_shards,
    find_shuffles,
    has_draws_above,
    has_variables,
    is_reshuffled,
    make_deterministic,
    read_seeds,
)

_LARGE_BYTES = 1 << 20


class EpochDatasets:
    """Creates a separate dataset for each epoch.

    Shuffles without a seed get one that is computed from `seed` and the epoch.
    With a user-defined seed, epoch `e` has the order of the dataset's `e`-th
    iterator. Shuffles whose rows are cached afterwards have the order of the
    first epoch in all epochs.

    The contents of in-memory caches are reused in later epochs. If the
    dataset's functions use a `tf.Variable` or a `tf.random.Generator`, each
    epoch uses a copy of its current value.

    Args:
      dataset: The dataset.
      graph: The graph of `dataset`. This object edits it.
      seed: Any number. Processes with the same number shuffle equally.
      num_processes: Number of processes, for `SHARD_HINT`.
      process_index: Index of this process among them.
      is_whole: Whether every process reads all rows, and therefore must read
        them in the same order.
      copy: Index of this process among the processes that read the same rows;
        None if no other process does.
      seeds: The seeds of the shuffles, used instead of the seeds in the graph.

    Attributes:
      seeds: The seeds of the shuffles, as `read_seeds` returns them.
    """

    def __init__(
        self,
        dataset: Dataset,
        graph: Graph,
        *,
        seed: int,
        num_processes: int,
        process_index: int,
        is_whole: bool,
        copy: int | None = None,
        seeds: list[list[int | None]] | None = None,
    ) -> None:
        self._dataset = dataset
        self.seeds = read_seeds(graph)
        if seeds and len(seeds) == len(self.seeds):
            # If the lengths differ, the seeds belong to another dataset.
            self.seeds = seeds
        self._seed = seed % 2**64
        self._num_processes = num_processes
        self._process_index = process_index
        self._is_whole = is_whole
        self._copy = copy
        self._caches: dict[str, tuple[Node, Any]] = {}
        self._served: list[Any] = []
        self._prepare(graph)
        self._graph = None if has_variables(graph) else graph

    def make_dataset(self, epoch: int) -> tuple[Any, Any]:
        """Returns an epoch's dataset, and the objects that it needs.

        The caller must keep these objects alive while it iterates.
        """
        graph = tensorflow().compat.v1.GraphDef()
        if self._graph is not None:
            graph.CopyFrom(self._graph)
        else:
            graph = write_graph(self._dataset)
            self._prepare(graph)
        kept = self._seed_nodes(graph, epoch)
        dataset = build_dataset(graph, self._dataset.element_spec)
        return dataset, (kept, self._served, self._caches, self._dataset)

    def _prepare(self, graph: Graph) -> None:
        """Edits the graph in the ways that are the same for all epochs."""
        feed_hints(graph, self._num_processes, self._process_index)
        top = Scope(graph.node)
        parts = list(graph.node)
        is_shared = self._is_whole and self._num_processes > 1
        if not is_shared and self._copy is None:
            # Only operations before a shard must have the same order in all
            # processes.
            parts = [
                part
                for shard in find_file_shards(graph)
                for part in list_upstream(top, shard)
            ]
        make_deterministic(list_called(graph, parts))
        for node in list(graph.node):
            if get_kind(node) == "CacheDataset":
                self._prepare_cache(graph, top, node)
        for node in graph.node:
            if node.op == "Const" and node.ByteSize() > _LARGE_BYTES:
                self._serve(node)

    def _prepare_cache(self, graph: Graph, top: Scope, node: Node) -> None:
        inputs = INPUTS["CacheDatasetV2"]
        path = top.value(node, inputs["filename"])
        if path is not None and path.item():
            if self._num_processes > 1 or self._copy is not None:
                # Each process writes a separate file, since the rows of the
                # processes may differ.
                part = f".{self._process_index}-of-{self._num_processes}"
                part += "" if self._copy is None else f".{self._copy}"
                name = path.item() + part.encode()
                top.feed(node, inputs["filename"], name)
            return
        if node.op != "CacheDatasetV2":
            return
        if self._is_whole and not has_draws_above(graph, node):
            return  # The user's cache may already be filled, or be used later.
        if node.name not in self._caches:
            self._caches[node.name] = _make_cache()
        top.feed(node, inputs["cache"], self._caches[node.name][0])

    def _serve(self, node: Node) -> None:
        """Moves an array out of the graph, since the graph is copied often."""
        tf = tensorflow()
        array = read_constant(node)
        if array is None or array.dtype.kind not in "biufc":
            return

        def read() -> Array:
            return tf.numpy_function(lambda: array, [], array.dtype)

        function = tf.function(read, autograph=False).get_concrete_function()
        self._served.append(function)
        nodes = (op.node_def for op in function.graph.get_operations())
        (served,) = (n for n in nodes if get_kind(n) == "PyFunc")
        name = node.name
        node.CopyFrom(served)
        node.name = name
        node.device = ""

    def _seed_nodes(self, graph: Graph, epoch: int) -> list[Any]:
        kept: list[Any] = []
        draws = count_draws(graph)
        shuffles = zip(find_shuffles(graph), self.seeds, strict=True)
        for number, (shuffle, seeds) in enumerate(shuffles, 1):
            scope, node, first, generator = shuffle
            # Number of times that the shuffle starts in an epoch; 0 if all
            # epochs have the order of the first epoch.
            begins = draws.get((scope.caller or node).name, 1)
            if not is_reshuffled(node):
                begins = 0
            handle = type(node)(op="DummySeedGenerator")
            if seeds == [0, 0]:  # The user has set no seed.
                numbers = (self._seed, epoch if begins else 0, number)
                sequence = np.random.SeedSequence(numbers)
                state = sequence.generate_state(2, np.uint64)
                seeds = [int(value >> 1) for value in state]
            elif not scope.caller and epoch and begins and None not in seeds:
                # Continues with the generator state that tf.data would have
                # after the earlier epochs.
                handle, drawn = _make_generator(seeds, epoch * begins)
                kept.append(drawn)
            for i, value in enumerate(seeds):
                if value is not None:
                    scope.feed(node, first + i, value)
            if generator is not None:
                scope.feed(node, generator, handle)
        return kept


def _make_generator(seeds: list[Any], draws: int) -> tuple[Node, Any]:
    """Creates a seed generator that has already generated `draws` seeds.

    Returns:
      The generator's node, and a dataset. The generator exists only as long as
      this dataset.
    """
    tf = tensorflow()
    one = tf.data.Dataset.range(1)
    variant = tf.raw_ops.ShuffleDatasetV3(
        input_dataset=tf.data.experimental.to_variant(one),
        buffer_size=1,
        seed=seeds[0],
        seed2=seeds[1],
        seed_generator=tf.raw_ops.DummySeedGenerator(),
        reshuffle_each_iteration=True,
        output_types=[tf.int64],
        output_shapes=[()],
    )
    shuffled = tf.data.experimental.from_variant(variant, one.element_spec)
    for _ in shuffled.repeat().take(draws):
        pass
    return _find_last_input(shuffled), shuffled


def _make_cache() -> tuple[Node, Any]:
    """Creates an empty cache.

    Returns:
      The cache's node, and a dataset. The cache exists only as long as this
      dataset.
    """
    cached = tensorflow().data.Dataset.range(1).cache()
    return _find_last_input(cached), cached


def _find_last_input(dataset: Dataset) -> Node:
    graph = write_graph(dataset)
    assert graph is not None
    top = Scope(graph.node)
    sink = find_sink(top)
    node = top.source(sink, len(sink.input) - 1)
    assert node is not None
    return node

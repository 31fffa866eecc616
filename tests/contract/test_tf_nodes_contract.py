"""TensorFlow's names of dataset operations, their inputs and attributes."""

import inspect
import re

import numpy as np
import pytest
import tensorflow as tf

from keras_strategies.data.tfdata import tf_graph, tf_nodes

NUMBERS = tf.data.Dataset.range(8)
OPERATIONS = {
    name: list(inspect.signature(operation).parameters)
    for name, operation in vars(tf.raw_ops).items()
    if re.search(r"Dataset(V\d+)?$", name)
}
KINDS = {re.sub(r"V\d+$", "", name) for name in OPERATIONS}
READ = (
    tf_nodes.READERS
    | tf_nodes.EACH
    | tf_nodes.EACH_ROW
    | tf_nodes.BATCHES
    | tf_nodes.COUNTING
    | set(tf_nodes.DOUBTS)
    | set(tf_nodes.INPUTS)
    | {"CacheDataset", "GeneratorDataset", "UnbatchDataset"}
)


def nodes(dataset, kind):
    scopes = tf_graph.list_scopes(tf_graph.write_graph(dataset))
    found = [node for scope in scopes for node in scope.nodes]
    return [node for node in found if tf_graph.get_kind(node) == kind]


@pytest.mark.parametrize("kind", sorted(READ))
def test_an_operation_has_that_name(kind):
    assert kind in KINDS | set(OPERATIONS)


@pytest.mark.parametrize("operation", tf_nodes.SEED_INPUTS)
def test_seeds_are_these_inputs(operation):
    names = OPERATIONS[operation]
    first, generator = tf_nodes.SEED_INPUTS[operation]
    assert names[first : first + 2] == ["seed", "seed2"]
    assert ("seed_generator" in names) == (generator is not None)
    if generator is not None:
        assert names[generator] == "seed_generator"


@pytest.mark.parametrize(
    ("operation", "name", "place"),
    [
        (operation, name, place)
        for operation, inputs in tf_nodes.INPUTS.items()
        for name, place in inputs.items()
    ],
)
def test_inputs_have_these_places(operation, name, place):
    assert OPERATIONS[operation][place] == name


@pytest.mark.parametrize("kind", sorted(tf_nodes.BATCHES))
def test_whether_a_remainder_is_dropped_is_the_last_input(kind):
    newest = max(op for op in OPERATIONS if tf_nodes.get_kind(Op(op)) == kind)
    names = OPERATIONS[newest]
    place = names.index("drop_remainder")
    attributes = {"output_types", "output_shapes", "f"}
    assert names[place + 1] in attributes


class Op:
    def __init__(self, op):
        self.op = op


def test_shuffles_tell_whether_they_are_drawn_anew():
    for anew in (True, False):
        (shuffle,) = nodes(
            NUMBERS.shuffle(8, reshuffle_each_iteration=anew), "ShuffleDataset"
        )
        assert shuffle.op in tf_nodes.SEED_INPUTS
        assert "reshuffle_each_iteration" in shuffle.attr
        assert tf_nodes.is_reshuffled(shuffle) == anew
    numbers = tf.data.Dataset.random(rerandomize_each_iteration=True)
    (random,) = nodes(numbers.take(2), "RandomDataset")
    assert random.op in tf_nodes.SEED_INPUTS
    assert random.attr["rerandomize_each_iteration"].b


def test_every_shuffle_of_tf_data_is_known():
    for make in (
        lambda: NUMBERS.shuffle(8),
        lambda: NUMBERS.shuffle(8).repeat(2),
        lambda: tf.data.Dataset.random().take(2),
        lambda: tf.data.Dataset.sample_from_datasets([NUMBERS, NUMBERS]),
        lambda: NUMBERS.flat_map(lambda x: NUMBERS.shuffle(8)),
    ):
        assert tf_nodes.draws_order(tf_graph.write_graph(make()))
    assert not tf_nodes.draws_order(
        tf_graph.write_graph(NUMBERS.cache().batch(2))
    )


def test_an_unknown_operation_that_draws_is_refused():
    variant = tf.raw_ops.SamplingDataset(
        input_dataset=tf.data.experimental.to_variant(NUMBERS),
        rate=0.5,
        seed=0,
        seed2=0,
        output_types=[tf.int64],
        output_shapes=[()],
    )
    sampled = tf.data.experimental.from_variant(variant, NUMBERS.element_spec)
    with pytest.raises(RuntimeError, match="'SamplingDataset' of TensorFlow"):
        tf_nodes.draws_order(tf_graph.write_graph(sampled))


def test_shards_tell_their_number_and_those_of_files_that_they_are(tmp_path):
    (found,) = tf_nodes.find_shards(tf_graph.write_graph(NUMBERS.shard(3, 1)))
    assert found[2] == 3
    assert not tf_nodes.find_file_shards(
        tf_graph.write_graph(NUMBERS.shard(3, 1))
    )
    assert "require_non_empty" in OPERATIONS["ShardDataset"]


def test_orders_of_parallel_operations_are_attributes():
    loose = NUMBERS.map(tf.identity, num_parallel_calls=2, deterministic=False)
    (node,) = nodes(loose, "ParallelMapDataset")
    assert node.attr["deterministic"].s == b"false"
    tf_nodes.make_deterministic([node])
    assert node.attr["deterministic"].s == b"true"
    assert "sloppy" in OPERATIONS["ParallelInterleaveDatasetV3"] or (
        "deterministic" in OPERATIONS["ParallelInterleaveDatasetV4"]
    )


def test_variables_and_draws_of_functions_are_seen():
    variable = tf.Variable(np.int64(1))
    read = NUMBERS.map(lambda x: x + variable)
    assert tf_nodes.has_variables(tf_graph.write_graph(read))
    assert not tf_nodes.has_variables(tf_graph.write_graph(NUMBERS))
    for draw in (
        lambda x: tf.random.uniform(()),
        lambda x: tf.random.stateless_normal((), (1, 2)),
        lambda x: tf.py_function(lambda: 1.0, [], tf.float32),
        lambda x: tf.random.truncated_normal(()),
    ):
        graph = tf_graph.write_graph(NUMBERS.map(draw))
        is_stateless = draw.__code__.co_names[-1] == "stateless_normal"
        assert tf_nodes.changes_rows(graph) != is_stateless


def test_padded_batches_tell_their_shapes():
    rows = NUMBERS.map(lambda x: tf.ones(x))
    for shape, is_padded in ((None, True), (8, False)):
        (node,) = nodes(rows.padded_batch(2, [shape]), "PaddedBatchDataset")
        assert tf_nodes.pads_to_longest(node) == is_padded

"""What `keras_strategies` reads of grain, tf.data and tensorboardX."""

import grain
import numpy as np
import pytest
import tensorflow as tf
from grain._src.python.dataset.transformations import batch as grain_batch
from tensorboardX import record_writer

from keras_strategies.data.grain.grain_data import GrainSource
from keras_strategies.data.tfdata import tf_graph, tf_nodes


def loader(shards, operations=()):
    return grain.DataLoader(
        data_source=np.arange(8),
        sampler=grain.samplers.IndexSampler(8, shards, num_epochs=1),
        operations=operations,
        shard_options=shards,
    )


def test_a_loader_of_grain_tells_its_shard_and_operations():
    operation = grain.transforms.Batch(2)
    options = grain.sharding.ShardOptions(shard_index=1, shard_count=3)
    found = loader(options, [operation])
    assert found._shard_options.shard_index == 1
    assert found._shard_options.shard_count == 3
    assert len(found._sampler) > 0
    assert list(found._operations) == [operation]
    assert operation.batch_size == 2
    none = loader(grain.sharding.NoSharding())
    assert none._shard_options.shard_count == 1


def test_a_loader_without_shard_options_is_refused(monkeypatch):
    found = loader(grain.sharding.NoSharding(), [grain.transforms.Batch(2)])
    del found._shard_options
    with pytest.raises(AttributeError, match="_shard_options"):
        GrainSource(found, num_processes=2, process_index=0)


def test_a_slice_of_grain_tells_its_start_and_step():
    sliced = grain.MapDataset.source(np.arange(8))[1::2]
    assert (sliced._start, sliced._step) == (1, 2)


def test_batches_of_grain_tell_what_stacks_them():
    rows = grain.MapDataset.source(np.arange(8)).seed(3).shuffle()
    batches = rows.batch(2)
    assert type(batches).__name__ == "BatchMapDataset"
    assert batches._batch_fn is grain_batch.make_batch
    assert batches._batch_size == 2
    assert list(batches.parents) == [rows]
    own = rows.batch(2, batch_fn=np.stack)
    assert own._batch_fn is not grain_batch.make_batch
    assert isinstance(rows._seed, int)


NUMBERS = tf.data.Dataset.range(8)


@pytest.mark.parametrize(
    ("dataset", "kind"),
    [
        (NUMBERS.batch(2), "_BatchDataset"),
        (NUMBERS.batch(2, num_parallel_calls=2), "_ParallelBatchDataset"),
        (NUMBERS.padded_batch(2), "_PaddedBatchDataset"),
        (NUMBERS.map(tf.identity), "_MapDataset"),
        (NUMBERS.map(tf.identity, num_parallel_calls=2), "_ParallelMapDataset"),
        (NUMBERS.prefetch(1), "_PrefetchDataset"),
        (NUMBERS.with_options(tf.data.Options()), "_OptionsDataset"),
        (NUMBERS.cache(), "CacheDataset"),
        (NUMBERS.repeat(), "_RepeatDataset"),
        (NUMBERS.shuffle(2), "_ShuffleDataset"),
        (NUMBERS.take(1), "_TakeDataset"),
        (NUMBERS.skip(1), "_SkipDataset"),
        (NUMBERS.filter(lambda x: x > 1), "_FilterDataset"),
        (NUMBERS, "_RangeDataset"),
        (tf.data.Dataset.from_tensor_slices(np.ones(3)), "_TensorSliceDataset"),
        (tf.data.Dataset.from_tensors(np.ones(3)), "_TensorDataset"),
        (tf.data.Dataset.zip((NUMBERS, NUMBERS)), "_ZipDataset"),
        (NUMBERS.concatenate(NUMBERS), "_ConcatenateDataset"),
    ],
)
def test_datasets_of_tf_tell_what_they_are(dataset, kind):
    assert type(dataset).__name__ == kind
    assert all(isinstance(d, tf.data.Dataset) for d in dataset._inputs())
    assert isinstance(dataset._functions(), list)


def test_datasets_of_tf_tell_sizes_and_arrays():
    batched = NUMBERS.batch(3)
    assert int(batched._batch_size) == 3
    assert tf_nodes.guess_batch_size(batched.map(tf.identity).prefetch(2)) == 3
    assert tf_nodes.guess_batch_size(NUMBERS.map(tf.identity)) is None
    slices = tf.data.Dataset.from_tensor_slices(np.ones((3, 2)))
    (tensor,) = slices._tensors
    assert tuple(tensor.shape) == (3, 2)
    loose = NUMBERS.map(tf.identity, num_parallel_calls=2, deterministic=False)
    assert loose._deterministic == "false"
    assert not tf_nodes.is_plain(loose)
    graph = tf_graph.write_graph(batched)
    kinds = {tf_graph.get_kind(node) for node in graph.node}
    assert {"BatchDataset", "RangeDataset"} <= kinds


def test_tensorboardx_frames_records(tmp_path):
    assert isinstance(record_writer.REGISTERED_FACTORIES, dict)
    directory = tmp_path / "logs"
    record_writer.directory_check(str(directory))
    assert directory.is_dir()
    path = directory / "events"
    writer = record_writer.RecordWriter(str(path))
    writer.write(b"abc")
    writer._writer.flush()
    writer.close()
    (record,) = tf.data.TFRecordDataset(str(path)).as_numpy_iterator()
    assert record == b"abc"

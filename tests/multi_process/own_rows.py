"""Pipelines whose rows are a process's own, for tf's processes and for ours."""

import itertools
import pathlib

import numpy as np
import tensorflow as tf

# After `batch`, a map: tf does not know the batch size then.
PIPELINES = {
    "batch.map": lambda d, b: d.batch(b).map(_parsed),
    "batch.map.prefetch": lambda d, b: d.batch(b).map(_parsed).prefetch(2),
    "batch.cache.map": lambda d, b: d.batch(b).cache().map(_parsed),
    "shuffle.repeat.batch.map": lambda d, b: _repeated(d).batch(b).map(_parsed),
    "map.batch": lambda d, b: d.map(_parsed_row).batch(b),
    "shuffle.repeat.map.batch": lambda d, b: (
        _repeated(d).map(_parsed_row).batch(b)
    ),
}
POLICIES = ("AUTO", "FILE", "OFF", "HINT")
SIZES = (3, 4, 5, 8)
# Rows of each file: as many of each process, and three beside seventeen.
FILES = {"even": (8, 8, 8, 8), "uneven": (2, 9, 1, 8)}
# Of pipelines that do not end.
STEPS = 6
CASES = tuple(itertools.product(FILES, PIPELINES, SIZES, POLICIES))


def name_case(files, pipeline, size, policy):
    return f"{files} {pipeline} {size} {policy}"


def is_infinite(pipeline):
    return "repeat" in pipeline


def known(pipeline):
    """The pipeline with the same rows whose batch size tf knows."""
    return "shuffle.repeat.map.batch" if is_infinite(pipeline) else "map.batch"


def write_files(directory):
    """TFRecord files, in a directory for each of `FILES`; a record is a row's
    number."""
    for name, counts in FILES.items():
        pathlib.Path(directory, name).mkdir()
        number = 0
        for index, count in enumerate(counts):
            path = str(pathlib.Path(directory, name, f"{index}.tfrecord"))
            with tf.io.TFRecordWriter(path) as writer:
                for _ in range(count):
                    writer.write(np.float32(number).tobytes())
                    number += 1


def features(numbers):
    """Inputs and targets of rows; those of padding are like no row's."""
    x = (numbers.reshape(-1, 1).astype("float32") + 1) / 32
    return x, np.sin(x)


def numbers(x):
    """The rows' numbers; -1 is padding."""
    return [round(32 * float(row)) - 1 for row in np.asarray(x)[:, 0]]


def dataset(directory, files, pipeline, size, policy):
    # What a shuffle with a seed draws depends on this one, too.
    tf.random.set_seed(0)
    paths = sorted(map(str, pathlib.Path(directory, files).glob("*.tfrecord")))
    if policy == "HINT":
        hint = tf.data.experimental.SHARD_HINT
        names = tf.data.Dataset.from_tensor_slices(paths).shard(hint, hint)
        records = names.interleave(
            tf.data.TFRecordDataset, cycle_length=1, num_parallel_calls=1
        )
    else:
        records = tf.data.TFRecordDataset(paths)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(
        tf.data.experimental.AutoShardPolicy, policy
    )
    return PIPELINES[pipeline](records, size).with_options(options)


def _parsed(texts):
    x = (tf.reshape(tf.io.decode_raw(texts, tf.float32), (-1, 1)) + 1) / 32
    return x, tf.sin(x)


def _parsed_row(text):
    x, y = _parsed(tf.expand_dims(text, 0))
    return x[0], y[0]


def _repeated(records):
    return records.shuffle(4, seed=1).repeat()


def read(strategy, directory, case):
    """The numbers of the rows that this process's replicas get."""
    batches = strategy.experimental_distribute_dataset(
        dataset(directory, *case)
    )
    stop = STEPS if is_infinite(case[1]) else None
    return [
        numbers(part)
        for x, _ in itertools.islice(batches, stop)
        for part in strategy.experimental_local_results(x)
    ]

"""What each process reads of batches that are its own, and what it learns."""

import itertools
import os
import pathlib
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

import keras_strategies as ks
from keras_strategies.testing import assert_replicated

warnings.filterwarnings("ignore", "Your input ran out of data")
warnings.filterwarnings("ignore", "A dataset is split by its files")
warnings.filterwarnings("ignore", "A dataset that reads files")
# AutoGraph looks for the source of lambdas.
warnings.filterwarnings("ignore", category=DeprecationWarning)

PIPELINES = {
    "batch.map": lambda d, b, f: d.batch(b).map(f),
    "batch.map.prefetch": lambda d, b, f: d.batch(b).map(f).prefetch(2),
    "batch.cache.map": lambda d, b, f: d.batch(b).cache().map(f),
    "shuffle.repeat.batch.map": lambda d, b, f: (
        d.shuffle(4, seed=1).repeat().batch(b).map(f)
    ),
    "map.batch": lambda d, b, f: d.map(
        lambda text: tf.nest.map_structure(
            lambda a: a[0], f(tf.expand_dims(text, 0))
        )
    ).batch(b),
}


def write_files(folder, rows_of_files):
    """TFRecord files; a record is the row's number."""
    number = 0
    for index, rows in enumerate(rows_of_files):
        path = str(pathlib.Path(folder, f"{index}.tfrecord"))
        with tf.io.TFRecordWriter(path) as writer:
            for _ in range(rows):
                writer.write(np.float32(number).tobytes())
                number += 1


def parsed(texts):
    rows = tf.reshape(tf.io.decode_raw(texts, tf.float32), (-1, 1)) / 32.0
    return rows, tf.sin(rows)


def dataset(folder, pipeline, size, policy):
    files = sorted(map(str, pathlib.Path(folder).glob("*.tfrecord")))
    names = tf.data.Dataset.from_tensor_slices(files)
    if policy == "HINT":
        names = names.shard(ks.data.SHARD_HINT, ks.data.SHARD_HINT)
    records = (
        names.interleave(
            tf.data.TFRecordDataset, cycle_length=1, num_parallel_calls=1
        )
        if policy == "HINT"
        else tf.data.TFRecordDataset(files)
    )
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = getattr(
        tf.data.experimental.AutoShardPolicy, policy
    )
    made = PIPELINES[pipeline](records, size, parsed)
    return made.with_options(options)


def build():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return model


def read_and_fit(folder, cases, steps):
    """For each case the rows of each step, and the weights after a fit."""
    strategy = ks.MultiWorkerMirroredStrategy()
    found = {}
    for pipeline, size, policy in cases:
        data = dataset(folder, pipeline, size, policy)
        is_endless = "repeat" in pipeline
        batches = strategy.experimental_distribute_dataset(data)
        read = [
            [
                round(32 * float(row))
                for part in strategy.experimental_local_results(x)
                for row in np.asarray(part)[:, 0]
            ]
            for x, _ in itertools.islice(batches, steps if is_endless else None)
        ]
        with strategy.scope():
            model = build()
        # Anew: each loop over a dataset has its own order.
        model.fit(
            dataset(folder, pipeline, size, policy),
            epochs=1,
            steps_per_epoch=steps if is_endless else None,
            verbose=0,
        )
        assert_replicated(model)
        weights = [np.asarray(w).tolist() for w in model.get_weights()]
        found[f"{pipeline} {size} {policy}"] = {
            "steps": read,
            "fitted": int(model.optimizer.iterations.value),
            "weights": weights,
        }
    return found

"""tf.data datasets on one and on several processes, which are simulated.

Also the contract test of keras_strategies/data/tf_*.py with TensorFlow: what
they read in and write into graphs is checked by the rows that come out.
"""

import os
import pathlib
import sys
import threading
import warnings

import numpy as np
import pytest

from keras_strategies.data.options import SHARD_HINT, AutoShardPolicy
from keras_strategies.data.tfdata import tf_data
from keras_strategies.data.tfdata.tf_data import TfDataSource
from tests.support.combinations import combine
from tests.support.commands import python


@pytest.fixture(autouse=True)
def no_seed_of_tensorflow():
    """Other tests set one; shuffles without a seed have some after it."""
    import tensorflow as tf

    tf.random.set_seed(None)


tf = pytest.importorskip("tensorflow")

AUTO, FILE, DATA, HINT, OFF = (
    AutoShardPolicy[name] for name in ("AUTO", "FILE", "DATA", "HINT", "OFF")
)
NUM_FILES = 5
WORKERS = (1, 2, 3, 5)
ROWS = (0, 1, 7, 8, 13, 64)
BATCHES = (1, 4, 8, 9)


def number(record):
    return tf.strings.to_number(record, tf.int64)


def integer(record):
    return tf.io.decode_raw(record, tf.int64)[0]


def write(directory, rows, kind="tfrecord", num_files=NUM_FILES):
    """Writes the numbers below `rows`, into files of uneven length."""
    edges = [rows * i * i // num_files**2 for i in range(num_files + 1)]
    names = []
    for i in range(num_files):
        name = f"{directory}/{i}.{kind}"
        values = range(edges[i], edges[i + 1])
        if kind == "tfrecord":
            with tf.io.TFRecordWriter(name) as writer:
                for value in values:
                    writer.write(str(value))
        elif kind == "txt":
            text = "".join(f"{value}\n" for value in values)
            pathlib.Path(name).write_text(text)
        else:
            np.array(values, np.int64).tofile(name)
        names.append(name)
    return names


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Files of 13 rows, in each format."""
    directory = tmp_path_factory.mktemp("files")
    for kind in ("tfrecord", "txt", "bin"):
        write(directory, 13, kind)
    return str(directory)


def names_in(directory, kind="tfrecord"):
    return [f"{directory}/{i}.{kind}" for i in range(NUM_FILES)]


def records(directory):
    return tf.data.TFRecordDataset(names_in(directory)).map(number)


def expected_rows(count, index):
    return lambda rows: (rows * index // count, rows * (index + 1) // count)


def make_source(dataset, count=1, index=0, policy=None, seed=3):
    return TfDataSource(
        dataset,
        num_processes=count,
        process_index=index,
        seed=seed,
        policy=policy,
    )


def make_sources(make, count, policy=None):
    """Each process's source, of a dataset that it made itself."""
    return [make_source(make(), count, i, policy) for i in range(count)]


def batches_of(source, count=1, index=0, epoch=0, start=0):
    return [
        part.data
        for part in source.read(epoch, start, expected_rows(count, index))
    ]


def flat(batches):
    return [int(row) for batch in batches for row in np.ravel(batch)]


def rows_of(make, count, policy=None, epoch=0):
    """The rows that all processes read together, sorted."""
    return sorted(
        row
        for index, source in enumerate(make_sources(make, count, policy))
        for row in flat(batches_of(source, count, index, epoch))
    )


def rows_of_tf(dataset):
    return flat(dataset.as_numpy_iterator())


# Every row, once.


@pytest.mark.parametrize(("rows", "count"), combine(ROWS, WORKERS, every=3))
def test_data_gives_each_row_to_one_process(rows, count):
    # With other numbers of processes and rows, the other sizes.
    for batch in BATCHES[(rows + count) % 2 :: 2]:
        dataset = tf.data.Dataset.range(rows).batch(batch)
        sources = make_sources(lambda d=dataset: d, count, AUTO)
        read = [
            flat(batches_of(source, count, index))
            for index, source in enumerate(sources)
        ]
        assert sorted(sum(read, [])) == list(range(rows))
        assert not sources[0].is_process_local
        assert sources[0].batch_size == batch
        assert sources[0].num_batches == -(-rows // batch)


@pytest.mark.parametrize(("rows", "count"), combine(ROWS, WORKERS, every=3))
def test_file_gives_each_row_to_one_process(tmp_path, rows, count):
    names = write(tmp_path, rows)
    batch = BATCHES[(rows + count) % 4]

    def make():
        return tf.data.TFRecordDataset(names).map(number).batch(batch)

    assert rows_of(make, count, FILE) == list(range(rows))


@pytest.mark.parametrize("count", WORKERS)
def test_off_gives_each_row_to_each_process(directory, count):
    datasets = (
        records(directory).batch(4),
        records(directory).shuffle(9).batch(4),
        tf.data.Dataset.range(13).batch(9),
    )
    for dataset in datasets:
        source = make_source(dataset, count, count - 1, OFF)
        assert source.is_process_local == (count > 1)
        assert sorted(flat(batches_of(source))) == list(range(13))


def list_files(directory, **options):
    return tf.data.Dataset.list_files(f"{directory}/*.tfrecord", **options)


READERS = {
    "parallel reads": lambda directory: tf.data.TFRecordDataset(
        names_in(directory), num_parallel_reads=2
    ).map(number, num_parallel_calls=2),
    "list_files and interleave": lambda directory: (
        list_files(directory).interleave(tf.data.TFRecordDataset).map(number)
    ),
    "parallel interleave": lambda directory: (
        list_files(directory)
        .interleave(
            tf.data.TFRecordDataset, num_parallel_calls=2, deterministic=False
        )
        .map(number, num_parallel_calls=2, deterministic=False)
    ),
    "flat_map": lambda directory: (
        tf.data.Dataset.range(NUM_FILES)
        .map(
            lambda i: directory + "/" + tf.strings.as_string(i) + ".tfrecord",
            num_parallel_calls=2,
            deterministic=False,
        )
        .flat_map(lambda name: tf.data.TFRecordDataset(name).map(number))
    ),
    "text": lambda directory: tf.data.TextLineDataset(
        names_in(directory, "txt")
    ).map(number),
    "fixed length": lambda directory: tf.data.FixedLengthRecordDataset(
        names_in(directory, "bin"), 8
    ).map(integer),
    "shuffled files": lambda directory: (
        list_files(directory, seed=1)
        .interleave(lambda name: tf.data.TFRecordDataset(name).shuffle(3))
        .map(number)
        .shuffle(5)
        .prefetch(2)
    ),
    "cache": lambda directory: records(directory).cache().shuffle(20),
    "filter": lambda directory: records(directory).filter(lambda row: row >= 0),
    "unbatch": lambda directory: records(directory).batch(3).unbatch(),
}


@pytest.mark.parametrize(
    ("name", "policy"),
    [(name, AUTO) for name in READERS]
    + [(name, DATA) for name in ("parallel interleave", "shuffled files")],
)
def test_readers_are_split(directory, name, policy):
    def make():
        return READERS[name](directory).batch(4)

    sources = make_sources(make, 2, policy)
    parts = [flat(batches_of(s, 2, i)) for i, s in enumerate(sources)]
    assert sorted(sum(parts, [])) == list(range(13))
    assert sources[0].plan.applied is (FILE if policy is AUTO else DATA)
    assert sources[0].is_process_local == (policy is AUTO)


def test_repeated_files_are_split(directory):
    def inside():
        files = list_files(directory).repeat(2)
        return files.flat_map(tf.data.TFRecordDataset).map(number).batch(4)

    def outside():
        return records(directory).shuffle(20).repeat(2).batch(4)

    twice = sorted([*range(13), *range(13)])
    for make in (inside, outside):
        for count in (1, 3):
            assert rows_of(make, count, AUTO) == twice
        assert make_source(make(), 2, 0).plan.applied is FILE


def test_concatenated_files_are_split(directory):
    def make():
        lines = tf.data.TextLineDataset(names_in(directory, "txt")).map(number)
        return records(directory).concatenate(lines).batch(4)

    twice = sorted([*range(13), *range(13)])
    assert rows_of(make, 3, AUTO) == twice
    assert make_source(make(), 3, 0).plan.applied is FILE


def test_files_that_are_found_in_an_order_of_ours_are_split(directory):
    def find(name):
        return tf.data.Dataset.list_files(name + "/*.tfrecord")

    def make():
        found = tf.data.Dataset.from_tensors(directory).interleave(find)
        return found.flat_map(tf.data.TFRecordDataset).map(number).batch(4)

    assert make_source(make(), 2, 0).plan.applied is FILE
    assert rows_of(make, 2) == list(range(13))


def test_rows_of_a_process_are_contiguous():
    batches = [
        batches_of(make_source(tf.data.Dataset.range(9).batch(6), 2, i), 2, i)
        for i in range(2)
    ]
    assert [[b.tolist() for b in own] for own in batches] == [
        [[0, 1, 2], [6]],
        [[3, 4, 5], [7, 8]],
    ]


def test_structures_are_kept():
    dataset = tf.data.Dataset.from_tensor_slices(
        ({"b": np.arange(5.0), "a": np.ones((5, 2))}, np.arange(5))
    ).map(lambda x, y: (x, y, None))
    part = next(
        make_source(dataset.batch(4), 2, 1).read(0, 0, expected_rows(2, 1))
    )
    x, y, nothing = part.data
    assert part.rows == 4
    assert nothing is None
    assert x["b"].tolist() == [2, 3]
    assert x["a"].shape == (2, 2)
    assert y.tolist() == [2, 3]


# Where files are not split.

DOUBTFUL = {
    "take": lambda d, _: d.take(6).batch(4),
    "skip": lambda d, _: d.skip(6).batch(4),
    "drop_remainder": lambda d, _: d.batch(4, drop_remainder=True),
    "zip": lambda d, directory: tf.data.Dataset.zip(
        (d, records(directory))
    ).batch(4),
    "twice": lambda d, _: d.batch(2).batch(2),
    "filter": lambda d, _: d.batch(3).filter(lambda b: len(b) == 3),
    "shard": lambda d, _: d.shard(3, 1).batch(4),
    "padded": lambda d, _: d.map(lambda n: tf.range(n)).padded_batch(4),
}


@pytest.mark.parametrize("name", combine(DOUBTFUL, every=2))
def test_auto_reads_the_rows_of_one_process_where_files_are_no_rows(
    directory, name
):
    def make():
        return DOUBTFUL[name](records(directory), directory)

    expected = list(make().as_numpy_iterator())
    with pytest.warns(UserWarning, match="divided by rows") as warned:
        sources = make_sources(make, 2)
    assert len(warned) == 2  # One in each process.
    assert "runs the entire input pipeline" in str(warned[0].message)
    parts = [batches_of(s, 2, i) for i, s in enumerate(sources)]
    for whole, *pieces in zip(expected, *parts, strict=True):
        tf.nest.map_structure(
            lambda w, *p: np.testing.assert_array_equal(w, np.concatenate(p)),
            whole,
            *pieces,
        )


def test_file_follows_tf_with_a_warning(directory):
    with pytest.warns(UserWarning, match="`take` counts rows of all files"):
        source = make_source(records(directory).take(2).batch(4), 2, 0, FILE)
    assert source.plan.applied is FILE
    assert flat(batches_of(source)) == [2, 3]


def test_infinite_rows_may_drop_a_remainder(directory):
    dataset = records(directory).repeat().batch(4, drop_remainder=True)
    source = make_source(dataset, 2, 0)
    assert source.plan.applied is FILE
    assert source.is_infinite
    assert source.num_batches is None


def test_auto_shares_rows_of_too_few_files(directory):
    def make():
        return (
            tf.data.TFRecordDataset(names_in(directory)[3:])
            .map(number)
            .batch(4)
        )

    expected = sorted(rows_of_tf(make()))
    with pytest.warns(UserWarning, match="it reads 2 files, too few for 3"):
        assert rows_of(make, 3) == expected


@pytest.mark.parametrize("index", range(3))
def test_file_refuses_too_few_files(directory, index):
    dataset = (
        tf.data.TFRecordDataset(names_in(directory)[:1]).map(number).batch(4)
    )
    with pytest.raises(ValueError, match="reads 1 file, too few for 3 proc"):
        make_source(dataset, 3, index, FILE)


def test_auto_never_splits_a_part_of_a_zip(directory):
    def make():
        pairs = (records(directory), tf.data.Dataset.range(13))
        return tf.data.Dataset.zip(pairs).map(lambda a, b: 13 * a + b).batch(4)

    expected = sorted(rows_of_tf(make()))
    with pytest.warns(UserWarning, match="`zip` would pair"):
        assert rows_of(make, 2) == expected


@pytest.mark.parametrize(
    "dataset",
    [
        lambda: tf.data.Dataset.range(8),
        lambda: tf.data.Dataset.from_tensor_slices(np.arange(8)),
        lambda: tf.data.Dataset.from_generator(
            lambda: iter(range(8)), output_signature=tf.TensorSpec((), tf.int64)
        ),
    ],
)
def test_file_refuses_what_reads_no_files(dataset):
    with pytest.raises(ValueError, match="because it reads no files"):
        make_source(dataset().batch(4), 2, 0, FILE)
    assert make_source(dataset().batch(4), 1, 0, FILE).plan.applied is FILE
    # AUTO does what was to be expected: no warning.
    assert rows_of(lambda: dataset().batch(4), 2) == list(range(8))


def test_a_reader_that_tf_does_not_split(tmp_path):
    names = []
    for i in range(2):
        names.append(f"{tmp_path}/{i}.csv")
        pathlib.Path(names[-1]).write_text(f"{i}\n{i + 2}\n")
    dataset = tf.data.experimental.CsvDataset(names, [tf.int64]).batch(3)
    with pytest.warns(UserWarning, match="it contains `CSVDataset`"):
        assert rows_of(lambda: dataset, 2) == [0, 1, 2, 3]


# Policies and shards.


def test_policy_is_read_from_the_options():
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    dataset = tf.data.Dataset.range(8).batch(4).with_options(options)
    assert make_source(dataset, 2).plan.applied is OFF
    assert make_source(dataset, 2, policy=DATA).plan.applied is DATA


@pytest.mark.parametrize("count", WORKERS)
def test_hint_becomes_the_shard_of_the_process(count):
    def make():
        shard = tf.data.Dataset.range(13).shard(SHARD_HINT, SHARD_HINT)
        return shard.shuffle(5).batch(4)

    assert rows_of(make, count, HINT) == list(range(13))
    first = make_source(make(), count, 0, HINT)
    assert first.is_process_local == (count > 1)
    assert sorted(flat(batches_of(first))) == list(range(0, 13, count))


def test_hint_in_a_function():
    def make():
        def inner(start):
            return tf.data.Dataset.range(start, start + 4).shard(SHARD_HINT, 0)

        return tf.data.Dataset.range(0, 8, 4).flat_map(inner).batch(3)

    assert rows_of(make, 2, HINT) == list(range(8))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("policy", [AUTO, FILE, DATA, OFF])
def test_hint_is_refused_under_another_policy(policy, count):
    dataset = tf.data.Dataset.range(8).shard(SHARD_HINT, 0).batch(4)
    with pytest.raises(ValueError, match=r"needs `AutoShardPolicy\.HINT`"):
        make_source(dataset, count, 0, policy)


def test_hint_without_a_shard_is_refused():
    with pytest.raises(ValueError, match="needs a `dataset.shard"):
        make_source(tf.data.Dataset.range(8).batch(4), 2, 0, HINT)


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("policy", [AUTO, FILE, DATA])
def test_a_dataset_that_is_split_already_is_refused(directory, policy, index):
    dataset = records(directory).shard(2, index).batch(4)
    with pytest.raises(ValueError, match="to OFF, or remove the `shard`"):
        make_source(dataset, 2, index, policy)
    assert flat(batches_of(make_source(dataset, 2, index, OFF))) == list(
        range(index, 13, 2)
    )


# Orders.


def nested(seed=None, **options):
    return (
        tf.data.Dataset.range(0, 12, 4)
        .interleave(
            lambda first: tf.data.Dataset.range(first, first + 4).shuffle(
                4, seed=seed
            ),
            **options,
        )
        .batch(3)
    )


SHUFFLES = {
    "shuffle": lambda: tf.data.Dataset.range(12).shuffle(12).batch(3),
    "small buffer": lambda: tf.data.Dataset.range(12).shuffle(3).batch(3),
    "one order": lambda: (
        tf.data.Dataset.range(12)
        .shuffle(12, reshuffle_each_iteration=False)
        .batch(3)
    ),
    "of the user": lambda: tf.data.Dataset.range(12).shuffle(12, 5).batch(3),
    "in a function": nested,
    "in a function, of the user": lambda: nested(5),
    "before and after a cache": lambda: (
        tf.data.Dataset.range(12).shuffle(12).cache().shuffle(4).batch(3)
    ),
    "in parallel": lambda: nested(num_parallel_calls=2, deterministic=False),
    "sampled": lambda: tf.data.Dataset.sample_from_datasets(
        [tf.data.Dataset.range(6), tf.data.Dataset.range(6, 12)]
    ).batch(3),
    "repeated": lambda: tf.data.Dataset.range(6).shuffle(6).repeat(2).batch(3),
}


@pytest.mark.parametrize("name", combine(SHUFFLES, every=2))
def test_order_is_that_of_seed_and_epoch(name):
    one = make_source(SHUFFLES[name](), 2, 0, DATA)
    epochs = [flat(batches_of(one, epoch=e)) for e in range(3)]
    # In other processes, which build the dataset themselves, the same.
    other = make_source(SHUFFLES[name](), 2, 1, DATA)
    alone = make_source(SHUFFLES[name]())
    for epoch in (2, 0, 1):
        assert flat(batches_of(other, epoch=epoch)) == epochs[epoch]
        if name != "in parallel":
            assert flat(batches_of(alone, epoch=epoch)) == epochs[epoch]
    # Resumed in the middle of an epoch.
    resumed = make_source(SHUFFLES[name](), 2, 1, DATA)
    assert flat(batches_of(resumed, epoch=2, start=2)) == epochs[2][6:]
    fixed = name in ("one order", "in a function, of the user")
    assert (epochs[1] == epochs[2]) == fixed
    assert sorted(epochs[1]) == sorted(epochs[2])


def test_other_seeds_give_other_orders():
    orders = {
        tuple(flat(batches_of(make_source(SHUFFLES["shuffle"](), seed=seed))))
        for seed in (0, 1, 2, -1, 2**63)
    }
    assert len(orders) == 5


def test_two_shuffles_have_their_own_seeds():
    def half(first):
        return tf.data.Dataset.range(first, first + 8).shuffle(8)

    source = make_source(half(0).concatenate(half(8)).batch(16))
    rows = np.array(flat(batches_of(source)))
    assert (rows[:8] != rows[8:] - 8).any()


USERS_SEEDS = {
    "shuffle": lambda: tf.data.Dataset.range(9).shuffle(9, 5),
    "fixed": lambda: tf.data.Dataset.range(9).shuffle(
        9, 5, reshuffle_each_iteration=False
    ),
    "repeated": lambda: tf.data.Dataset.range(9).shuffle(9, 5).repeat(2),
    "two": lambda: (
        tf.data.Dataset.range(9)
        .shuffle(9, 5)
        .concatenate(tf.data.Dataset.range(9, 18).shuffle(9, 6))
        .shuffle(3, 7)
    ),
    "random": lambda: tf.data.Dataset.random(
        5, rerandomize_each_iteration=True
    ).take(9),
    "cached": lambda: tf.data.Dataset.range(9).shuffle(9, 5).cache(),
    "cached before": lambda: tf.data.Dataset.range(9).cache().shuffle(9, 5),
}


@pytest.mark.parametrize("name", USERS_SEEDS)
def test_users_seeds_give_tensorflows_orders(name):
    dataset = USERS_SEEDS[name]().batch(4)
    expected = [rows_of_tf(dataset) for _ in range(3)]
    for epoch in (2, 0, 1):
        source = make_source(USERS_SEEDS[name]().batch(4))
        assert flat(batches_of(source, epoch=epoch)) == expected[epoch]
    # Not even an iterated dataset remembers.
    source = make_source(dataset)
    if name != "cached":
        assert flat(batches_of(source)) == expected[0]


def test_files_are_split_in_one_order_in_all_epochs(directory):
    def make():
        files = list_files(directory).shuffle(5)
        return files.interleave(tf.data.TFRecordDataset).map(number).batch(4)

    sources = make_sources(make, 2)
    epochs = [[flat(batches_of(s, epoch=e)) for s in sources] for e in (0, 1)]
    for first, second in epochs:
        assert sorted(first + second) == list(range(13))
    assert sorted(epochs[0][0]) == sorted(epochs[1][0])
    resumed = make_source(make(), 2, 0)
    assert flat(batches_of(resumed, epoch=1, start=1)) == epochs[1][0][4:]


def test_global_seed_is_the_users():
    def make():
        return tf.data.Dataset.range(9).shuffle(9).batch(4)

    try:
        tf.random.set_seed(1)
        expected = rows_of_tf(make())
        tf.random.set_seed(1)
        source = make_source(make())
    finally:
        tf.random.set_seed(None)
    assert flat(batches_of(source)) == expected


@pytest.mark.parametrize("seed", [None, 5])
def test_an_order_without_seeds_is_restored_into_data_with_seeds(seed):
    def make(seed=None):
        return tf.data.Dataset.range(9).shuffle(9, seed).batch(4)

    saved = make_source(make())
    expected = flat(batches_of(saved, epoch=1))
    try:
        if seed is None:
            tf.random.set_seed(1)
        source = make_source(make(seed))
    finally:
        tf.random.set_seed(None)
    assert flat(batches_of(source, epoch=1)) != expected
    source.restart(saved.seed)
    assert source.seed == saved.seed
    assert flat(batches_of(source, epoch=1)) == expected


# Caches and what functions hold.


def counted(calls):
    def count(row):
        calls.append(int(row))
        return row

    def apply(row):
        return tf.ensure_shape(tf.numpy_function(count, [row], tf.int64), ())

    return apply


@pytest.mark.parametrize("count", [1, 2])
def test_caches_are_kept_over_epochs(directory, count):
    calls = []
    dataset = (
        records(directory).map(counted(calls)).cache().shuffle(20).batch(4)
    )
    source = make_source(dataset, count)
    own = sorted(flat(batches_of(source)))
    assert sorted(flat(batches_of(source, epoch=1))) == own
    assert sorted(calls) == own
    # On one process the next `fit` uses it too.
    again = make_source(dataset, count)
    assert sorted(flat(batches_of(again))) == own
    assert len(calls) == len(own) * count


def python_functions():
    """Pipelines with Python functions, which take a function that is mapped."""
    rows = tf.data.Dataset.range(13)
    two = tf.data.Dataset.range(2)
    return {
        "map": lambda f: rows.map(f).batch(4),
        "map, shuffle": lambda f: rows.map(f).shuffle(13).batch(4),
        "shuffle, map": lambda f: rows.shuffle(13).map(f).batch(4),
        "parallel": lambda f: rows.map(f, 2).shuffle(13).batch(4),
        "interleave": lambda f: (
            two.interleave(lambda i: rows.map(f)).shuffle(30).batch(4)
        ),
        "filter": lambda f: (
            rows.filter(lambda row: f(row) % 3 > 0).shuffle(13).batch(4)
        ),
        "on a device": lambda f: rows.map(on_cpu(f)).shuffle(13).batch(4),
    }


def on_cpu(function):
    def call(row):
        with tf.device("/cpu:0"):
            return function(row)

    return call


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("map, shuffle", "interleave")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in python_functions()
    ],
)
@pytest.mark.parametrize("wrap", [tf.py_function, tf.numpy_function])
def test_python_functions_are_called(name, wrap):
    def apply(row):
        return tf.ensure_shape(wrap(lambda x: x * 1, [row], tf.int64), ())

    def make():
        return python_functions()[name](apply)

    expected = sorted(rows_of_tf(make().unbatch()))
    for count in (1, 3):
        assert rows_of(make, count) == expected


def test_a_split_dataset_does_not_use_the_whole_ones_cache(directory):
    dataset = records(directory).cache().batch(4)
    assert sorted(rows_of_tf(dataset)) == list(range(13))
    parts = [flat(batches_of(make_source(dataset, 2, i))) for i in range(2)]
    assert sorted(sum(parts, [])) == list(range(13))


@pytest.mark.parametrize("policy", [FILE, DATA])
def test_each_process_has_a_cache_file(directory, tmp_path, policy):
    def make():
        return records(directory).cache(f"{tmp_path}/cache").batch(4)

    for _ in range(2):
        assert rows_of(make, 2, policy) == list(range(13))
    files = {name.split("-of-")[0] for name in os.listdir(tmp_path)}
    assert files == {"cache.0", "cache.1"}


@pytest.mark.parametrize("count", [1, 2])
def test_functions_see_the_present_value_of_a_variable(count):
    variable = tf.Variable(0, dtype=tf.int64)
    dataset = tf.data.Dataset.range(4).shuffle(4).map(lambda x: x + variable)
    source = make_source(dataset.batch(4), count)
    assert sorted(flat(batches_of(source))) == [0, 1, 2, 3]
    variable.assign(10)
    assert sorted(flat(batches_of(source, epoch=1))) == [10, 11, 12, 13]


def test_functions_of_python_and_tables_are_kept():
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(
            tf.range(4, dtype=tf.int64), tf.range(10, 14, dtype=tf.int64)
        ),
        -1,
    )
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(range(4)), output_signature=tf.TensorSpec((), tf.int64)
    )
    dataset = dataset.shuffle(4).map(counted([])).map(table.lookup).batch(2)
    assert rows_of(lambda: dataset, 2) == [10, 11, 12, 13]


def test_large_arrays_are_shuffled():
    rows = np.arange(150_000)
    labels = rows.astype("float32")
    dataset = tf.data.Dataset.from_tensor_slices((rows, labels))
    source = make_source(dataset.shuffle(64).batch(100_000))
    for epoch in (0, 1):
        batches = batches_of(source, epoch=epoch)
        read = np.concatenate([x for x, _ in batches])
        assert (np.sort(read) == rows).all()
        assert (read != rows).any()
        assert all((x == y).all() for x, y in batches)


# What processes must agree on.


@pytest.mark.parametrize(
    ("make", "has_checksums"),
    [
        (lambda d: d, True),
        (lambda d: d.shuffle(8).map(lambda x: x + 1), True),
        (lambda d: d.shuffle(8).map(counted([])), False),
        (
            lambda d: d.shuffle(8).map(
                lambda x: x + tf.random.uniform((), 0, 9, tf.int64)
            ),
            False,
        ),
    ],
)
def test_batches_are_marked_unless_functions_draw(make, has_checksums):
    dataset = make(tf.data.Dataset.range(8)).batch(4)
    for count, policy in ((2, DATA), (1, DATA), (2, OFF)):
        parts = list(make_source(dataset, count, 0, policy).read(0, 0, _all))
        expected = has_checksums and (count, policy) == (2, DATA)
        assert all((part.checksum is not None) == expected for part in parts)


def _all(rows):
    return 0, rows


def test_batch_size_is_the_last_batchs():
    rows = tf.data.Dataset.range(9)
    for dataset, expected in (
        (rows.batch(4), 4),
        (rows.batch(4, drop_remainder=True).map(lambda x: x[:2]), 2),
        (rows.batch(4).map(lambda x: x[:2]), None),
        (rows.batch(4).repeat().prefetch(1), 4),
        (rows.padded_batch(4), 4),
        (tf.data.Dataset.zip((rows.batch(4), rows.batch(3))), None),
    ):
        assert make_source(dataset).batch_size == expected


# Bad input.


def test_an_unbatched_dataset_is_refused():
    with pytest.raises(ValueError, match=r"Call `\.batch\(global_batch_size\)"):
        make_source(tf.data.Dataset.range(8))


@pytest.mark.parametrize(
    ("dataset", "match"),
    [
        (
            lambda: tf.data.Dataset.from_tensor_slices(
                tf.ragged.constant([[1], [2, 3]])
            ).batch(2),
            r"dense tensors.*RaggedTensorSpec.*\.to_tensor",
        ),
        (
            lambda: tf.data.Dataset.from_tensors(
                tf.sparse.from_dense([[0, 1]])
            ),
            r"dense tensors.*SparseTensorSpec.*tf\.sparse\.to_dense",
        ),
        (
            lambda: tf.data.Dataset.from_tensors({"a": ["text"]}),
            "numbers or booleans.*string",
        ),
        (lambda: tf.data.Dataset.range(4).window(2), "DatasetSpec"),
    ],
)
def test_elements_that_are_no_arrays_are_refused(dataset, match):
    with pytest.raises(TypeError, match=match):
        make_source(dataset())


def test_a_missing_file_is_named(tmp_path):
    names = write(tmp_path, 100)
    dataset = tf.data.TFRecordDataset(names).map(number).batch(4)
    source = make_source(dataset, 2, 1)
    os.remove(names[3])
    with pytest.raises(tf.errors.NotFoundError, match=names[3]):
        batches_of(source)


def test_a_dataset_without_a_graph(monkeypatch):
    dataset = tf.data.Dataset.range(8).shuffle(8, seed=1).batch(4)
    order = rows_of_tf(tf.data.Dataset.range(8).shuffle(8, seed=1).batch(4))
    # As of arrays of 2 GiB, which would not fit into the test.
    module = sys.modules["keras_strategies.data.tfdata.tf_data"]
    monkeypatch.setattr(module, "write_graph", lambda dataset: None)
    assert flat(batches_of(make_source(dataset))) == order
    assert len(flat(batches_of(make_source(dataset, 2, 0, OFF)))) == 8
    with pytest.raises(ValueError, match="arrays of 2 GiB or more"):
        make_source(dataset, 2, 0, DATA)


def test_nothing_is_warned_of_twice(directory):
    with pytest.warns(UserWarning, match="take") as warned:
        source = make_source(records(directory).take(3).batch(2), 2)
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for epoch in range(2):
            batches_of(source, 2, 0, epoch)


@pytest.mark.parametrize("is_read_to_the_end", [True, False])
def test_nobody_waits_for_tensorflow_to_end_its_threads(
    is_read_to_the_end, monkeypatch
):
    may_go, is_gone = threading.Event(), threading.Event()
    make = tf.data.Dataset.as_numpy_iterator

    class Iterator:
        def __init__(self, dataset):
            self._iterator = make(dataset)

        def __iter__(self):
            return self

        def __next__(self):
            return next(self._iterator)

        def __del__(self):
            may_go.wait(20)
            is_gone.set()

    monkeypatch.setattr(
        tf.data.Dataset, "as_numpy_iterator", lambda self: Iterator(self)
    )
    reading = make_source(tf.data.Dataset.range(6).batch(2), 1, 0).read(
        0, 0, _all
    )
    assert len([next(reading) for _ in range(2)]) == 2
    if is_read_to_the_end:
        assert len(list(reading)) == 1
    else:
        reading.close()
    assert not is_gone.is_set()
    may_go.set()
    assert is_gone.wait(20)


LEFT_OPEN = """
import tensorflow as tf
from keras_strategies.data.source import all_rows
from keras_strategies.data.tfdata.tf_data import TfDataSource

source = TfDataSource(
    tf.data.Dataset.range(6).batch(2), num_processes=1, process_index=0, seed=3
)
reading = source.read(0, 0, all_rows)
next(reading)
"""


@pytest.mark.slow
def test_a_process_ends_while_a_dataset_is_read():
    # Python starts no threads any more when it collects what is left.
    ended = python("-c", LEFT_OPEN, timeout=120)
    assert ended.returncode == 0
    assert "Exception ignored" not in ended.stderr, ended.stderr


def test_a_reader_ends_when_python_has_emptied_its_module(monkeypatch):
    reading = make_source(tf.data.Dataset.range(6).batch(2), 1, 0).read(
        0, 0, _all
    )
    next(reading)
    let_go = tf_data._let_go
    monkeypatch.setattr(let_go, "__defaults__", (lambda: True,))
    for name in ("_let_go", "sys", "threading"):
        monkeypatch.setattr(tf_data, name, None)
    reading.close()

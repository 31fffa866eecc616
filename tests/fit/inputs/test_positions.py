"""Feeds that go on where others were: the same remaining batches."""

import itertools
import json
import random

import jax
import keras
import numpy as np
import pytest
from keras.src.trainers.data_adapters.array_data_adapter import (
    ArrayDataAdapter,
)
from keras.src.trainers.data_adapters.py_dataset_adapter import (
    PyDatasetAdapter,
)

import keras_strategies as ks
from keras_strategies.data.options import AutoShardPolicy
from keras_strategies.data.sources.file_source import FilesSource
from keras_strategies.data.sources.files import files as list_files
from keras_strategies.data.sources.iterables import IterableSource
from keras_strategies.fit.inputs import choose_source, keras_sources
from keras_strategies.fit.inputs.feed import make_feed
from keras_strategies.keras_bridge.keras_names import ORDERS_ARE_NUMBERED
from tests.support.optional import without_torch
from tests.support.workers import global_batches, read_all


@pytest.fixture(autouse=True)
def no_seed_of_tensorflow():
    """Other tests set one; shuffles without a seed have some after it."""
    import tensorflow as tf

    tf.random.set_seed(None)


ROWS, SIZE = 30, 4  # Seven batches and a half.
STEPS = 8
X = np.arange(ROWS, dtype="float32")[:, None]


class Dataset(keras.utils.PyDataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        return (X[index * SIZE : (index + 1) * SIZE],)


class Factory:
    """Makes a generator anew for each epoch."""

    def __iter__(self):
        for start in range(0, ROWS, SIZE):
            yield (X[start : start + SIZE],)


def arrays(shuffle):
    def make(count, index, seed):
        del count, index, seed
        return keras_sources.ArraySource(
            ArrayDataAdapter(X, batch_size=SIZE, shuffle=shuffle)
        )

    return make


def py_dataset(**kwargs):
    def make(count, index, seed):
        del index, seed
        adapter = PyDatasetAdapter(Dataset(**kwargs), shuffle=True)
        return keras_sources.PyDatasetSource(adapter, has_checksums=count > 1)

    return make


def factory(count, index, seed):
    del index, seed
    return IterableSource(
        Factory(), is_process_local=False, has_checksums=count > 1
    )


def read_lines(path):
    with open(path) as file:
        for line in file:
            yield np.array([line], "float32")


def files(reader):
    def make(directory):
        def source(count, index, seed):
            paths = []
            for number, rows in enumerate(np.array_split(X, 3)):
                path = directory / f"{number}.{reader}"
                paths.append(path)
                if path.exists():
                    continue
                if reader == "npy":
                    np.save(path, rows)
                else:
                    path.write_text("\n".join(str(r[0]) for r in rows))
            return FilesSource(
                list_files(
                    paths,
                    "npy" if reader == "npy" else read_lines,
                    batch_size=SIZE,
                    shuffle=9,
                ),
                num_processes=count,
                process_index=index,
                seed=seed,
                policy=AutoShardPolicy.DATA,
            )

        return source

    return make


def grain_map(count, index, seed):
    import grain

    from keras_strategies.data.grain.grain_data import GrainSource

    del seed
    dataset = grain.MapDataset.source(X).seed(5).shuffle().batch(SIZE)
    return GrainSource(dataset, num_processes=count, process_index=index)


def grain_iter(count, index, seed):
    import grain

    from keras_strategies.data.grain.grain_data import GrainSource

    del seed
    dataset = grain.MapDataset.source(X).seed(5).shuffle()
    return GrainSource(
        dataset.to_iter_dataset().batch(SIZE),
        num_processes=count,
        process_index=index,
    )


def torch_data(count, index, seed):
    import torch

    from keras_strategies.data.sources.torch_data import TorchSource

    dataset = torch.utils.data.TensorDataset(torch.tensor(X))
    return TorchSource(
        torch.utils.data.DataLoader(dataset, batch_size=SIZE, shuffle=True),
        num_processes=count,
        process_index=index,
        seed=seed,
    )


def tf_data(count, index, seed):
    import tensorflow as tf

    from keras_strategies.data.tfdata.tf_data import TfDataSource

    dataset = tf.data.Dataset.from_tensor_slices(X).cache().shuffle(ROWS)
    return TfDataSource(
        dataset.batch(SIZE), num_processes=count, process_index=index, seed=seed
    )


SOURCES = {
    "arrays": arrays(False),
    "shuffled arrays": arrays(True),
    "arrays shuffled by batch": arrays("batch"),
    "PyDataset": py_dataset(),
    "PyDataset with workers": py_dataset(workers=2, max_queue_size=3),
    "factory": factory,
    "npy files": files("npy"),
    "text files": files("text"),
    "grain": grain_map,
    "grain iterator": grain_iter,
    "torch": torch_data,
    "tf.data": tf_data,
}
SHUFFLED = set(SOURCES) - {"arrays", "factory"}
# Their order comes from a seed that the user gives.
OF_USER = {"grain", "grain iterator"}
# Their order is drawn as Keras draws it.
OF_KERAS = {
    "shuffled arrays",
    "arrays shuffled by batch",
    "PyDataset",
    "PyDataset with workers",
}


def made(name, directory):
    source = SOURCES[name]
    return source(directory) if "files" in name else source


@pytest.fixture
def seed_of_others():
    """Another state of the random generators, as in another process."""
    numbers = itertools.count(17)

    def draw():
        number = next(numbers)
        np.random.seed(number)
        random.seed(number)

    draw()
    yield draw
    draw()


@pytest.mark.parametrize("name", SOURCES)
def test_the_rest_of_an_epoch_on_other_numbers_of_processes(
    name, tmp_path, seed_of_others
):
    """2 -> 1 -> 3 processes, each with random states of its own."""
    make = made(name, tmp_path)
    first = make(2, 0, 1234)
    seed = json.loads(json.dumps(first.seed))
    assert (seed is not None) == (name in SHUFFLED - OF_USER)

    def source(count, index):
        seed_of_others()
        restarted = make(count, index, 99)
        restarted.restart(seed)
        return restarted

    for epoch in (0, 2):
        whole = global_batches(read_all(source, workers=1, epoch=epoch))
        assert sorted(sum(whole, [])) == list(range(ROWS))
        if name in SHUFFLED:
            assert sum(whole, []) != list(range(ROWS))
        kept = []
        for workers, start, stop in [(2, 0, 3), (1, 3, 4), (3, 4, 8)]:
            kept += global_batches(
                read_all(
                    source, workers=workers, epoch=epoch, start=start, stop=stop
                )
            )
        assert kept == whole


def test_another_seed_gives_another_order(tmp_path, seed_of_others):
    for name in without_torch(SHUFFLED - OF_USER):
        make = made(name, tmp_path)
        seed_of_others()
        first, second = make(1, 0, 1), make(1, 0, 1)
        seed_of_others()
        other = make(1, 0, 2)
        second.restart(first.seed)
        orders = [
            global_batches(read_all(lambda *_, s=s: s, workers=1))
            for s in (first, second, other)
        ]
        assert orders[0] == orders[1], name
        # Keras 3.16 shuffles by the epoch's number, whatever the seed.
        is_numbered = ORDERS_ARE_NUMBERED and name in OF_KERAS
        assert (orders[0] == orders[2]) == is_numbered, name


# The same through `DistributedIterator` and `Feed`, on one process.


def make_dataset(name):
    """What a user gives, whose order is not seeded."""
    if name == "arrays":
        return X
    if name == "PyDataset":
        return Dataset()
    if name == "PyDataset with workers":
        return Dataset(workers=2)
    if name == "tf.data":
        import tensorflow as tf

        dataset = tf.data.Dataset.from_tensor_slices(X).shuffle(ROWS)
        return dataset.batch(SIZE)
    if name == "torch":
        import torch

        dataset = torch.utils.data.TensorDataset(torch.tensor(X))
        return torch.utils.data.DataLoader(
            dataset, batch_size=SIZE, shuffle=True
        )
    assert name == "factory"
    return Factory()


def rows(batch):
    parts = [
        np.asarray(part)[:, 0]
        for leaf in jax.tree.leaves(
            batch, is_leaf=lambda v: isinstance(v, ks.PerReplica)
        )
        for part in leaf.values
    ]
    return np.concatenate(parts).tolist()


@pytest.mark.parametrize(
    "name",
    ["PyDataset", "PyDataset with workers", "factory", "tf.data", "torch"],
)
def test_a_distributed_iterator_goes_on(name, seed_of_others):
    strategy = ks.MirroredStrategy(jax.devices()[:3])
    distributed = strategy.experimental_distribute_dataset(make_dataset(name))
    list(distributed)  # An epoch; the next one is interrupted.
    iterator = iter(distributed)
    for _ in range(3):
        next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    assert (state["epoch"], state["step"]) == (1, 3)
    expected = [rows(batch) for batch in iterator]
    assert len(expected) == STEPS - 3
    seed_of_others()
    strategy = ks.MirroredStrategy(jax.devices()[:2])
    other = strategy.experimental_distribute_dataset(make_dataset(name))
    iterator = iter(other)
    next(iterator)
    iterator.set_state(state)  # While a thread reads ahead.
    assert iterator.get_state() == state
    assert [rows(batch) for batch in iterator] == expected


@pytest.mark.parametrize(
    "name",
    [
        *("arrays", "PyDataset", "PyDataset with workers"),
        *("factory", "tf.data", "torch"),
    ],
)
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_a_feed_goes_on(name, steps_per_execution, seed_of_others):
    mesh = ks.MirroredStrategy(jax.devices()[:2])._runtime.mesh

    def feed():
        seed_of_others()
        data = make_dataset(name)
        if name == "factory":
            data = ks.MirroredStrategy(
                jax.devices()[:2]
            ).experimental_distribute_dataset(data)
        return make_feed(
            mesh,
            x=data,
            batch_size=SIZE if name == "arrays" else None,
            shuffle=name in ("arrays", "PyDataset", "PyDataset with workers"),
            steps_per_execution=steps_per_execution,
        )

    def read(feed, stop=None):
        feed.on_epoch_begin()
        executions = feed.get_jax_iterator()
        read = []
        for execution in itertools.islice(executions, stop):
            for segment in execution.segments:
                leaf = np.asarray(jax.tree.leaves(segment.data)[0])
                steps = leaf if segment.steps > 1 else leaf[None]
                read += [step[: segment.rows, 0].tolist() for step in steps]
        executions.close()
        feed.on_epoch_end()
        return read

    first = feed()
    assert first.yielded == (0, 0)
    read(first)
    assert first.yielded == (1, 0)
    begun = read(first, 2)
    position = json.loads(json.dumps(first.position_at(first.yielded)))
    step = 2 * steps_per_execution
    assert (position["epoch"], position["step"]) == (1, step)
    whole = feed()
    whole.resume(position | {"step": 0})
    expected = read(whole)
    assert expected[:step] == begun
    assert sorted(sum(expected, [])) == list(range(ROWS))
    second = feed()
    second.resume(position)
    assert second.position_at(second.yielded) == position
    assert read(second) == expected[step:]
    after = [read(whole), read(second)]
    assert after[0] == after[1]
    assert whole.yielded == second.yielded


def test_a_position_has_the_seeds_of_tensorflow():
    """Shuffles without a seed have some after `set_random_seed`."""
    mesh = ks.MirroredStrategy(jax.devices()[:2])._runtime.mesh

    def feed(seed):
        keras.utils.set_random_seed(seed)
        return make_feed(mesh, x=make_dataset("tf.data"))

    def read(feed):
        feed.on_epoch_begin()
        return [
            np.asarray(jax.tree.leaves(execution.segments[0].data)[0]).tolist()
            for execution in feed.get_jax_iterator()
        ]

    first, other = feed(1), feed(2)
    position = json.loads(json.dumps(first.position_at(first.yielded)))
    expected = [read(first) for _ in range(3)]
    assert read(other) != expected[0]
    other = feed(2)
    other.resume(position)
    assert other.position_at(other.yielded) == position
    assert [read(other) for _ in range(3)] == expected


def test_a_state_of_something_else_is_refused():
    strategy = ks.MirroredStrategy(jax.devices()[:2])
    iterator = iter(strategy.experimental_distribute_dataset(Factory()))
    with pytest.raises(ValueError, match="that `get_state` returned"):
        iterator.set_state({"step": 3})


def test_a_state_of_another_kind_of_data_is_refused():
    tf = pytest.importorskip("tensorflow")
    strategy = ks.MirroredStrategy(jax.devices()[:2])
    dataset = tf.data.Dataset.range(8).shuffle(8).batch(2)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    state = iterator.get_state() | {"seed": "of arrays"}
    with pytest.raises(ValueError, match="order is for different data"):
        iterator.set_state(state)


def test_a_left_iterator_does_not_disturb_the_next(seed_of_others):
    strategy = ks.MirroredStrategy(jax.devices()[:2])
    dataset = Dataset(workers=2)
    distributed = strategy.experimental_distribute_dataset(dataset)
    for _ in range(5):
        for _batch in distributed:
            break
    read = [rows(batch) for batch in distributed]
    assert sorted(sum(read, [])) == list(range(ROWS))


def test_sources_say_what_must_be_alike():
    mesh = ks.MirroredStrategy(jax.devices()[:2])._runtime.mesh
    source = choose_source.make_dataset_source(Dataset(), mesh)
    assert source.facts() == {
        "data": "a PyDataset",
        "own rows": False,
        "batch_size": None,
        "num_batches": STEPS,
    }


@pytest.mark.parametrize("workers", [1, 3])
def test_an_epoch_that_was_left_leaves_nothing_behind(workers):
    """Keras hands what the workers have read to the next epoch."""
    source = keras_sources.PyDatasetSource(
        PyDatasetAdapter(Dataset(workers=workers))
    )
    for stop in (1, 3, 2):
        source.begin_epoch(0, 0)
        parts = source.read(0, 0, lambda count: (0, count))
        assert len(list(itertools.islice(parts, stop))) == stop
        source.end_epoch()
        parts.close()
    read = global_batches(read_all(lambda *_: source, workers=1))
    assert sum(read, []) == list(range(ROWS))


def test_a_pass_goes_on_over_epochs_of_the_loop():
    """With steps_per_epoch, also while there are workers."""
    mesh = ks.MirroredStrategy(jax.devices()[:2])._runtime.mesh
    feed = make_feed(mesh, x=Dataset(workers=3), steps_per_epoch=3)
    executions = feed.get_jax_iterator()
    read = []
    for _ in range(2):
        feed.on_epoch_begin()
        for execution in itertools.islice(executions, 3):
            (segment,) = execution.segments
            (leaf,) = jax.tree.leaves(segment.data)
            read += np.asarray(leaf)[: segment.rows, 0].tolist()
        feed.on_epoch_end()
    assert read == list(range(6 * SIZE))
    executions.close()

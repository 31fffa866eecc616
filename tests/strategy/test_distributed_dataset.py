"""Datasets of custom loops: every row once, in order, on its replica."""

import contextlib

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.strategy import current
from tests.support.combinations import combine
from tests.support.plain_keras import mirrored

X = np.arange(14, dtype="float32")[:, None]


class Pairs(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.ended = 0

    def __len__(self):
        return 2

    def __getitem__(self, index):
        rows = slice(index * 8, (index + 1) * 8)
        return X[rows], {"y": 2 * X[rows]}

    def on_epoch_end(self):
        self.ended += 1


def tf_data():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, {"y": 2 * X})).batch(8)


SOURCES = {
    "numpy": lambda: NUMPY.batch(8),
    "PyDataset": Pairs,
    "tf.data": tf_data,
    "iterable": lambda: [(X[:8], {"y": 2 * X[:8]}), (X[8:], {"y": 2 * X[8:]})][
        ::1
    ].__iter__(),
}
NUMPY = mirrored(1).experimental_make_numpy_dataset((X, {"y": 2 * X}))


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(
    ("replicas", "shares"),
    [
        (1, [(8,), (6,)]),
        (2, [(4, 4), (4, 2)]),
        (3, [(3, 3, 2), (3, 3, 0)]),
        (8, [(1,) * 8, (1,) * 6 + (0, 0)]),
    ],
)
def test_every_row_is_on_its_replica(name, replicas, shares):
    strategy = mirrored(replicas)
    dataset = strategy.experimental_distribute_dataset(SOURCES[name]())
    seen, counts = [], []
    for x, nest in dataset:
        for part in strategy.experimental_local_results((x, nest)):
            np.testing.assert_array_equal(part[1]["y"], 2 * part[0])
        parts = strategy.experimental_local_results(x)
        counts.append(tuple(len(part) for part in parts))
        seen.append(np.concatenate([np.asarray(p) for p in parts]))
    np.testing.assert_array_equal(np.concatenate(seen), X)
    assert counts == shares


def test_it_is_iterated_again_and_again():
    source = Pairs()
    dataset = mirrored(2).experimental_distribute_dataset(source)
    assert [len(list(dataset)) for _ in range(3)] == [2, 2, 2]
    assert source.ended == 3
    assert dataset.element_spec == (
        ((None, 1), np.dtype("float32")),
        {"y": ((None, 1), np.dtype("float32"))},
    )
    assert iter(dataset).element_spec == dataset.element_spec


def test_an_optional_tells_the_end():
    dataset = mirrored(2).experimental_distribute_dataset(NUMPY.batch(8))
    iterator = iter(dataset)
    taken = [iterator.get_next_as_optional() for _ in range(3)]
    assert [o.has_value() for o in taken] == [True, True, False]
    assert taken[0].get_value()[0].values[0].shape == (4, 1)
    with pytest.raises(ValueError, match="`Optional` that has a value"):
        taken[2].get_value()
    with pytest.raises(StopIteration):
        iterator.get_next()


def test_lists_are_stacked():
    dataset = mirrored(2).experimental_make_numpy_dataset([X[0], X[1], X[2]])
    assert len(dataset) == 3
    rows = list(dataset.batch(2, drop_remainder=True))
    assert [r.tolist() for r in rows] == [[[0.0], [1.0]]]
    assert len(dataset.batch(2)) == 2


@pytest.mark.parametrize("replicas", combine([2, 3, 8], every=2))
def test_a_loop_over_it_counts_the_true_rows(replicas):
    # The seeds' page: 6 rows at a batch of 4 are 6, not 8.
    strategy = mirrored(replicas)
    dataset = strategy.experimental_distribute_dataset(
        strategy.experimental_make_numpy_dataset(X[:6]).batch(4)
    )
    total, means, entries = 0.0, [], 0
    for x in dataset:
        out = strategy.run(lambda x: {"x": x, "sum": jnp.sum(x)}, args=(x,))
        total += strategy.reduce("sum", out["sum"], axis=None)
        means.append(float(strategy.reduce("mean", out["x"], axis=0)[0]))
        ones = strategy.run(jnp.ones_like, args=(x,))
        entries += int(strategy.reduce(ks.ReduceOp.SUM, ones, axis=0)[0])
    assert float(total) == 15.0
    assert means == [1.5, 4.5]
    assert entries == 6


@pytest.mark.parametrize("wrong", [X, (X, X), {"x": X}, [X], 3, None])
def test_what_yields_no_batches_is_refused(wrong):
    with pytest.raises(TypeError, match="must yield global batches"):
        mirrored(2).experimental_distribute_dataset(wrong)


def test_an_unbatched_dataset_is_refused():
    scalars = mirrored(2).experimental_make_numpy_dataset(X[:, 0])
    with pytest.raises(ValueError, match="Call `.batch"):
        mirrored(2).experimental_distribute_dataset(scalars)


def test_rows_without_batches_are_as_docs_parity_has_them():
    """As recorded of tf 2.21, but for scalars, which its functions give."""
    tf = pytest.importorskip("tensorflow")
    strategy = mirrored(2)
    local = strategy.experimental_local_results

    def rows(_=None):
        return tf.data.Dataset.from_tensor_slices([[0.0, 1.0], [2.0, 3.0]])

    def scalars(_=None):
        return tf.data.Dataset.range(2)

    dataset_data = strategy.experimental_distribute_dataset(rows())
    assert [[v.tolist() for v in local(x)] for x in dataset_data] == [
        [[0.0], [1.0]],
        [[2.0], [3.0]],
    ]
    function_data = strategy.distribute_datasets_from_function(rows)
    assert [[v.tolist() for v in local(x)] for x in function_data] == [
        [[0.0, 1.0], [2.0, 3.0]]
    ]
    with pytest.raises(ValueError, match="Call `.batch"):
        strategy.experimental_distribute_dataset(scalars())
    with pytest.raises(ValueError, match="must have a first dimension"):
        next(iter(strategy.distribute_datasets_from_function(scalars)))


def test_batches_lie_on_the_devices():
    strategy = mirrored(2)
    (x, _), *_ = strategy.experimental_distribute_dataset(NUMPY.batch(8))
    assert isinstance(x, ks.PerReplica)
    assert [v.devices() for v in x.values] == [
        {d} for d in strategy.extended.worker_devices
    ]
    assert all(isinstance(v, jax.Array) for v in x.values)


# Datasets made by a function: a replica's batches already.


def sizes_of_steps(strategy, lengths):
    """Each step's rows on each replica, of batches with so many rows."""
    ends = np.cumsum(lengths)
    batches = [
        X[end - length : end] for end, length in zip(ends, lengths, strict=True)
    ]
    dataset = strategy.distribute_datasets_from_function(
        lambda _: batches_of(batches)
    )
    steps, rows = [], []
    for batch in dataset:
        parts = strategy.experimental_local_results(batch)
        steps.append(tuple(len(part) for part in parts))
        rows.append(np.asarray(strategy.gather(batch, axis=0)))
    np.testing.assert_array_equal(np.concatenate(rows), X[: ends[-1]])
    return steps


class batches_of:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


@pytest.mark.parametrize(
    ("replicas", "lengths", "steps"),
    [
        (1, [4, 4, 2], [(4,), (4,), (2,)]),
        (2, [4, 4, 4, 2], [(4, 4), (4, 2)]),
        (2, [4, 4, 4], [(4, 4), (4, 0)]),
        (3, [1, 1, 1, 1], [(1, 1, 1), (1, 0, 0)]),
        (8, [2] * 7, [(2,) * 7 + (0,)]),
    ],
)
def test_a_function_gives_each_replica_the_next_batch(replicas, lengths, steps):
    assert sizes_of_steps(mirrored(replicas), lengths) == steps


def test_a_function_is_told_about_its_pipeline():
    contexts = []

    def make(context):
        contexts.append(context)
        size = context.get_per_replica_batch_size(8)
        return NUMPY.batch(size)

    strategy = mirrored(2)
    dataset = strategy.distribute_datasets_from_function(make)
    assert len(contexts) == 1
    assert contexts[0] == ks.InputContext(
        num_input_pipelines=1, input_pipeline_id=0, num_replicas_in_sync=2
    )
    for _ in range(2):
        shapes = [
            [
                len(part)
                for part in strategy.experimental_local_results(batch[0])
            ]
            for batch in dataset
        ]
        assert shapes == [[4, 4], [4, 2]]
    with pytest.raises(ValueError, match="multiple of the number of"):
        contexts[0].get_per_replica_batch_size(7)


def test_the_old_name_of_datasets_from_function_warns_once(monkeypatch):
    monkeypatch.setattr(current, "_warned", set())
    strategy = mirrored(2)

    def make():
        return strategy.experimental_distribute_datasets_from_function(
            lambda _: NUMPY.batch(2)
        )

    with pytest.warns(DeprecationWarning, match="its new name"):
        make()
    make()


def test_what_is_no_function_of_batches_is_refused():
    strategy = mirrored(2)
    with pytest.raises(TypeError, match="a function that returns a dataset"):
        strategy.distribute_datasets_from_function(NUMPY.batch(2))
    with pytest.raises(TypeError, match="must yield global batches"):
        strategy.distribute_datasets_from_function(lambda _: X)
    mixed = batches_of([X[:2], X[:2].astype("int32")])
    with pytest.raises(ValueError, match="only in their number of rows"):
        next(iter(strategy.distribute_datasets_from_function(lambda _: mixed)))


def test_a_dataset_is_not_made_for_each_replica():
    options = ks.InputOptions(
        experimental_replication_mode=ks.InputReplicationMode.PER_REPLICA
    )
    with pytest.raises(NotImplementedError, match="from_function"):
        mirrored(2).experimental_distribute_dataset(NUMPY.batch(2), options)


def numbers(strategy):
    rows = np.arange(8, dtype="float32")[:, None]
    dataset = strategy.experimental_make_numpy_dataset(rows).batch(2)
    return strategy.experimental_distribute_dataset(dataset)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_a_replica_reads_no_iterator(replicas, debug):
    strategy = mirrored(replicas)
    iterator = iter(numbers(strategy))

    def fn():
        return jnp.sum(next(iterator))

    with strategy.debug() if debug else contextlib.nullcontext():
        with pytest.raises(ValueError, match=r"args=\(next\(iterator\),\)"):
            strategy.run(fn)
        with pytest.raises(ValueError, match="runs on replicas"):
            strategy.run(iterator.get_next_as_optional)
    # Nothing was read.
    total = strategy.run(jnp.sum, args=(next(iterator),))
    assert float(strategy.reduce("sum", total, axis=None)) == 1.0


def test_a_traced_function_reads_no_iterator():
    strategy = mirrored(2)
    iterator = iter(numbers(strategy))

    def fn(x):
        return x + strategy.reduce("sum", next(iterator), axis=0)

    for transform in (jax.jit, jax.make_jaxpr, lambda f: jax.jit(jax.grad(f))):
        with pytest.raises(ValueError, match="is compiled"):
            transform(fn)(0.0)
    # A gradient that is computed on the spot reads anew in each call.
    found = [float(jax.value_and_grad(lambda x: fn(x)[0])(0.0)[0])]
    found.append(float(jax.value_and_grad(lambda x: fn(x)[0])(0.0)[0]))
    assert found == [1.0, 5.0]


def test_a_train_step_reads_no_iterator():
    strategy = mirrored(2)
    iterator = iter(numbers(strategy))

    class Reading(keras.Sequential):
        def train_step(self, *args, **kwargs):
            next(iterator)
            return super().train_step(*args, **kwargs)

    with strategy.scope():
        model = Reading([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="Read the batch first"):
        model.fit(np.zeros((4, 1)), np.zeros((4, 1)), verbose=0)

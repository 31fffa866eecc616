"""Datasets that the default strategy distributed, in Keras's own loops."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.trainers import data_adapters

import keras_strategies as ks
from tests.support.combinations import combine
from tests.support.plain_keras import assert_same, dense, mirrored

pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")

X = np.random.default_rng(0).normal(size=(10, 3)).astype("float32")
Y = (X.sum(axis=1, keepdims=True) > 0).astype("float32")


def build(*, is_built=True):
    first = [keras.Input((3,))] if is_built else []
    model = keras.Sequential([*first, dense(4), dense(1)])
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def tf_dataset(_=None):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)


def batches():
    return ((X[i : i + 4], Y[i : i + 4]) for i in range(0, 10, 4))


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = slice(4 * index, 4 * index + 4)
        return X[rows], Y[rows]


def datasets(strategy):
    distribute = strategy.experimental_distribute_dataset
    make_numpy = strategy.experimental_make_numpy_dataset
    return {
        "tf.data": distribute(tf_dataset()),
        "function": strategy.distribute_datasets_from_function(tf_dataset),
        "generator": distribute(batches()),
        "PyDataset": distribute(Batches()),
        "numpy": distribute(make_numpy((X, Y)).batch(4)),
    }


def loops(model, x, *, y=None, **kwargs):
    """One epoch, as a generator has no more; then the other loops."""
    history = model.fit(x(), y, verbose=0, shuffle=False, **kwargs).history
    kwargs.pop("class_weight", None)
    evaluated = model.evaluate(x(), y, verbose=0, **kwargs)
    predicted = model.predict(x(), verbose=0, **kwargs)
    return history, evaluated, predicted, model.get_weights()


@pytest.mark.parametrize(
    ("name", "is_built"),
    combine(
        ["tf.data", "function", "generator", "PyDataset", "numpy"],
        [True, False],
        every=3,
    ),
    ids=lambda value: {True: "built", False: "unbuilt"}.get(value),
)
def test_loops_take_what_the_default_strategy_distributed(name, is_built):
    strategy = ks.get_strategy()
    with strategy.scope():
        model = build(is_built=is_built)
    ours = loops(model, lambda: datasets(strategy)[name])
    plain = loops(build(is_built=is_built), lambda: X, y=Y, batch_size=4)
    assert_same(plain, ours)


def test_epochs_validation_data_and_class_weights():
    strategy = ks.get_strategy()
    given = {"class_weight": {0: 1.0, 1: 3.0}, "epochs": 3, "shuffle": False}
    given["verbose"] = 0
    data = datasets(strategy)["tf.data"]
    ours = build()
    history = ours.fit(data, validation_data=data, **given).history
    plain = build()
    expected = plain.fit(
        tf_dataset(), validation_data=tf_dataset(), **given
    ).history
    assert_same(expected, history)
    assert_same(plain.get_weights(), ours.get_weights())
    # Three epochs of one step are the three steps of one.
    steps = build().fit(data, epochs=3, steps_per_epoch=1, verbose=0).history
    assert len(steps["loss"]) == 3


def test_arguments_that_a_dataset_has_no_use_for_are_refused():
    strategy = ks.get_strategy()
    distribute = strategy.experimental_distribute_dataset
    with pytest.raises(ValueError, match="targets and sample"):
        build().fit(distribute(tf_dataset()), Y, verbose=0)
    with pytest.raises(ValueError, match="needs a number of steps"):
        build().fit(distribute(tf_dataset().repeat()), verbose=0)


def test_a_bound_model_and_other_datasets_are_as_before():
    data = datasets(ks.get_strategy())["tf.data"]
    with mirrored(2).scope():
        model = build()
    assert_same(
        loops(build(), tf_dataset), loops(model, lambda: data), tolerance=1e-4
    )
    others = mirrored(2).experimental_distribute_dataset(tf_dataset())
    with pytest.raises(ValueError, match="Unrecognized data type"):
        build().fit(others, verbose=0)


def test_keras_is_as_it_was_when_the_dataset_is_gone():
    gc.collect()
    get_data_adapter = data_adapters.get_data_adapter
    strategy = ks.get_strategy()
    data = strategy.experimental_distribute_dataset(tf_dataset())
    assert data_adapters.get_data_adapter is not get_data_adapter
    build().fit(data, verbose=0)
    del data
    gc.collect()
    assert data_adapters.get_data_adapter is get_data_adapter


SPARSE = np.array([[1, 0, 0], [0, 2, 0], [0, 0, 3], [4, 0, 0]], "float32")


def sparse(_=None):
    rows = tf.sparse.from_dense(SPARSE), {"y": np.ones((4, 1), "float32")}
    return tf.data.Dataset.from_tensor_slices(rows)


@pytest.mark.parametrize("replicas", [1, 2])
def test_sparse_elements_are_made_dense(replicas):
    strategy = mirrored(replicas)
    whole = strategy.experimental_distribute_dataset(sparse().batch(4))
    from_function = strategy.distribute_datasets_from_function(
        lambda context: sparse().batch(4 // replicas)
    )
    for dataset in (whole, from_function):
        (x, y) = next(iter(dataset))
        rows = np.concatenate(strategy.experimental_local_results(x))
        if dataset is whole:
            np.testing.assert_array_equal(rows, SPARSE)
        assert rows.shape == (4, 3)
        sums = strategy.run(lambda x, y: x.sum() * y["y"].sum(), args=(x, y))
        assert float(strategy.reduce("sum", sums, axis=None)) > 0

"""Datasets of the default strategy, and sparse elements."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_strategies as ks
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


def loops(model, x, *, y=None, **kwargs):
    """One epoch, as a generator has no more; then the other loops."""
    history = model.fit(x(), y, verbose=0, shuffle=False, **kwargs).history
    kwargs.pop("class_weight", None)
    evaluated = model.evaluate(x(), y, verbose=0, **kwargs)
    predicted = model.predict(x(), verbose=0, **kwargs)
    return history, evaluated, predicted, model.get_weights()


@pytest.mark.parametrize("is_built", [True, False])
def test_the_default_strategy_returns_datasets_of_tf_as_they_are(is_built):
    strategy = ks.get_strategy()
    data = strategy.experimental_distribute_dataset(tf_dataset())
    assert isinstance(data, tf.data.Dataset)
    data = strategy.distribute_datasets_from_function(tf_dataset)
    assert isinstance(data, tf.data.Dataset)
    with strategy.scope():
        model = build(is_built=is_built)
    ours = loops(model, lambda: data)
    plain = loops(build(is_built=is_built), lambda: X, y=Y, batch_size=4)
    assert_same(plain, ours)
    sums = [strategy.run(lambda x, y: x.sum() + y.sum(), pair) for pair in data]
    assert float(sum(sums)) == pytest.approx(X.sum() + Y.sum(), rel=1e-5)


def test_the_default_strategy_distributes_other_datasets():
    strategy = ks.get_strategy()
    data = strategy.experimental_distribute_dataset(
        (X[i : i + 4], Y[i : i + 4]) for i in range(0, 10, 4)
    )
    sums = [strategy.run(lambda x, y: x.sum() + y.sum(), pair) for pair in data]
    assert float(sum(sums)) == pytest.approx(X.sum() + Y.sum(), rel=1e-5)


SPARSE = np.array([[1, 0, 0], [0, 2, 0], [0, 0, 3], [4, 0, 0]], "float32")


def sparse(_=None):
    rows = tf.sparse.from_dense(SPARSE), {"y": np.ones((4, 1), "float32")}
    return tf.data.Dataset.from_tensor_slices(rows)


@pytest.mark.parametrize("replicas", [1, 2])
def test_sparse_elements_are_refused_or_made_dense(replicas):
    strategy = mirrored(replicas)
    with pytest.raises(TypeError, match=r"tf\.sparse\.to_dense"):
        strategy.experimental_distribute_dataset(sparse().batch(4))
    dataset = strategy.distribute_datasets_from_function(
        lambda context: sparse().batch(4 // replicas)
    )
    (x, y) = next(iter(dataset))
    rows = np.concatenate(strategy.experimental_local_results(x))
    assert rows.shape == (4, 3)
    sums = strategy.run(lambda x, y: x.sum() * y["y"].sum(), args=(x, y))
    assert float(strategy.reduce("sum", sums, axis=None)) > 0

"""Sparse data are read as dense ones, and give the same numbers."""

import keras
import numpy as np
import pytest
from jax.experimental import sparse

from tests.support.combinations import combine
from tests.support.mistakes import X, Y, compiled, make_iter, one_input
from tests.support.plain_keras import (
    assert_same,
    mirrored,
    no_data_left,
    no_shuffle,
)

DENSE = np.where(np.abs(X) > 1, X, 0).astype("float32")


def scipy_rows():
    from scipy.sparse import csr_matrix

    return csr_matrix(DENSE)


def scipy_array_rows():
    from scipy.sparse import csr_array

    return csr_array(DENSE)


def jax_rows():
    return sparse.BCOO.fromdense(DENSE)


def tf_rows():
    import tensorflow as tf

    return tf.sparse.from_dense(DENSE)


SPARSE = {
    "scipy matrix": scipy_rows,
    "scipy array": scipy_array_rows,
    "jax": jax_rows,
    "tf": tf_rows,
}


def all_loops(model, data):
    """The numbers of every loop on `data()`, an x and a y."""
    options = {"verbose": 0}
    x, y = data()
    results = [
        model.fit(x, y, batch_size=8, shuffle=False, **options).history,
        model.evaluate(x, y, batch_size=8, **options),
        model.predict(x, batch_size=8, **options),
        model.train_on_batch(x, y),
        model.test_on_batch(x, y),
        model.predict_on_batch(x),
    ]
    return results, model.get_weights()


@pytest.mark.parametrize("kind", combine(SPARSE, every=2))
def test_sparse_arrays_give_the_dense_numbers(kind):
    plain = one_input()
    plain.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    expected = all_loops(plain, lambda: (DENSE, Y))
    ours = compiled(mirrored(2))
    assert_same(expected, all_loops(ours, lambda: (SPARSE[kind](), Y)))


@no_shuffle
@no_data_left
@pytest.mark.parametrize("kind", ["scipy matrix", "jax", "tf"])
def test_sparse_generators_give_the_dense_numbers(kind):
    plain = one_input()
    plain.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    expected = plain.fit(DENSE, Y, batch_size=22, verbose=0).history
    ours = compiled(mirrored(2))
    data = make_iter((SPARSE[kind](), Y))
    assert_same(expected, ours.fit(data, verbose=0).history)


def test_sparse_tf_data_are_refused():
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((tf_rows(), Y)).batch(8)
    ours = compiled(mirrored(2))
    with pytest.raises(TypeError, match=r"tf\.sparse\.to_dense"):
        ours.fit(data, shuffle=False, verbose=0)

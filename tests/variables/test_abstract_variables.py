"""Values of abstract variables that code reads outside of steps."""

import contextlib

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.variables.abstract_variables import (
    ValueStore,
    describe,
    is_abstract,
    storing_values,
)

KERNEL = 4 * 40 * 30


@contextlib.contextmanager
def storing(max_bytes):
    def refuse(variable):
        return ValueError(f"of {describe(variable)}")

    with storing_values(ValueStore(max_bytes, refuse)):
        yield


def make_dense(**kwargs):
    layer = keras.layers.Dense(30, use_bias=False, **kwargs)
    with ks.abstract():
        layer.build((None, 40))
    return layer.kernel


def test_a_variable_reads_as_its_initializer_says_and_stays_abstract():
    initializer = keras.initializers.RandomNormal(seed=3)
    kernel = make_dense(kernel_initializer=initializer)
    with storing(KERNEL):
        for _ in range(2):
            np.testing.assert_array_equal(kernel, initializer((40, 30)))
    assert is_abstract(kernel)
    with pytest.raises(RuntimeError, match="has a shape and no value"):
        np.asarray(kernel)


def test_a_trace_reads_the_value_as_a_constant():
    kernel = make_dense(kernel_initializer="ones")
    with storing(KERNEL):
        total = jax.jit(lambda x: keras.ops.sum(x * kernel))(2.0)
        assert float(total) == 2 * 40 * 30
        # No tracer was stored.
        assert float(keras.ops.sum(kernel)) == 40 * 30


def test_a_value_is_assigned():
    kernel = make_dense()
    with storing(KERNEL):
        kernel.assign(np.full((40, 30), 2.0))
        kernel.assign_add(np.ones((40, 30)))
        np.testing.assert_array_equal(kernel, np.full((40, 30), 3.0))
        with pytest.raises(ValueError, match="must match"):
            kernel.assign(np.ones((2, 2)))


def test_the_values_of_all_variables_take_the_bytes_of_the_store():
    first, second = make_dense(), make_dense()
    with storing(2 * KERNEL - 1):
        np.asarray(first)
        with pytest.raises(ValueError, match=r"'.*kernel' of shape \(40, 30\)"):
            np.asarray(second)
        np.asarray(first)


def test_a_value_that_was_not_stored_is_not_read_as_the_initial_one():
    kernel = make_dense()
    with storing(KERNEL - 1):
        kernel.assign(np.ones((40, 30)))
    with storing(KERNEL), pytest.raises(ValueError, match="kernel"):
        np.asarray(kernel)


def test_a_variable_that_is_made_of_an_array_has_a_value():
    array = np.arange(2**19, dtype="float32")
    with ks.abstract():
        variable = keras.Variable(array)
    assert not is_abstract(variable)
    np.testing.assert_array_equal(variable, array)

"""Host arrays that JAX's CPU devices take without a copy."""

import jax
import ml_dtypes
import numpy as np
import pytest

from keras_strategies.spmd import host_arrays

pytestmark = pytest.mark.quick

DTYPES = ["float32", "float64", "int8", "bool", "complex64"]
DTYPES += [ml_dtypes.bfloat16]
SHAPES = [(0,), (3,), (7, 5), (100, 1000), (2, 3, 40_001), (300, 0)]


def values(shape, dtype):
    random = np.random.default_rng(0)
    return (random.normal(size=shape) * 100).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_are_kept(shape, dtype):
    array = values(shape, dtype)
    for whole in (array, array[::-1], array.T, array[1:]):
        for made in (host_arrays.copy_on_host(whole), host_arrays.align(whole)):
            assert (made.shape, made.dtype) == (whole.shape, whole.dtype)
            np.testing.assert_array_equal(made, whole)
        assert not np.shares_memory(host_arrays.copy_on_host(whole), whole)
        stacked = host_arrays.stack_arrays([whole, whole + whole])
        np.testing.assert_array_equal(stacked, [whole, whole + whole])
        assert stacked.dtype == whole.dtype
    indices = np.random.default_rng(1).permutation(len(array))
    for order in (indices, indices[:2], indices[:0], np.repeat(indices, 9)):
        taken = host_arrays.take_rows(array, order)
        np.testing.assert_array_equal(taken, array[order])
        assert taken.dtype == array.dtype


def test_large_ones_begin_where_jax_wants_them():
    large = values((1000, 101), "float32")
    for made in (
        host_arrays.copy_on_host(large[1:]),
        host_arrays.align(large[1:]),
        host_arrays.align(large.T),
        host_arrays.take_rows(large, np.arange(500)),
        host_arrays.stack_arrays([large] * 2),
    ):
        assert made.ctypes.data % 64 == 0
        assert made.flags.c_contiguous
        assert host_arrays.align(made) is made


def test_jax_takes_them_without_a_copy():
    """Else they are copied twice."""
    array = host_arrays.copy_on_host(values((1000, 101), "float32"))
    placed = jax.device_put(array, jax.devices()[0])
    assert placed.unsafe_buffer_pointer() == array.ctypes.data

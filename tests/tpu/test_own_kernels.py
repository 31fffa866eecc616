"""Users' Pallas kernels in steps that are compiled for TPUs."""

import warnings

import jax
import jax.numpy as jnp
import keras
import pytest
from jax.experimental import pallas

import keras_strategies as ks

pytestmark = pytest.mark.tpu

WIDTH = 128
KERNEL = "tpu_custom_call"


def product(x, weights):
    """A product of rows and weights, by a kernel."""

    def compute(x, weights, result):
        result[...] = jnp.dot(x[...], weights[...])

    shape = jax.ShapeDtypeStruct((x.shape[0], weights.shape[1]), x.dtype)
    return pallas.pallas_call(compute, out_shape=shape)(x, weights)


@jax.custom_vjp
def multiply(x, weights):
    return product(x, weights)


def forward(x, weights):
    return multiply(x, weights), (x, weights)


def backward(kept, cotangent):
    x, weights = kept
    return product(cotangent, weights.T), product(x.T, cotangent)


multiply.defvjp(forward, backward)


class Product(keras.layers.Layer):
    def build(self, shape):
        self.weights_ = self.add_weight(shape=(WIDTH, WIDTH))

    def call(self, x):
        return multiply(x, jnp.asarray(self.weights_))

    def compute_output_shape(self, shape):
        return shape


@ks.by_rows
class Marked(Product):
    pass


def compile_program(
    kind="train", *, rows=64, cores=1, is_sharded=False, is_marked=True
):
    strategy = ks.TPUStrategy.for_topology(
        "v5e:2x2",
        computation_shape=(1, cores, 1, 1),
        variable_partitioner=ks.experimental.FullySharded()
        if is_sharded
        else None,
    )
    with strategy.scope(), ks.abstract():
        layer = Marked() if is_marked else Product()
        x = keras.Input((WIDTH,))
        y = keras.layers.Dense(WIDTH)(x)
        model = keras.Model(x, keras.layers.Dense(WIDTH)(layer(y)))
        model.compile("adam", "mse")
    x = jax.ShapeDtypeStruct((rows, WIDTH), "float32")
    return strategy.compile_step(model, (x, x), kind=kind)


CASES = {
    "train": ({}, 3),
    "test": ({"kind": "test"}, 1),
    "predict": ({"kind": "predict"}, 1),
    "indivisible": ({"rows": 61}, 3),
    "sharded": ({"is_sharded": True}, 3),
    "two cores": ({"cores": 2}, 3),
    "indivisible, two cores": ({"cores": 2, "rows": 61}, 3),
    "predict, indivisible": ({"kind": "predict", "rows": 61}, 1),
}


@pytest.mark.parametrize(("case", "count"), CASES.values(), ids=CASES)
def test_a_marked_kernel_compiles(case, count):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text = compile_program(**case).as_text()
    assert text.count(KERNEL) == count


@pytest.mark.filterwarnings("ignore:This step runs over the global batch")
def test_a_kernel_without_a_mark_does_not_compile():
    with pytest.raises(NotImplementedError, match="shard_map"):
        compile_program(is_marked=False)

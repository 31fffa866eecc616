"""Gradients of weights in steps over the global batch."""

import re

import keras
import numpy as np
from keras import layers

from keras_strategies.fit.binding import find_binding
from keras_strategies.step.lower_step import lower_step
from tests.support.plain_keras import mirrored

ROWS, LENGTH, WIDTH = 7, 5, 8


def make_decoder(policy):
    def make(layer, *args, **kwargs):
        return layer(*args, dtype=policy, **kwargs)

    tokens = keras.Input((LENGTH,), dtype="int32")
    x = make(layers.Embedding, 11, WIDTH)(tokens)
    attention = make(layers.MultiHeadAttention, 2, 4)
    x = x + attention(x, x, use_causal_mask=True)
    x = make(layers.LayerNormalization)(x)
    x = x + make(layers.Dense, WIDTH, activation="gelu")(x)
    model = keras.Model(tokens, make(layers.Dense, 11)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss)
    return model


def lower(policy, rows):
    strategy = mirrored(2)
    with strategy.scope():
        model = make_decoder(policy)
    strategy.attach(model)
    build = find_binding(model).build_for_shapes
    batch = (np.zeros((rows, LENGTH), "int32"),) * 2
    return lower_step(model, strategy.mesh, "train", batch, build).as_text()


def find_sums(text):
    """The types of sums over rows: of products, and of arrays."""
    places = re.escape("contracting_dims = [0, 1] x [0, 1]")
    products = rf"stablehlo\.dot_general .*{places}.*-> tensor<(\S+)>"
    dims = re.escape("across dimensions = [0, 1] :")
    sums = rf"stablehlo\.reduce.*stablehlo\.add {dims} \(tensor<([^>]+)>"
    return re.findall(products, text), re.findall(sums, text)


def test_a_decoder_sums_gradients_in_float32():
    products, sums = find_sums(lower("mixed_bfloat16", ROWS))
    # Queries, keys, values, their projection, and two dense layers.
    assert len(products) == 6
    assert len(sums) >= 6
    assert [t for t in (*products, *sums) if not t.endswith("xf32")] == []


def test_products_are_not_transposed():
    """Otherwise the optimizer reads transposed arrays on CPU, slowly."""
    text = lower("float32", ROWS)
    places = re.escape("contracting_dims = [0, 1] x [0, 1]")
    products = re.findall(rf"(%\S+) = stablehlo\.dot_general .*{places}", text)
    transposed = re.findall(r"stablehlo\.transpose (%\w+),", text)
    assert len(products) == 6
    assert not set(products) & set(transposed)

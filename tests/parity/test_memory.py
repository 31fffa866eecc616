"""No device holds much more than its share of an indivisible batch."""

import jax
import keras
import pytest
from keras import layers

import keras_strategies as ks
from keras_strategies.spmd.rows import padded_rows
from tests.support.combinations import combine


@pytest.mark.slow
@pytest.mark.parametrize("rows", combine([2047, 2045, 1537], every=3))
def test_indivisible_batch_needs_at_most_a_fifth_more(rows):
    strategy = ks.MirroredStrategy(jax.devices()[:4])
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((512,))]
            + [layers.Dense(512, "relu") for _ in range(6)]
            + [layers.Dense(10)]
        )
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    def temporary_bytes(rows):
        x = jax.ShapeDtypeStruct((rows, 512), "float32")
        y = jax.ShapeDtypeStruct((rows,), "int32")
        return strategy.compile_step(model, (x, y)).temporary_bytes

    divisible = temporary_bytes(padded_rows(rows, 4))
    assert temporary_bytes(rows) <= 1.2 * divisible

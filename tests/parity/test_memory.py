"""No device holds much more than its share of an indivisible batch."""

import jax
import keras
import pytest
from keras import layers

import keras_strategies as ks
from keras_strategies.spmd.batches import Segment
from keras_strategies.spmd.rows import padded_rows
from keras_strategies.step.step_functions import make_program, step_variables
from keras_strategies.variables import shardings
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
        model.optimizer.build(model.trainable_variables)
    type(model)._symbolic_build(
        model, data_batch=(jax.numpy.zeros((4, 512)), jax.numpy.zeros((4,)))
    )
    mesh = strategy._runtime.mesh
    variables = step_variables(model, "train")
    program = make_program(model, mesh, "train", variables)
    state = tuple(shardings.get_shapes(group, mesh) for group in variables)

    def temporary_bytes(rows):
        padded = padded_rows(rows, 4)
        data = (
            jax.ShapeDtypeStruct((padded, 512), "float32", sharding=mesh.split),
            jax.ShapeDtypeStruct((padded,), "int32", sharding=mesh.split),
        )
        segment = Segment(data=data, rows=rows, steps=1)
        compiled = program.lower(state, segment).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    divisible = temporary_bytes(padded_rows(rows, 4))
    assert temporary_bytes(rows) <= 1.2 * divisible

"""Lookups in sharded tables as the TPU compiler sees them.

The bounds are those of programs of raw JAX that exchange ids and rows.
"""

import jax
import keras
import pytest
from keras import layers, ops

import keras_strategies as ks
from benchmarks.large_steps.tables import CASES
from benchmarks.sharded_tpu import LOW_EFFORT

pytestmark = pytest.mark.tpu

SIZES = (1000, 10_000, 50_000, 100_000, 10**6, 10**6, 5 * 10**6, 10**7)
WIDTH, ROWS = 32, 2048


@pytest.mark.parametrize("suffix", ["", "-half"])
def test_a_lookup_is_as_small_and_fast_as_in_jax(suffix):
    case = CASES["recommender"]
    ours, jax_ = (case.measure(n + suffix) for n in ("ours", "columns"))
    state = 12 * case.words * case.width / case.shards
    assert ours.costs.argument_bytes < 1.05 * state
    assert ours.costs.temporary_bytes < 1.2 * jax_.costs.temporary_bytes
    assert ours.milliseconds < 1.3 * jax_.milliseconds
    # Ids, and rows in both directions.
    assert sum(ours.costs.sent.values()) < 1e6


def test_a_recommender_gathers_no_large_table():
    strategy = ks.TPUStrategy.for_topology(
        "v5e:4x4", variable_partitioner=ks.experimental.FullySharded()
    )
    with strategy.scope(), ks.abstract():
        ids = keras.Input((len(SIZES),), dtype="int32")
        features = keras.Input((13,))
        values = [layers.Dense(WIDTH, "relu")(features)]
        for k, words in enumerate(SIZES):
            values.append(layers.Embedding(words, WIDTH)(ids[:, k]))
        stacked = ops.stack(values, axis=1)
        products = ops.matmul(stacked, ops.transpose(stacked, (0, 2, 1)))
        value = layers.Concatenate()([values[0], layers.Flatten()(products)])
        value = layers.Dense(1)(layers.Dense(512, "relu")(value))
        model = keras.Model([ids, features], value)
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adagrad(), loss)
    count = ROWS * strategy.num_replicas_in_sync
    shapes = (
        [
            jax.ShapeDtypeStruct((count, len(SIZES)), "int32"),
            jax.ShapeDtypeStruct((count, 13), "float32"),
        ],
        jax.ShapeDtypeStruct((count, 1), "float32"),
    )
    program = strategy.compile_step(
        model, shapes, compiler_options=dict(LOW_EFFORT)
    )
    # Weights and slots; the table of 1,000 rows is gathered.
    state = 8 * sum(SIZES) * WIDTH / 16
    assert program.argument_bytes < 1.05 * state
    # Gradients of all tables, and a quarter of them.
    assert program.temporary_bytes < 1.25 * state / 2
    assert sum(program.collective_bytes.values()) < 20e6
    assert program.collectives["all-to-all"] > 0

"""Plans for TPU slices, by the TPU compiler."""

import json

import jax
import keras
import pytest

import keras_strategies as ks
from tests.support.plain_keras import mirrored

pytestmark = pytest.mark.tpu

QUIET = {"progress": False}
LENGTH, WORDS, WIDTH = 64, 256, 128


class Block(keras.layers.Layer):
    """Attention and a feed-forward part of a decoder."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = keras.layers.RMSNormalization()
        self.attention = keras.layers.GroupQueryAttention(32, 4, 4)
        self.up = keras.layers.Dense(4 * WIDTH, "gelu", name="up")
        self.down = keras.layers.Dense(WIDTH, name="down")

    def build(self, shape):
        self.norm.build(shape)
        self.attention.build(shape, shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * WIDTH))

    def call(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.down(self.up(x))


def decoder(depth=2, remat=True):
    names = [f"block{i}" for i in range(depth)]
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, WIDTH)(inputs)
    mode = "list_of_layers" if remat else None
    with keras.RematScope(mode=mode, layer_names=names):
        for name in names:
            x = Block(name=name)(x)
    model = keras.Model(inputs, keras.layers.Dense(WORDS)(x))
    model.compile(
        keras.optimizers.AdamW(1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def tokens(rows):
    return jax.ShapeDtypeStruct((rows, LENGTH), "int32")


def plan(maker, rows=1, **kwargs):
    batch = (tokens(rows), tokens(rows))
    return mirrored(1).plan(maker, batch, **QUIET | kwargs)


def test_candidates_of_a_slice():
    found = plan(lambda: decoder(1), topologies="v5e:4x4")
    names = [step.layout for step in found.steps]
    assert names == ["replicated", "slots", "sharded", "sharded+model:4"]
    for step in found.steps:
        assert step.error is None
        assert step.fits
        assert step.estimate.seconds > 0
        assert 0 < step.estimate.utilization <= 1
        assert step.tokens == LENGTH
        assert step.max_rows > 100
    replicated, slots, sharded, model = found.steps
    assert model.num_replicas == 4
    assert (replicated.rows, model.rows) == (16, 4)
    assert sharded.memory["weights"] < replicated.memory["weights"] / 8
    assert slots.memory["weights"] == replicated.memory["weights"]
    assert sharded.counts["all-gather"] > 0
    assert found.fastest in found.steps
    json.dumps(found.to_json(), allow_nan=False)


def test_a_deep_model_is_planned_as_the_loop_that_runs():
    def unrolled():
        model = decoder(8)
        ks.experimental.scan_blocks(model, False)
        return model

    kwargs = {"topologies": "v5e:2x4", "strategies": "sharded", "rows": 4}
    # One candidate alone would be compiled at full effort.
    kwargs["effort"] = "low"
    (step,) = plan(lambda: decoder(8), **kwargs).steps
    (other,) = plan(unrolled, **kwargs).steps
    assert step.memory["weights"] == other.memory["weights"]
    assert step.memory["code"] < other.memory["code"] / 2
    for kind in ("all-gather", "reduce-scatter"):
        assert step.counts[kind] == other.counts[kind]
        assert step.sent[kind] == pytest.approx(other.sent[kind], rel=0.05)
    assert step.estimate.compute_seconds == pytest.approx(
        other.estimate.compute_seconds, rel=0.05
    )
    assert step.estimate.seconds == pytest.approx(
        other.estimate.seconds, rel=0.5
    )


def test_full_effort_is_the_program_as_it_is_run():
    def shallow():
        return decoder(1)

    (step,) = plan(
        shallow, topologies="v5e:2x2", strategies="replicated", effort="full"
    ).steps
    strategy = ks.TPUStrategy.for_topology("v5e:2x2")
    with strategy.scope():
        model = shallow()
    program = strategy.compile_step(model, (tokens(4), tokens(4)))
    assert step.is_full_effort
    code = program.executable.memory_analysis().generated_code_size_in_bytes
    assert step.memory["code"] == code > 0
    assert step.bytes_in_all == program.bytes_per_chip + code


def test_what_does_not_fit_says_what_it_needs():
    def large():
        model = keras.Sequential(
            [keras.Input((2**15,)), keras.layers.Dense(2**15)]
        )
        model.compile("adam", "mse")
        return model

    x = jax.ShapeDtypeStruct((1, 2**15), "float32")
    replicated, sharded = (
        mirrored(1)
        .plan(large, (x, x), "v5e:4x4", ["replicated", "sharded"], **QUIET)
        .steps
    )
    assert replicated.fits is False
    # Weights and two slots of 4 GiB each, and gradients.
    assert replicated.bytes_in_all > 12 * 2**30
    assert "FullySharded" in replicated.advice
    assert sharded.fits


def test_rows_grow_with_the_slice_or_stay():
    def dense():
        inputs = keras.Input((LENGTH,), dtype="int32")
        model = keras.Sequential(
            [
                inputs,
                keras.layers.Embedding(WORDS, 8),
                keras.layers.Dense(WORDS),
            ]
        )
        model.compile("adam", "sparse_categorical_crossentropy")
        return model

    kwargs = {"topologies": "v5e:2x2", "strategies": "slots", "effort": "low"}
    for scale, rows in (("replica", 32), ("global", 8)):
        (step,) = plan(dense, 8, scale=scale, **kwargs).steps
        assert step.rows == rows


def test_layouts_that_a_slice_has_no_room_for():
    found = plan(
        decoder, topologies="v5e:2x2", strategies=["sharded:3", "model:3"]
    )
    assert "tiles the slice" in found.steps[1].error
    assert found.steps[0].error
    assert not any(step.fits for step in found.steps)

"""Times of plans, beside rooflines made by hand.

Each roofline is the longest of the times for operations, for bytes and for
links, or the time of iterations that depend on each other, as a person would
write them down for this model and chip. A plan may differ from
it by a factor 1.5.
"""

import jax
import keras
import pytest
from keras import layers

import keras_strategies as ks
from tests.support.plain_keras import mirrored

pytestmark = pytest.mark.tpu

# A v5e chip, in operations and bytes a second.
PEAK, MEMORY, LINK = 197e12, 819e9, 50e9
TURN = 4.8e-6
"""An iteration of an LSTM's loops: 7,150 cycles of 1.5 GHz, as XLA estimates
for 256 units in programs compiled at full effort (the mean of both directions;
the gradients of the weights are summed after the loops)."""


QUIET = {"effort": "low", "progress": False}


def plan(maker, batch, topology="v5e:2x2", layout="replicated"):
    (step,) = mirrored(1).plan(maker, batch, topology, layout, **QUIET).steps
    assert step.error is None
    return step


def array(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


def is_near(found, expected):
    return expected / 1.5 < found < expected * 1.5


def classifier(*parts):
    model = keras.Sequential([*parts, layers.Dense(10, dtype="float32")])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)
    return model


def test_the_turns_of_a_loop_over_time_are_counted():
    def lstm():
        return classifier(
            keras.Input((400, 64)),
            layers.LSTM(256, return_sequences=True),
            layers.LSTM(256),
        )

    step = plan(lstm, (array(16, 400, 64), array(16, dtype="int32")))
    # Two loops forward and two backward.
    assert is_near(step.estimate.seconds, 4 * 400 * TURN)
    bounds = step.estimate.bounds
    assert max(bounds, key=bounds.get) == "latency"
    # Per row and turn, 4 x 256 gates read 64 + 256 or 256 + 256 inputs.
    forward = 16 * 400 * 2 * 4 * 256 * (64 + 256 + 256 + 256)
    assert is_near(bounds["compute"] * PEAK, 3 * forward)
    assert is_near(step.estimate.utilization, 3 * forward / PEAK / 0.0077)
    assert "lstm" in step.advice
    assert "of the" in step.advice


def test_the_host_bounds_a_small_model_unless_a_program_has_many_steps():
    def planned(steps):
        def mlp():
            model = keras.Sequential(
                [
                    keras.Input((256,)),
                    layers.Dense(512, "relu"),
                    layers.Dense(256),
                ]
            )
            model.compile("adam", "mse", steps_per_execution=steps)
            return model

        rows = array(64, 256)
        return plan(mlp, (rows, rows))

    one, many = planned(1), planned(32)
    bounds = one.estimate.bounds
    assert max(bounds, key=bounds.get) == "host"
    assert one.estimate.seconds == bounds["host"] > 2 * many.estimate.seconds
    assert "steps_per_execution" in one.advice
    # Weights and both slots are read and written, and gradients are read.
    # Between the steps of a program, they stay on the chip.
    state = 4 * 2 * 256 * 512 * 7 / MEMORY
    assert is_near(one.estimate.memory_seconds, state)
    assert many.estimate.memory_seconds < state / 2
    assert many.counts == one.counts


@pytest.fixture
def bfloat16():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy(before)


def encoder(depth, width, length, inputs):
    x = layers.Embedding(1000, width)(inputs)
    for _ in range(depth):
        heads = layers.MultiHeadAttention(width // 128, 128)
        x = layers.LayerNormalization()(x + heads(x, x))
        y = layers.Dense(width)(layers.Dense(4 * width, "relu")(x))
        x = layers.LayerNormalization()(x + y)
    return keras.Model(inputs, x)


def test_a_frozen_encoder_is_computed_forward_alone(bfloat16):
    rows, length, width, depth = 32, 256, 1024, 2

    def frozen():
        base = encoder(
            depth, width, length, keras.Input((length,), dtype="int32")
        )
        base.trainable = False
        return classifier(
            keras.Input((length,), dtype="int32"),
            base,
            layers.GlobalAveragePooling1D(),
        )

    tokens = array(rows, length, dtype="int32")
    step = plan(frozen, (tokens, array(rows, dtype="int32")))
    weights = depth * 12 * width**2
    forward = 2 * weights * rows * length
    forward += depth * 4 * rows * length**2 * width
    assert step.estimate.compute_seconds == pytest.approx(forward / PEAK, 0.02)
    assert is_near(step.estimate.seconds, forward / PEAK)
    assert step.estimate.utilization < 1.02


def test_adapters_need_the_gradients_that_pass_through_them(bfloat16):
    rows, width, depth = 2048, 2048, 4

    def with_lora():
        parts = [layers.Dense(width, "relu") for _ in range(depth)]
        for part in parts:
            part.build((None, width))
            part.enable_lora(8)
        return classifier(keras.Input((width,)), *parts)

    batch = array(rows, width), array(rows, dtype="int32")
    step = plan(with_lora, batch)
    product = 2 * rows * width**2
    # The result of each layer; the gradient of its input, but of the first's;
    # and that of its kernel, from which Keras computes those of the adapters.
    by_hand = (depth + (depth - 1) + depth) * product
    assert step.estimate.compute_seconds == pytest.approx(by_hand / PEAK, 0.05)
    assert is_near(step.estimate.seconds, by_hand / PEAK)
    # Adapters have few weights to send and to keep slots of.
    assert step.estimate.link_seconds < 0.1 * step.estimate.seconds


def test_augmentation_reads_pixels_one_by_one():
    rows, size, channels = 8, 48, 3

    def vit():
        return classifier(
            keras.Input((size, size, channels)),
            layers.RandomRotation(0.02),
            layers.RandomZoom(0.2, 0.2),
            layers.Conv2D(64, 6, 6),
            layers.Flatten(),
        )

    images = array(rows, size, size, channels)
    step = plan(vit, (images, array(rows, dtype="int32")))
    # Two values each of y, x and channel are combined. Each is read from a tile
    # of 8 x 128 numbers.
    pixels = 2 * 8 * rows * size * size * channels
    assert is_near(step.estimate.seconds, pixels * 4 * 8 * 128 / MEMORY)
    assert set(list(step.top_operations)[:2]) == {
        "gather in random_rotation",
        "gather in random_zoom",
    }
    assert "gather in random_rotation (" in step.advice
    assert "gather in random_zoom (" in step.advice


def test_random_bits_of_dropout_are_computed(bfloat16):
    rows, width = 1024, 4096

    def with_dropout():
        return classifier(
            keras.Input((1024,)), layers.Dense(width), layers.Dropout(0.1)
        )

    batch = array(rows, 1024), array(rows, dtype="int32")
    step = plan(with_dropout, batch)
    # 20 rounds of 5 operations for each entry, forward and again backward: 105k
    # cycles each, as XLA estimates in programs compiled at full effort.
    bits = 2 * 100 * rows * width / (4 * 8 * 128 * 1.5e9)
    products = 2 * 2 * rows * width * 1024 / PEAK
    assert is_near(step.estimate.compute_seconds, bits + products)


class Block(layers.Layer):
    """A decoder's block, with 12 x width^2 weights in its products."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self.norms = [layers.RMSNormalization() for _ in range(2)]
        heads = width // 128
        self.attention = layers.GroupQueryAttention(128, heads, heads)
        self.up = layers.Dense(4 * width, "relu")
        self.down = layers.Dense(width)

    def build(self, shape):
        for norm in self.norms:
            norm.build(shape)
        self.attention.build(shape, shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * self.width))

    def call(self, x):
        y = self.norms[0](x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.down(self.up(self.norms[1](x)))


def test_a_sharded_decoder_waits_for_its_sums(bfloat16):
    length, width, depth, words, chips = 512, 1024, 1, 4096, 16

    def decoder():
        names = [f"block{k}" for k in range(depth)]
        inputs = keras.Input((length,), dtype="int32")
        x = layers.Embedding(words, width)(inputs)
        with keras.RematScope(mode="list_of_layers", layer_names=names):
            for name in names:
                x = Block(width, name=name)(x)
        x = layers.Dense(words, dtype="float32")(x)
        model = keras.Model(inputs, x)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adamw", loss)
        return model

    tokens = array(4, length, dtype="int32")
    step = plan(decoder, (tokens, tokens), "v5e:4x4", "sharded")
    number = 4 * length
    block_parameters = depth * 12 * width**2
    head_parameters = words * width
    # Blocks are computed forward twice, and their gradients once.
    flops = 2 * number * (4 * block_parameters + 3 * head_parameters)
    # The sums of float32 gradients go around a ring twice, over the 2 links of
    # a chip in the corner of the slice.
    weights = block_parameters + 2 * head_parameters
    sums = 2 * 4 * weights * (1 - 1 / chips) / (2 * LINK)
    assert is_near(step.estimate.seconds, flops / PEAK + sums)
    links = sums + sums / 4 * 2
    assert is_near(step.estimate.link_seconds, links)
    model = 2 * number * 3 * (block_parameters + head_parameters)
    used = model / PEAK / step.estimate.seconds
    assert step.estimate.utilization == pytest.approx(used, rel=0.1)


def test_blocks_in_a_loop_take_the_time_of_blocks_one_by_one():
    def planned(is_scanned):
        def make():
            blocks = [layers.Dense(2048, "gelu") for _ in range(12)]
            model = classifier(keras.Input((2048,)), *blocks)
            if not is_scanned:
                ks.experimental.scan_blocks(model, False)
            return model

        return plan(make, (array(256, 2048), array(256, dtype="int32")))

    scanned, unrolled = planned(True), planned(False)
    assert scanned.estimate.seconds < 1.5 * unrolled.estimate.seconds
    # Three products of each block.
    expected = 12 * 3 * 2 * 256 * 2048**2 / PEAK
    for step in (scanned, unrolled):
        assert is_near(step.estimate.bounds["compute"], expected)
    assert scanned.memory["code"] < unrolled.memory["code"]

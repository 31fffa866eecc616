"""Losses over many words as the TPU compiler sees them, of Llama 3 8B's shapes.

`./run bench large_steps words-llama` compiles keras-hub's model.
"""

import jax
import keras
import numpy as np
import pytest
from keras import layers

import keras_strategies as ks
from benchmarks.large_steps import measure

pytestmark = pytest.mark.tpu
WORDS, WIDTH, HIDDEN, TOKENS = 128_256, 4096, 14_336, 8192


class Block(layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        self.attend = layers.GroupQueryAttention(WIDTH // 32, 32, 8)
        self.norms = [layers.RMSNormalization() for _ in range(2)]
        self.up = [layers.Dense(HIDDEN, use_bias=False) for _ in range(2)]
        self.down = layers.Dense(WIDTH, use_bias=False)

    def build(self, shape):
        self.attend.build(shape, shape)
        for layer in (*self.norms, *self.up):
            layer.build(shape)
        self.down.build((*shape[:-1], HIDDEN))

    def call(self, x, training=None):
        y = self.norms[0](x)
        x = x + self.attend(y, y, use_causal_mask=True, training=training)
        gate, up = (layer(self.norms[1](x)) for layer in self.up)
        return x + self.down(keras.ops.silu(gate) * up)


def compile_step(is_blocked):
    strategy = ks.TPUStrategy.for_topology(
        "v5p:4x4x4", variable_partitioner=ks.experimental.FullySharded(32)
    )
    names = ["one", "two"]
    with strategy.scope(), ks.abstract():
        inputs = keras.Input((TOKENS,), dtype="int32")
        x = layers.Embedding(WORDS, WIDTH)(inputs)
        with keras.RematScope("list_of_layers", layer_names=names):
            for name in names:
                x = Block(name=name)(x)
        x = layers.RMSNormalization()(x)
        model = keras.Model(inputs, layers.Dense(WORDS, use_bias=False)(x))
        if is_blocked:
            ks.experimental.blocked_head(model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-4), loss)
    devices = np.array(strategy.mesh.devices).ravel()
    tokens = jax.ShapeDtypeStruct((devices.size, TOKENS), "int32")
    low = dict(measure.LOW_EFFORT)
    step = strategy.compile_step(model, (tokens, tokens), compiler_options=low)
    return measure.read(step.executable, devices, step.compile_seconds)


def test_neither_logits_nor_their_kernel_are_stored():
    keras.config.set_dtype_policy("mixed_bfloat16")
    ours, whole = map(compile_step, (True, False))
    print(ours.cells, whole.cells)
    assert ours.costs.temporary_bytes < 2.4e9
    assert whole.costs.temporary_bytes > 5e9
    assert ours.milliseconds < 1.15 * whole.milliseconds

"""Decoders with Llama's blocks, for steps with long sequences."""

import jax
import keras
from keras import layers, ops

import keras_strategies as ks


class Block(layers.Layer):
    """Grouped attention with rotary positions, and a gated MLP."""

    def __init__(self, width, heads, kv_heads, hidden, name):
        super().__init__(name=name)
        size = width // heads
        self.norms = [layers.RMSNormalization() for _ in range(2)]
        self.heads = [
            layers.EinsumDense("btd,dhe->bthe", (None, count, size))
            for count in (heads, kv_heads, kv_heads)
        ]
        self.out = layers.EinsumDense("bthe,hed->btd", (None, width))
        self.mlp = [
            layers.Dense(units, use_bias=False)
            for units in (hidden, hidden, width)
        ]

    def build(self, shape):
        for layer in (*self.norms, *self.heads, *self.mlp[:2]):
            layer.build(shape)
        self.out.build(self.heads[0].compute_output_shape(shape))
        self.mlp[2].build(self.mlp[0].compute_output_shape(shape))

    def call(self, x):
        y = self.norms[0](x)
        query, key, value = (layer(y) for layer in self.heads)
        x = x + self.out(
            ops.dot_product_attention(
                rotate(query), rotate(key), value, is_causal=True
            )
        )
        y = self.norms[1](x)
        gate, up, down = self.mlp
        return x + down(ops.silu(gate(y)) * up(y))


def rotate(x):
    half = x.shape[-1] // 2
    places = ops.arange(x.shape[1], dtype="float32")[:, None]
    angles = places * 5e5 ** (-ops.arange(half, dtype="float32") / half)
    cos, sin = (
        ops.cast(array, x.dtype)[None, :, None]
        for array in (ops.cos(angles), ops.sin(angles))
    )
    one, two = ops.split(x, 2, -1)
    return ops.concatenate([one * cos - two * sin, two * cos + one * sin], -1)


def compile_decoder(strategy, length, *, width, heads, kv_heads, hidden, words):
    """Compiles the step of two rematerialized blocks, a row a replica."""
    names = ["block0", "block1"]
    with strategy.scope(), ks.abstract():
        tokens = keras.Input((length,), dtype="int32")
        x = layers.Embedding(words, width)(tokens)
        with keras.RematScope(mode="list_of_layers", layer_names=names):
            for name in names:
                x = Block(width, heads, kv_heads, hidden, name)(x)
        x = layers.RMSNormalization()(x)
        logits = layers.Dense(words, use_bias=False)(x)
        model = keras.Model(tokens, logits)
        ks.experimental.blocked_head(model)
        model.compile(
            "adam",
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    rows = strategy.num_replicas_in_sync
    batch = jax.ShapeDtypeStruct((rows, length), "int32")
    options = {}
    if strategy.mesh.platform == "tpu":
        options = {"exec_time_optimization_effort": -1.0}
    return strategy.compile_step(
        model, (batch, batch), compiler_options=options
    )

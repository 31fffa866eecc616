"""Plans a decoder of 7 billion parameters for four TPU slices, without one.

The TPU compiler compiles its train step here, on any Linux machine with libtpu
(`pip install '.[tpu]'`); the model has no values meanwhile. Prints for each
slice whether it fits, how many sequences a chip would, and how fast it is.
Takes some minutes on two cores; with `--size small` one.

    python examples/plan_decoder.py
    python examples/plan_decoder.py --size small --topology v5e:2x4
"""

import argparse
import os


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=("small", "7b"), default="7b")
    parser.add_argument(
        "--topology", action="append", help="a slice; several times for more"
    )
    parser.add_argument("--html", help="also write the plan as a page")
    options = parser.parse_args()
    os.environ["KERAS_BACKEND"] = "jax"
    # This machine only compiles.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    return options


OPTIONS = parse()

import pathlib

import jax
import keras
from keras import layers

import keras_strategies as ks

SLICES = ("v5e:16x16", "v5p:4x4x4", "v5p:8x8x8", "v6e:16x16")
# Blocks, width, heads, width of the feed-forward part, words, tokens.
SIZES = {
    "small": (8, 256, 4, 1024, 1024, 256),
    # Llama 2's.
    "7b": (32, 4096, 32, 11008, 32000, 4096),
}
BLOCKS, WIDTH, HEADS, HIDDEN, WORDS, LENGTH = SIZES[OPTIONS.size]


class Block(layers.Layer):
    """Attention and a gated feed-forward part, each behind a normalization."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm1 = layers.RMSNormalization(name="norm1")
        self.norm2 = layers.RMSNormalization(name="norm2")
        self.attention = layers.GroupQueryAttention(
            WIDTH // HEADS, HEADS, HEADS, use_bias=False, name="attention"
        )
        self.gate = layers.Dense(HIDDEN, "silu", use_bias=False, name="gate")
        self.up = layers.Dense(HIDDEN, use_bias=False, name="up")
        self.down = layers.Dense(WIDTH, use_bias=False, name="down")

    def build(self, shape):
        for norm in (self.norm1, self.norm2):
            norm.build(shape)
        self.attention.build(shape, shape)
        for dense in (self.gate, self.up):
            dense.build(shape)
        self.down.build((*shape[:-1], HIDDEN))

    def call(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, use_causal_mask=True)
        y = self.norm2(x)
        return x + self.down(self.up(y) * self.gate(y))


def make_model():
    names = [f"block{i}" for i in range(BLOCKS)]
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH, name="embed")(tokens)
    # Blocks are computed again in the backward pass, instead of kept.
    with keras.RematScope(mode="list_of_layers", layer_names=names):
        for name in names:
            x = Block(name=name)(x)
    x = layers.RMSNormalization(name="norm")(x)
    logits = layers.Dense(WORDS, use_bias=False, name="head")(x)
    model = keras.Model(tokens, logits)
    model.compile(
        keras.optimizers.AdamW(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    return model


def main():
    keras.config.set_dtype_policy("mixed_bfloat16")
    strategy = ks.MirroredStrategy(jax.devices()[:1])
    # A sequence on each chip.
    tokens = jax.ShapeDtypeStruct((1, LENGTH), "int32")
    plan = strategy.plan(
        make_model,
        (tokens, tokens),
        OPTIONS.topology or SLICES,
        strategies="sharded",
    )
    print(plan)
    if OPTIONS.html:
        pathlib.Path(OPTIONS.html).write_text(plan.to_html(), "utf-8")
    best = plan.fastest
    if best is not None:
        print(
            f"fastest for its chips: {best.topology}, with "
            f"{best.tokens_per_second / best.num_devices:,.0f} tokens a second "
            "and chip"
        )


if __name__ == "__main__":
    main()

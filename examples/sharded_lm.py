"""Trains a decoder whose weights and slots the devices divide among them.

Twice: with all variables on every device, and divided (`FullySharded`), each
block under `keras.RematScope`. Asserts that the losses are equal, prints what
each device holds, and samples text. The text is the standard library's own:
`pydoc_data.topics`.

    python examples/sharded_lm.py --devices 8
"""

import argparse
import os


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--devices", type=int, default=8, help="how many")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    options = parser.parse_args()
    os.environ["KERAS_BACKEND"] = "jax"
    # Virtual devices concern the CPU only; they do not hide accelerators.
    os.environ.setdefault(
        "XLA_FLAGS",
        f"--xla_force_host_platform_device_count={options.devices}",
    )
    return options


OPTIONS = parse()

import string
from pydoc_data import topics

import jax
import keras
import numpy as np
from rich.console import Console
from rich.table import Table

import keras_strategies as ks

LENGTH, BATCH = 48, 32
LETTERS = string.ascii_lowercase + string.digits + string.punctuation + " \n"
CODES = {letter: i for i, letter in enumerate(LETTERS)}


def windows(count):
    """`count` seeded windows of the text and what follows each letter."""
    text = "\n".join(topics.topics.values()).lower()
    codes = np.array([CODES[c] for c in text if c in CODES], dtype="int32")
    starts = np.random.default_rng(0).integers(0, len(codes) - LENGTH, count)
    rows = codes[starts[:, None] + np.arange(LENGTH + 1)]
    return rows[:, :-1], rows[:, 1:]


class Block(keras.layers.Layer):
    """Attention and a feed-forward part, before each a normalization."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        layers = keras.layers
        self.norms = [layers.RMSNormalization(), layers.RMSNormalization()]
        self.attention = layers.GroupQueryAttention(width // 4, 4, 2)
        self.up = layers.Dense(4 * width, activation="gelu")
        self.down = layers.Dense(width)

    def build(self, shape):
        for norm in self.norms:
            norm.build(shape)
        self.attention.build(shape, shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], self.up.units))

    def call(self, x):
        y = self.norms[0](x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.down(self.up(self.norms[1](x)))


def decoder():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(len(LETTERS), OPTIONS.width)(inputs)
    names = [f"block{k}" for k in range(OPTIONS.blocks)]
    # A block's weights are gathered again in the backward pass.
    with keras.RematScope(mode="list_of_layers", layer_names=names):
        for name in names:
            x = Block(OPTIONS.width, name=name)(x)
    x = keras.layers.RMSNormalization()(x)
    return keras.Model(inputs, keras.layers.Dense(len(LETTERS))(x))


def devices():
    """Those of this machine, up to the number that was asked for."""
    return jax.local_devices()[: OPTIONS.devices]


def trained(partitioner):
    """The model, its losses, and MB that a device holds of its state."""
    strategy = ks.MirroredStrategy(devices(), variable_partitioner=partitioner)
    with strategy.scope():
        model = decoder()
        model.compile(
            keras.optimizers.Adam(1e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    x, y = windows(OPTIONS.steps * BATCH)
    history = model.fit(
        x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=2
    )
    held = [*model.variables, *model.optimizer.variables]
    shards = [v.value.addressable_shards[0].data.nbytes for v in held]
    return model, history.history["loss"], sum(shards) / 1e6


def sample(model, prompt, count):
    """Continues a prompt, letter by letter."""
    random = np.random.default_rng(1)
    codes = [CODES[c] for c in prompt.rjust(LENGTH)]
    for _ in range(count):
        logits = model.predict_on_batch(np.array([codes[-LENGTH:]], "int32"))
        scores = logits[0, -1].astype("float64") / 0.7
        chances = np.exp(scores - scores.max())
        codes.append(
            int(random.choice(len(LETTERS), p=chances / chances.sum()))
        )
    return "".join(LETTERS[c] for c in codes[LENGTH - len(prompt) :])


def main():
    _, plain_losses, plain_mb = trained(None)
    model, losses, mb = trained(ks.experimental.FullySharded(min_size=1024))
    table = Table("", "replicated", "divided", title="A decoder on all devices")
    table.add_row("devices", *[str(len(devices()))] * 2)
    table.add_row("MB a device", f"{plain_mb:.2f}", f"{mb:.2f}")
    for epoch, pair in enumerate(zip(plain_losses, losses, strict=True), 1):
        table.add_row(f"loss of epoch {epoch}", *[f"{x:.4f}" for x in pair])
    Console().print(table)
    Console().print("Sample:", sample(model, "the value of", 60), markup=False)
    assert np.allclose(losses, plain_losses, rtol=1e-3), (losses, plain_losses)
    assert mb < 1.5 * plain_mb / len(devices()), (mb, plain_mb)
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()

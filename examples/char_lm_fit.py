"""Trains a small transformer on English text, on all devices.

The text is the standard library's own: `pydoc_data.topics`. Asserts that the
loss falls well below the text's unigram entropy, which is what a model that
ignores the context can reach, and prints a sample. Ten batches go to the
devices in one transfer and train in one program (`steps_per_execution`).

    python examples/char_lm_fit.py --devices 2
"""

import argparse
import os


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--devices", type=int, help="how many to use; all by default"
    )
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    os.environ["KERAS_BACKEND"] = "jax"
    # Virtual devices concern the CPU only; they do not hide accelerators.
    os.environ.setdefault(
        "XLA_FLAGS",
        f"--xla_force_host_platform_device_count={options.devices or 2}",
    )
    return options


OPTIONS = parse()

import math
import string
from collections import Counter
from pydoc_data import topics

import jax
import keras
import numpy as np
from rich.console import Console
from rich.table import Table

import keras_strategies as ks

LENGTH, BATCH, WIDTH = 48, 32, 64
LETTERS = string.ascii_lowercase + string.digits + string.punctuation + " \n"
CODES = {letter: i for i, letter in enumerate(LETTERS)}


def read():
    """The text as codes; letters are lowered, others than LETTERS dropped."""
    text = "\n".join(topics.topics.values()).lower()
    return np.array([CODES[c] for c in text if c in CODES], dtype="int32")


def unigram_entropy(codes):
    counts = Counter(codes.tolist())
    return -sum(
        n / len(codes) * math.log(n / len(codes)) for n in counts.values()
    )


def windows(codes, count):
    """`count` seeded windows of the text and what follows each letter."""
    random = np.random.default_rng(0)
    starts = random.integers(0, len(codes) - LENGTH - 1, count)
    rows = starts[:, None] + np.arange(LENGTH + 1)
    return codes[rows][:, :-1], codes[rows][:, 1:]


class Positions(keras.layers.Layer):
    """Adds a learned vector for each position."""

    def build(self, input_shape):
        self.table = self.add_weight(
            shape=(1, *input_shape[1:]), initializer="random_normal"
        )

    def call(self, inputs):
        return inputs + self.table


def transformer():
    layers = keras.layers
    inputs = keras.Input((LENGTH,), dtype="int32")
    value = Positions()(layers.Embedding(len(LETTERS), WIDTH)(inputs))
    for _ in range(2):
        normed = layers.LayerNormalization()(value)
        value += layers.MultiHeadAttention(4, WIDTH // 4)(
            normed, normed, use_causal_mask=True
        )
        hidden = layers.Dense(2 * WIDTH, "gelu")(
            layers.LayerNormalization()(value)
        )
        value += layers.Dense(WIDTH)(hidden)
    logits = layers.Dense(len(LETTERS))(layers.LayerNormalization()(value))
    return keras.Model(inputs, logits)


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
    codes = read()
    entropy = unigram_entropy(codes)
    x, y = windows(codes, OPTIONS.steps * BATCH)
    strategy = ks.MirroredStrategy(jax.local_devices()[: OPTIONS.devices])
    with strategy.scope():
        model = transformer()
        model.compile(
            keras.optimizers.AdamW(3e-3),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=10,
        )
    model.fit(x, y, batch_size=BATCH, verbose=2)
    loss, accuracy = model.evaluate(x[:512], y[:512], verbose=0)
    table = Table(title="A language model on all devices", show_header=False)
    table.add_row("replicas", str(strategy.num_replicas_in_sync))
    table.add_row("letters in the text", f"{len(codes):,}")
    table.add_row("unigram entropy", f"{entropy:.2f} nats")
    table.add_row("loss", f"{loss:.2f} nats")
    table.add_row("next letter right", f"{accuracy:.0%}")
    Console().print(table)
    Console().print("Sample:", sample(model, "the value of", 80), markup=False)
    assert loss < 0.8 * entropy, f"loss {loss:.2f} is not below {entropy:.2f}"


if __name__ == "__main__":
    main()

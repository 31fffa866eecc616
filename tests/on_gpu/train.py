"""Trains a model on a GPU, and prints a digest of its state.

    python -m tests.on_gpu.train EPOCHS [DIRECTORY] [--deterministic]

With a directory, the run is saved there each epoch, and resumed.
"""

import argparse
import hashlib

import keras_strategies as ks

ROWS, LENGTH, WORDS, WIDTH = 1024, 128, 500, 64


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int)
    parser.add_argument("directory", nargs="?")
    parser.add_argument("--deterministic", action="store_true")
    return parser.parse_args()


OPTIONS = parse()
if OPTIONS.deterministic:
    ks.enable_determinism()

import keras
import numpy as np
from keras import layers


def make_model():
    """Returns a model whose gradients add to rows in no order by default."""
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, WIDTH)(tokens)
    x = layers.Conv1D(WIDTH, 5, padding="same", activation="relu")(x)
    x = layers.BatchNormalization()(x)
    attention = layers.MultiHeadAttention(2, 32, dtype="mixed_bfloat16")
    x = layers.Add()([x, attention(x, x, use_causal_mask=True)])
    x = layers.Dropout(0.1)(layers.MaxPooling1D(3, 2)(x))
    x = layers.LSTM(WIDTH)(x)
    model = keras.Model(tokens, layers.Dense(WORDS, dtype="float32")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss)
    return model


def main():
    keras.utils.set_random_seed(3)
    random = np.random.default_rng(0)
    # Few words: many gradients are added to each row.
    x = random.integers(0, 20, (ROWS, LENGTH)).astype("int32")
    y = random.integers(0, WORDS, ROWS).astype("int32")
    with ks.MirroredStrategy().scope():
        model = make_model()
    callbacks = []
    if OPTIONS.directory:
        callbacks.append(ks.callbacks.Checkpoint(OPTIONS.directory))
    history = model.fit(
        *(x, y),
        batch_size=128,
        epochs=OPTIONS.epochs,
        callbacks=callbacks,
        verbose=0,
    ).history
    digest = hashlib.sha256()
    for variable in (*model.variables, *model.optimizer.variables):
        digest.update(np.asarray(variable).tobytes())
    print(f"digest {digest.hexdigest()} loss {history['loss'][-1]!r}")


if __name__ == "__main__":
    main()

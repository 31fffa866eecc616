"""Models of reports that several GPUs give NaN: docs/migration.md.

Each is small, and of the kind that its report is about.
"""

import keras
import numpy as np
from keras import layers

import keras_strategies as ks


def identity():
    """keras#21061: no weights, a loss that needs none."""
    model = keras.Sequential([keras.Input((1,)), layers.Identity()])
    model.compile("sgd", "mse")
    return model


def classifier():
    """tensorflow#62915: two Dense layers, sparse classes, Adam."""
    inputs = keras.Input((20,))
    x = layers.Dense(16, activation="relu")(inputs)
    x = layers.Dense(16, activation="relu")(x)
    model = keras.Model(inputs, layers.Dense(10)(x))
    model.compile(
        keras.optimizers.Adam(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    return model


def regressor():
    """tensorflow#105552: two Dense layers, ten targets, Adam."""
    model = keras.Sequential(
        [keras.Input((20,)), layers.Dense(64, "relu"), layers.Dense(10)]
    )
    model.compile(keras.optimizers.Adam(), keras.losses.MeanSquaredError())
    return model


def sequences():
    """tensorflow#90686: convolutions over one-hot DNA, normalized."""
    model = keras.Sequential(
        [
            keras.Input((24, 4)),
            # With a bias, Adam would divide the noise of a zero gradient.
            layers.Conv1D(8, 5, padding="same", use_bias=False),
            # Keras synchronizes it within a strategy's scope alone.
            layers.BatchNormalization(synchronized=ks.has_strategy()),
            layers.Activation("gelu"),
            layers.Conv1D(8, 3, padding="same", dilation_rate=2),
            layers.GlobalAveragePooling1D(),
            layers.Dense(3, "softplus"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(1e-3, clipnorm=1.0),
        keras.losses.CosineSimilarity(),
    )
    return model


def images():
    """tensorflow#87432, #36224: the tutorial's convolutional classifier."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    model.compile(
        "adam",
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


MODELS = {
    f.__name__: f for f in (identity, classifier, regressor, sequences, images)
}


def make_rows(model, rows):
    """Random rows for a model: arrays x and y."""
    rng = np.random.default_rng(rows)
    x = rng.random((rows, *model.input_shape[1:]), "float32")
    classes = model.output_shape[-1]
    if isinstance(model.loss, keras.losses.SparseCategoricalCrossentropy):
        return x, rng.integers(0, classes, rows)
    return x, rng.random((rows, classes), "float32")

"""Models of Keras's guides whose steps have TensorFlow's form.

They train with TensorFlow by `python -m tests.step.guides FILE`, which writes
their numbers, and with this package. What the guides draw at random, they read
from the batch, since each library draws other numbers.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":
    os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
from keras import layers, ops

SIZE = 4
RNG = np.random.default_rng(11)
IMAGES = RNG.random((48, 6, 6, 1)).astype("float32")
LABELS = RNG.integers(0, 3, (48, 1)).astype("int32")
NOISE = RNG.normal(size=(48, SIZE)).astype("float32")
EPOCHS = 3


class Guide(keras.Model):
    """A model whose steps record by `tape`, TensorFlow's or this package's."""

    def __init__(self, tape):
        super().__init__()
        self.tape = tape

    def compile(self, *optimizers, **options):
        super().compile(**options)
        self.optimizers = list(optimizers)
        self.means = [
            keras.metrics.Mean(name=name) for name in ("one", "two", "three")
        ]

    @property
    def metrics(self):
        return self.means

    def apply(self, number, tape, loss, weights):
        gradients = tape.gradient(loss, weights)
        self.optimizers[number].apply_gradients(
            zip(gradients, weights, strict=True)
        )

    def log(self, *losses):
        for mean, loss in zip(self.means, losses, strict=False):
            mean.update_state(loss)
        return {mean.name: mean.result() for mean in self.means[: len(losses)]}


def encoder(*last):
    return keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            layers.Conv2D(4, 3, strides=2, padding="same"),
            layers.LeakyReLU(0.2),
            layers.Flatten(),
            *last,
        ]
    )


def decoder():
    return keras.Sequential(
        [
            keras.Input((SIZE,)),
            layers.Dense(36, "relu"),
            layers.Reshape((3, 3, 4)),
            layers.Conv2DTranspose(2, 3, strides=2, padding="same"),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ]
    )


class Adversarial(Guide):
    """ "DCGAN to generate face images"."""

    def __init__(self, tape):
        super().__init__(tape)
        self.discriminator = encoder(layers.Dense(1))
        self.generator = decoder()
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(self, data):
        images, noise = data
        count = ops.shape(images)[0]
        both = ops.concatenate([self.generator(noise), images], axis=0)
        labels = ops.concatenate(
            [ops.ones((count, 1)), ops.zeros((count, 1))], axis=0
        )
        with self.tape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        self.apply(0, tape, d_loss, self.discriminator.trainable_weights)
        misleading = ops.zeros((count, 1))
        with self.tape() as tape:
            predictions = self.discriminator(self.generator(noise))
            g_loss = self.loss_fn(misleading, predictions)
        self.apply(1, tape, g_loss, self.generator.trainable_weights)
        return self.log(d_loss, g_loss)


class Penalized(Adversarial):
    """ "WGAN-GP overriding `Model.train_step`"."""

    def find_penalty(self, real, fake, shares):
        mixed = real + shares * (fake - real)
        with self.tape() as tape:
            tape.watch(mixed)
            judged = self.discriminator(mixed, training=True)
        gradients = tape.gradient(judged, [mixed])[0]
        norms = ops.sqrt(ops.sum(gradients**2, axis=(1, 2, 3)))
        return ops.mean((norms - 1.0) ** 2)

    def train_step(self, data):
        images, noise = data
        for _ in range(2):
            with self.tape() as tape:
                fake = self.generator(noise, training=True)
                judged = [self.discriminator(each) for each in (fake, images)]
                cost = ops.mean(judged[0]) - ops.mean(judged[1])
                shares = ops.reshape(noise[:, 0] ** 2, (-1, 1, 1, 1))
                penalty = self.find_penalty(images, fake, shares)
                d_loss = cost + 10.0 * penalty
            self.apply(0, tape, d_loss, self.discriminator.trainable_variables)
        with self.tape() as tape:
            fake = self.generator(noise, training=True)
            g_loss = -ops.mean(self.discriminator(fake, training=True))
        self.apply(1, tape, g_loss, self.generator.trainable_variables)
        return self.log(d_loss, g_loss)


class Variational(Guide):
    """ "Variational AutoEncoder"."""

    def __init__(self, tape):
        super().__init__(tape)
        self.encoder = encoder(layers.Dense(2 * SIZE))
        self.decoder = decoder()

    def train_step(self, data):
        images, noise = data
        with self.tape() as tape:
            mean, log_var = ops.split(self.encoder(images), 2, axis=1)
            z = mean + ops.exp(0.5 * log_var) * noise
            reconstruction = ops.mean(
                ops.sum(
                    keras.losses.binary_crossentropy(images, self.decoder(z)),
                    axis=(1, 2),
                )
            )
            divergence = -0.5 * (
                1 + log_var - ops.square(mean) - ops.exp(log_var)
            )
            divergence = ops.mean(ops.sum(divergence, axis=1))
            total = reconstruction + divergence
        self.apply(0, tape, total, self.trainable_weights)
        return self.log(total, reconstruction, divergence)


class Distilled(Guide):
    """ "Knowledge Distillation"."""

    def __init__(self, tape):
        super().__init__(tape)
        self.teacher = encoder(layers.Dense(9, "relu"), layers.Dense(3))
        self.student = encoder(layers.Dense(3))
        self.student_loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True
        )
        self.distance = keras.losses.KLDivergence()

    def train_step(self, data):
        x, y = data
        teacher = self.teacher(x, training=False)
        with self.tape() as tape:
            student = self.student(x, training=True)
            student_loss = self.student_loss(y, student)
            distilled = 9 * self.distance(
                ops.softmax(teacher / 3, axis=1),
                ops.softmax(student / 3, axis=1),
            )
            loss = 0.1 * student_loss + 0.9 * distilled
        self.apply(0, tape, loss, self.student.trainable_variables)
        return self.log(student_loss, distilled)


class Contrastive(Guide):
    """ "Semi-supervised image classification using contrastive pretraining"."""

    def __init__(self, tape):
        super().__init__(tape)
        self.encoder = encoder(layers.Dense(5, "relu"))
        self.head = keras.Sequential(
            [keras.Input((5,)), layers.Dense(5, "relu"), layers.Dense(5)]
        )
        self.probe = keras.Sequential([keras.Input((5,)), layers.Dense(3)])
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True
        )

    def contrast(self, one, two):
        one, two = ops.normalize(one, axis=1), ops.normalize(two, axis=1)
        similarities = ops.matmul(one, ops.transpose(two)) / 0.1
        labels = ops.arange(ops.shape(one)[0])
        losses = [
            keras.losses.sparse_categorical_crossentropy(
                labels, each, from_logits=True
            )
            for each in (similarities, ops.transpose(similarities))
        ]
        return ops.mean(losses[0] + losses[1]) / 2

    def train_step(self, data):
        images, labels = data
        with self.tape() as tape:
            one = self.head(self.encoder(images, training=True))
            two = self.head(self.encoder(images[:, ::-1], training=True))
            loss = self.contrast(one, two)
        weights = self.encoder.trainable_weights + self.head.trainable_weights
        self.apply(0, tape, loss, weights)
        with self.tape() as tape:
            features = self.encoder(images, training=False)
            probe_loss = self.probe_loss(labels, self.probe(features))
        self.apply(1, tape, probe_loss, self.probe.trainable_weights)
        return self.log(loss, probe_loss)


GUIDES: dict[str, tuple[type[Guide], Any]] = {
    "adversarial": (Adversarial, NOISE),
    "penalized": (Penalized, NOISE),
    "variational": (Variational, NOISE),
    "distilled": (Distilled, LABELS),
    "contrastive": (Contrastive, LABELS),
}


def make(name: str, tape: Callable[..., Any]) -> Guide:
    """Returns a compiled model with the same weights in all libraries."""
    model = GUIDES[name][0](tape)
    model.compile(
        keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.5)
    )
    random = np.random.default_rng(2)
    for part in (layer for layer in model.layers if layer.weights):
        part.set_weights(
            [random.normal(size=w.shape) * 0.3 for w in part.weights]
        )
    return model


def train(model: Guide, name: str) -> dict[str, list[float]]:
    """Returns the history, and the norms of the weights as `weights`."""
    history = model.fit(
        *(IMAGES, GUIDES[name][1]),
        batch_size=16,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
    ).history
    norms = [
        float(np.linalg.norm(weight))
        for layer in model.layers
        for weight in layer.get_weights()
    ]
    return {**history, "weights": norms}


def main(path: str) -> None:
    """Trains all models with TensorFlow, and writes their numbers."""
    import tensorflow as tf

    found = {name: train(make(name, tf.GradientTape), name) for name in GUIDES}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main(sys.argv[1])

"""Train steps by their metrics, logs, state and layers, and scaled losses."""

import jax
import keras
import numpy as np
from keras import layers, ops

import keras_strategies as ks
from tests.parity.own_steps import (
    CLASSES,
    IMAGES,
    LABELS,
    SEQUENCES,
    TOKENS,
    OwnStep,
    ScaledLoss,
    integers,
    means,
    mlp,
    others,
    squared,
)

# Metrics, logs and state.


@means
class Trackers(OwnStep):
    def make(self):
        super().make()
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.of_rows = keras.metrics.Mean(name="rows")
        self.root = keras.metrics.RootMeanSquaredError(name="root")

    def step(self, x, y):
        loss, grads = self.by_jax(lambda: self.loss_of(x, y))
        self.optimizer.apply(grads, self.trainable_variables)
        output = self(x)
        self.loss_tracker.update_state(loss)
        self.of_rows.update_state(ops.mean(ops.abs(output - y), axis=1))
        self.root.update_state(y, output, sample_weight=ops.exp(x[:, 0]))
        return {m.name: m.result() for m in self.metrics}


@means
class CountsCorrect(OwnStep):
    """Integer logs that are sums over rows, and a counter of steps."""

    y = LABELS

    def make(self):
        self.net = mlp(5, CLASSES)
        self.steps = self.state("steps", np.int32(0))

    def loss_of(self, x, y):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return loss(y, self(x))

    def step(self, x, y):
        is_right = ops.equal(ops.argmax(self(x), axis=1), y)
        logs = super().step(x, y)
        self.steps.assign_add(1)
        count = ops.sum(ops.cast(is_right, "int32"))
        return logs | {"correct": count}


@others
class LogsSteps(CountsCorrect):
    """An integer log that is no sum over rows."""

    def step(self, x, y):
        return super().step(x, y) | {"steps": self.steps + 0}


@others
class CountsTokens(OwnStep):
    x, y = TOKENS, LABELS

    def make(self):
        embedding = layers.Embedding(7, 4)
        pool, last = layers.GlobalAveragePooling1D(), layers.Dense(CLASSES)
        self.net = keras.Sequential([keras.Input((5,)), embedding, pool, last])
        self.tokens = self.state("tokens", np.int32(0))

    def loss_of(self, x, y):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return loss(y, self(x))

    def step(self, x, y):
        self.tokens.assign_add(ops.sum(ops.cast(x > 0, "int32")))
        return super().step(x, y) | {"tokens": self.tokens + 0}


@others
class LowestLoss(OwnStep):
    """Keeps the lowest loss so far."""

    def make(self):
        super().make()
        self.lowest = self.state("lowest", np.float32(100))

    def step(self, x, y):
        logs = super().step(x, y)
        self.lowest.assign(ops.minimum(self.lowest, logs["objective"]))
        return logs


@others
class SawLarge(OwnStep):
    """A flag of any row so far, and the largest values of columns."""

    def make(self):
        super().make()
        self.seen = self.state("seen", np.zeros((), bool))
        self.largest = self.state("largest", np.zeros(4, "float32"))

    def step(self, x, y):
        logs = super().step(x, y)
        self.seen.assign(ops.logical_or(self.seen, ops.any(x > 2.5)))
        self.largest.assign(ops.maximum(self.largest, ops.max(x, axis=0)))
        return logs


@others
class SkipsLargeLosses(OwnStep):
    """Takes the step only if the loss is small."""

    def step(self, x, y):
        loss, grads = self.by_jax(lambda: self.loss_of(x, y))
        is_small = ops.cast(loss < 1.2, "float32")
        grads = [is_small * g for g in grads]
        self.optimizer.apply(grads, self.trainable_variables)
        return {"objective": loss}


@others
class LogsSpread(OwnStep):
    def step(self, x, y):
        logs = super().step(x, y)
        output = self(x)
        return logs | {"std": ops.std(output), "largest": ops.max(output)}


# Layers.


class Classifies(OwnStep):
    x, y = IMAGES, LABELS

    def loss_of(self, x, y):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return loss(y, self(x, training=True))


@means
class Convolutions(Classifies):
    def make(self):
        self.net = keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                layers.Conv2D(3, 3, activation="tanh"),
                layers.MaxPooling2D(2),
                layers.Flatten(),
                layers.Dense(CLASSES),
            ]
        )


@means
class Segmentation(OwnStep):
    x, y = IMAGES, integers(2, 6, 6)

    def make(self):
        inputs = keras.Input((6, 6, 1))
        down = layers.Conv2D(3, 3, padding="same", activation="tanh")(inputs)
        deep = layers.Conv2D(3, 3, padding="same")(layers.MaxPooling2D()(down))
        up = layers.Concatenate()([layers.UpSampling2D()(deep), down])
        self.net = keras.Model(inputs, layers.Conv2D(2, 1)(up))

    def loss_of(self, x, y):
        logs = ops.log_softmax(self(x))
        hot = ops.one_hot(y, 2)
        both = ops.sum(hot * ops.exp(logs), axis=(1, 2))
        total = ops.sum(hot + ops.exp(logs), axis=(1, 2))
        dice = 1 - ops.mean((2 * both + 1) / (total + 1))
        return dice - ops.mean(ops.sum(hot * logs, axis=-1))


@means
class Recurrent(OwnStep):
    x = SEQUENCES

    def make(self):
        lstm = layers.LSTM(3, return_sequences=True)
        self.net = keras.Sequential(
            [keras.Input((5, 3)), lstm, layers.Dense(2)]
        )

    def loss_of(self, x, y):
        mask = ops.cast(x[:, :, 0] > 0, "float32")
        error = ops.mean(ops.square(self(x) - y[:, None]), axis=-1)
        counts = ops.sum(mask, axis=1)
        return ops.mean(ops.sum(error * mask, axis=1) / (counts + 1.0))


@means
class Attention(Classifies):
    x = TOKENS

    def make(self):
        inputs = keras.Input((5,), dtype="int32")
        x = layers.Embedding(7, 4)(inputs)
        x = x + layers.MultiHeadAttention(2, 2)(x, x, use_causal_mask=True)
        x = layers.LayerNormalization()(x)
        self.net = keras.Model(inputs, layers.Dense(CLASSES)(x[:, -1]))


@means
class OwnNormalization(OwnStep):
    """Moving means that normalize, and a dropout by the rows' values."""

    def make(self):
        super().make()
        self.moving = self.state("moving", np.zeros(4, "float32"))

    def loss_of(self, x, y):
        kept = ops.cast(ops.sin(100 * x) > -0.5, "float32")
        return squared(self((x - self.moving) * kept), y)

    def step(self, x, y):
        logs = super().step(x, y)
        self.moving.assign(0.9 * self.moving + 0.1 * ops.mean(x, axis=0))
        return logs


@means
class BatchNorm(OwnStep):
    def make(self):
        norm = layers.BatchNormalization(synchronized=True)
        self.net = keras.Sequential(
            [keras.Input((4,)), layers.Dense(5), norm, layers.Dense(2)]
        )

    def step(self, x, y):
        variables = self.trainable_variables
        loss, grads = ks.value_and_grad(lambda: self.loss_of(x, y), variables)()
        self.optimizer.apply(grads, variables)
        return {"objective": loss}


@means
class Recommender(OwnStep):
    x, y = integers(6, 2), LABELS

    def make(self):
        self.users, self.items = (layers.Embedding(6, 3) for _ in range(2))
        self.users.build(None)
        self.items.build(None)

    def loss_of(self, x, y):
        score = ops.sum(self.users(x[:, 0]) * self.items(x[:, 1]), axis=1)
        return squared(score, ops.cast(y, "float32"))


@means
class ClassActivation(Classifies):
    """Grad-CAM: the gradient of a class by the features weighs them."""

    def make(self):
        conv = layers.Conv2D(3, 3, activation="tanh")
        self.net = keras.Sequential([keras.Input((6, 6, 1)), conv])
        self.head = keras.Sequential(
            [keras.Input((4, 4, 3)), layers.Flatten(), layers.Dense(CLASSES)]
        )

    def loss_of(self, x, y):
        features = self.net(x)

        def score(features):
            picked = ops.take_along_axis(self.head(features), y[:, None], 1)
            return ops.sum(picked)

        weights = ops.mean(
            jax.grad(score)(features), axis=(1, 2), keepdims=True
        )
        cam = ops.relu(ops.sum(ops.stop_gradient(weights) * features, axis=-1))
        entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return entropy(y, self.head(features)) + 0.1 * ops.mean(cam)


# Scaled losses.


@others
class ScaledDecay(ScaledLoss):
    """Adds to gradients that the replicas sum what is no share of a sum."""

    def change_gradients(self, grads):
        pairs = zip(grads, self.trainable_variables, strict=True)
        return [g + 0.8 * v for g, v in pairs]


@others
class ScaledByHand(ScaledLoss):
    """Scales the loss by the optimizer, and updates weights without it."""

    def step(self, x, y):
        loss, grads = self.by_jax(
            lambda: self.optimizer.scale_loss(self.loss_of(x, y))
        )
        for variable, grad in zip(self.trainable_variables, grads, strict=True):
            variable.assign_sub(0.1 * grad / 8)
        return {"objective": loss}


@others
class ScaledByOther(ScaledLoss):
    """Scales by one optimizer what another one applies."""

    def make(self):
        super().make()
        self.second = keras.optimizers.SGD(0.01, momentum=0.5)
        self.second.build(self.net.trainable_variables)
        self.slots = self.second.variables

    def step(self, x, y):
        loss, grads = self.by_jax(
            lambda: self.optimizer.scale_loss(self.loss_of(x, y))
        )
        self.second.apply(grads, self.trainable_variables)
        return {"objective": loss}

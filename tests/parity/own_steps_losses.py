"""Train steps by their losses, derivatives and changes of gradients."""

import jax
import keras
import numpy as np
from keras import layers, ops

import keras_strategies as ks
from tests.parity.own_steps import (
    BATCH,
    CLASSES,
    LABELS,
    OwnStep,
    means,
    mlp,
    others,
    squared,
)

# Losses.


@others
class SumByConstant(OwnStep):
    def loss_of(self, x, y):
        return ops.sum(ops.square(self(x) - y)) / BATCH


@means
class LossOfRows(OwnStep):
    def loss_of(self, x, y):
        values = keras.losses.Huber(reduction=None)(y, self(x))
        return ops.mean(values * ops.exp(-ops.abs(x[:, 0])))


@others
class KerasSum(OwnStep):
    def loss_of(self, x, y):
        return keras.losses.MeanSquaredError(reduction="sum")(y, self(x)) / 12


@means
class WithPenalties(OwnStep):
    """`compute_loss` with regularizers, activities and weights of rows."""

    keras_loss = "mse"

    def make(self):
        self.net = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(5, "tanh", kernel_regularizer="l2"),
                layers.ActivityRegularization(l2=0.01),
                layers.Dense(2),
            ]
        )

    def loss_of(self, x, y):
        weight = ops.sigmoid(x[:, 0])
        output = self(x, training=True)
        return self.compute_loss(x, y, output, sample_weight=weight)


@means
class Focal(OwnStep):
    y = LABELS

    def make(self):
        self.net = mlp(5, CLASSES)

    def loss_of(self, x, y):
        logs = ops.log_softmax(self(x))
        picked = ops.take_along_axis(logs, y[:, None], axis=1)[:, 0]
        return ops.mean(-ops.square(1 - ops.exp(picked)) * picked)


@others
class MaskedRatio(OwnStep):
    def loss_of(self, x, y):
        mask = ops.cast(x[:, :1] > 0, "float32")
        error = ops.square(self(x) - y) * mask
        return ops.sum(error) / (ops.sum(mask) + 1.0)


@others
class Mixup(OwnStep):
    """Mixes each row with the one that is at its place from the end."""

    def loss_of(self, x, y):
        return squared(self(0.7 * x + 0.3 * x[::-1]), 0.7 * y + 0.3 * y[::-1])


@means
class Adversarial(OwnStep):
    """Trains on rows that the sign of the loss's gradient has moved."""

    def loss_of(self, x, y):
        towards = jax.grad(lambda x: squared(self(x), y))(x)
        moved = ops.stop_gradient(x + 0.1 * ops.sign(towards))
        return squared(self(x), y) + squared(self(moved), y)


@means
class Uncertainty(OwnStep):
    """Two tasks with learned weights (Kendall)."""

    def make(self):
        super().make()
        self.logs = self.add_weight(name="log_vars", shape=(2,))

    def loss_of(self, x, y):
        error = ops.mean(ops.square(self(x) - y), axis=0)
        return ops.sum(ops.exp(-self.logs) * error + self.logs)


@others
class WeightsOfNorms(OwnStep):
    """Weights of two losses from the norms of their gradients."""

    def step(self, x, y):
        (one, one_gradients), (two, two_gradients) = (
            self.by_jax(lambda task=task: squared(self(x)[:, task], y[:, task]))
            for task in range(2)
        )
        norms = [
            sum(ops.sum(ops.square(g)) for g in of)
            for of in (one_gradients, two_gradients)
        ]
        share = ops.sqrt(norms[0] / (norms[0] + norms[1]))
        pairs = zip(one_gradients, two_gradients, strict=True)
        grads = [share * a + (1 - share) * b for a, b in pairs]
        self.optimizer.apply(grads, self.trainable_variables)
        return {"objective": one + two}


# Ways to differentiate.


@means
class PerExample(OwnStep):
    """Clips the gradient of each row."""

    def step(self, x, y):
        variables = self.trainable_variables

        def loss_of(values, x, y):
            mapping = zip(variables, values, strict=True)
            with keras.StatelessScope(state_mapping=mapping):
                return squared(self(x[None]), y[None])

        compute = jax.vmap(jax.value_and_grad(loss_of), (None, 0, 0))
        losses, grads = compute([v.value for v in variables], x, y)
        flat = [ops.reshape(g, (g.shape[0], -1)) for g in grads]
        norms = ops.norm(ops.concatenate(flat, axis=1), axis=1)
        factor = ops.minimum(1.0, 0.5 / norms)
        clipped = [
            ops.mean(g * ops.reshape(factor, (-1,) + (1,) * (g.ndim - 1)), 0)
            for g in grads
        ]
        self.optimizer.apply(clipped, variables)
        return {"objective": ops.mean(losses)}


@jax.custom_vjp
def rounded(x):
    return ops.round(x)


rounded.defvjp(lambda x: (ops.round(x), x), lambda x, g: (g * (abs(x) < 2),))


@means
class StraightThrough(OwnStep):
    def loss_of(self, x, y):
        return squared(self(rounded(3 * self.net.layers[0](x)) / 3), y)

    def make(self):
        self.net = keras.Sequential([keras.Input((4,)), layers.Dense(4)])
        self.head = mlp(2)

    def call(self, x, training=None):
        return self.head(x)


@jax.custom_vjp
def normalized(x):
    return x


normalized.defvjp(
    lambda x: (x, ()), lambda _, g: (0.1 * g / (ops.norm(g) + 1e-6),)
)


@others
class NormalizedBackwards(OwnStep):
    """A function for the derivative that combines rows."""

    def loss_of(self, x, y):
        return squared(normalized(self(x)), y)


class OwnCotangent(OwnStep):
    def step(self, x, y):
        def losses():
            return ops.mean(ops.square(self(x) - y), axis=1)

        def pull_back(pure):
            def compute(values):
                rows, pull = jax.vjp(pure, values)
                return rows, pull(ops.ones_like(rows) / self.count(x))[0]

            return compute

        rows, grads = self.by_jax(losses, transform=pull_back)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"objective": ops.mean(rows)}


@means
class CotangentOfRows(OwnCotangent):
    def count(self, x):
        return ops.shape(x)[0]


@others
class CotangentOfConstant(OwnCotangent):
    def count(self, x):
        return BATCH


@means
class Reversed(OwnStep):
    """Domain adversarial: the gradient of one head is reversed."""

    def make(self):
        self.net, self.head = mlp(5, 4), mlp(1)
        self.out = mlp(2)

    def loss_of(self, x, y):
        @ops.custom_gradient
        def reverse(x):
            return (
                x,
                lambda *args, upstream=None: (
                    -0.3 * (args[0] if upstream is None else upstream)
                ),
            )

        features = self.net(x)
        domain = self.head(reverse(features))[:, 0]
        is_real = ops.cast(x[:, 0] > 0, "float32")
        domain_loss = keras.losses.binary_crossentropy(
            is_real[:, None], domain[:, None], from_logits=True
        )
        return squared(self.out(features), y) + ops.mean(domain_loss)


@means
class Rematerialized(OwnStep):
    def make(self):
        self.blocks = [mlp(4, 4) for _ in range(2)]
        self.net = mlp(2)

    def loss_of(self, x, y):
        for block in self.blocks:
            x = x + jax.checkpoint(lambda x, block=block: block(x))(x)
        return squared(self.net(x), y)


@means
class ScannedLayers(OwnStep):
    def make(self):
        self.net = mlp(2)
        self.stack = self.add_weight(name="stack", shape=(3, 4, 4))

    def loss_of(self, x, y):
        def block(x, kernel):
            return x + ops.tanh(ops.matmul(x, kernel)), ops.mean(x, axis=1)

        x, seen = jax.lax.scan(block, x, self.stack.value)
        return squared(self.net(x), y) + 0.1 * ops.mean(ops.square(seen))


@others
class InnerScan(OwnStep):
    """Three small steps in a loop, then the mean of the weights."""

    def step(self, x, y):
        variables = self.trainable_variables

        def descend(values, _):
            def loss_of(values):
                mapping = zip(variables, values, strict=True)
                with keras.StatelessScope(state_mapping=mapping):
                    return self.loss_of(x, y)

            loss, grads = jax.value_and_grad(loss_of)(values)
            pairs = zip(values, grads, strict=True)
            return [v - 0.1 * g for v, g in pairs], loss

        start = [v.value for v in variables]
        new, losses = jax.lax.scan(descend, start, None, length=3)
        for variable, value in zip(variables, new, strict=True):
            variable.assign(value)
        return {"objective": losses[0]}


# Changes of gradients.


@others
class ClippedNorm(OwnStep):
    def change_gradients(self, grads):
        norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in grads))
        return [g * 0.2 / ops.maximum(norm, 0.2) for g in grads]


@others
class Signs(OwnStep):
    def make_optimizer(self):
        return keras.optimizers.SGD(0.01)

    def change_gradients(self, grads):
        return [ops.sign(g) for g in grads]


@others
class AdaptiveClipping(OwnStep):
    def change_gradients(self, grads):
        clipped = []
        for grad, weight in zip(grads, self.trainable_variables, strict=True):
            limit = 0.05 * ops.maximum(ops.norm(weight.value), 1e-3)
            norm = ops.maximum(ops.norm(grad), 1e-6)
            clipped.append(ops.where(norm > limit, grad * limit / norm, grad))
        return clipped


@means
class ScaledGradients(OwnStep):
    """Rates of layers, a decay, and centralized gradients."""

    def change_gradients(self, grads):
        variables = self.trainable_variables
        grads = [
            g - ops.mean(g, axis=0, keepdims=True) if g.ndim > 1 else 0.5 * g
            for g in grads
        ]
        pairs = zip(grads, variables, strict=True)
        return [g + 0.01 * v for g, v in pairs]


@others
class LogsNorm(OwnStep):
    """A log of gradients, which is no mean: one warning."""

    def step(self, x, y):
        loss, grads = self.by_jax(lambda: self.loss_of(x, y))
        self.optimizer.apply(grads, self.trainable_variables)
        norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in grads))
        return {"objective": loss, "norm": norm}


# Numbers of rows that reach the loss in unusual ways.


@ks.global_batch_loss
def weighted_sum(x, y, weights):
    return ops.sum(weights * ops.mean(ops.square(x - y), axis=-1))


@ks.global_batch_loss
def root_and_largest(x, y):
    each = ops.mean(ops.square(x - y), axis=-1)
    return ops.sqrt(ops.mean(each)), ops.max(each)


@others
class WeightsByCount(OwnStep):
    """The gathered weights are those of a replica's number of rows."""

    def loss_of(self, x, y):
        weights = ops.ones((x.shape[0],)) / x.shape[0]
        return weighted_sum(self(x), y, weights)


@others
class ScaledResult(OwnStep):
    def loss_of(self, x, y):
        root, _ = root_and_largest(self(x), y)
        return root * x.shape[0] / 10


@others
class IntegersByCount(OwnStep):
    y = LABELS

    def loss_of(self, x, y):
        weights = ops.cast(y * x.shape[0], "float32") / 10
        return ops.mean(weights * ops.mean(ops.square(self(x)), axis=-1))


@others
class TiledByCount(OwnStep):
    def loss_of(self, x, y):
        scales = np.array([1, 2], "float32") * x.shape[0] / 10
        weights = np.tile(scales, (x.shape[0], 1))
        return ops.mean(weights * ops.square(self(x) - y))


class KeepsNumber(OwnStep):
    start = np.int32(0)

    def make(self):
        super().make()
        self.number = self.state("number", self.start)

    def step(self, x, y):
        logs = super().step(x, y)
        self.number.assign(self.predict_number(x))
        return logs


@others
class RoundedMean(KeepsNumber):
    def predict_number(self, x):
        return ops.cast(70 * ops.mean(x), "int32")


@others
class QuotientOfIntegers(KeepsNumber):
    def predict_number(self, x):
        total = ops.sum(ops.cast(9 * x, "int32"))
        return jax.lax.div(total, np.int32(x.shape[0]))


@others
class NoisyCount(KeepsNumber):
    start = np.float32(0)

    def predict_number(self, x):
        noise = jax.random.normal(jax.random.key(0))
        return 1e-9 * noise + x.shape[0]

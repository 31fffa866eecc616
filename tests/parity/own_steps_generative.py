"""Train steps of generative models."""

import jax
import keras
import numpy as np
from keras import layers, ops

import keras_strategies as ks
from tests.parity.own_steps import (
    BATCH,
    IMAGES,
    Averages,
    OwnStep,
    X,
    make_noise,
    means,
    mlp,
    others,
    squared,
)


def entropy(labels, logits):
    values = keras.losses.binary_crossentropy(labels, logits, from_logits=True)
    return ops.mean(values)


# Generative models.


@means
class Gan(OwnStep):
    def make(self):
        self.net, self.critic = mlp(5, 4, shape=(2,)), mlp(5, 1)

    def loss_of_critic(self, x, fake):
        real, fake = self.critic(x), self.critic(fake)
        one = entropy(ops.ones_like(real), real)
        return one + entropy(ops.zeros_like(fake), fake)

    def loss_of_fake(self, fake, x):
        logits = self.critic(fake)
        return entropy(ops.ones_like(logits), logits)

    def differentiate(self, loss_of, variables):
        return ks.value_and_grad(loss_of, variables)()

    def step(self, x, y):
        noise = make_noise(x, 2)
        critic_variables = self.critic.trainable_variables
        net_variables = self.net.trainable_variables
        fake = ops.stop_gradient(self.net(noise))
        d_loss, grads = self.differentiate(
            lambda: self.loss_of_critic(x, fake), critic_variables
        )
        self.optimizer.apply(grads, critic_variables)
        g_loss, grads = self.differentiate(
            lambda: self.loss_of_fake(self.net(noise), x), net_variables
        )
        self.optimizer.apply(grads, net_variables)
        return {"d_loss": d_loss, "g_loss": g_loss}


@means
class Dcgan(Gan):
    x = IMAGES

    def make(self):
        self.net = keras.Sequential(
            [
                keras.Input((2,)),
                layers.Dense(18),
                layers.Reshape((3, 3, 2)),
                layers.Conv2DTranspose(2, 3, strides=2, padding="same"),
                layers.LeakyReLU(),
                layers.Conv2D(1, 3, padding="same", activation="tanh"),
            ]
        )
        self.critic = keras.Sequential(
            [
                keras.Input((6, 6, 1)),
                layers.Conv2D(3, 3, strides=2),
                layers.LeakyReLU(),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )


@means
class WassersteinGan(Gan):
    def loss_of_critic(self, x, fake):
        share = ops.abs(make_noise(x, 1))
        between = share * x + (1 - share) * fake
        slopes = jax.grad(lambda z: ops.sum(self.critic(z)))(between)
        norms = ops.sqrt(ops.sum(ops.square(slopes), axis=1) + 1e-12)
        penalty = ops.mean(ops.square(norms - 1.0))
        scores = ops.mean(self.critic(fake)) - ops.mean(self.critic(x))
        return scores + 10 * penalty

    def loss_of_fake(self, fake, x):
        return -ops.mean(self.critic(fake))


@means
class HingeGan(Gan):
    """With R1, and a loss of matched features."""

    def loss_of_critic(self, x, fake):
        real = ops.mean(ops.relu(1 - self.critic(x)))
        slopes = jax.grad(lambda z: ops.sum(self.critic(z)))(x)
        r1 = ops.mean(ops.sum(ops.square(slopes), axis=1))
        return real + ops.mean(ops.relu(1 + self.critic(fake))) + 0.1 * r1

    def loss_of_fake(self, fake, x):
        hidden = self.critic.layers[0]
        return squared(hidden(fake), hidden(x)) - ops.mean(self.critic(fake))


@others
class SummedGan(Gan):
    """A linear critic, whose new weights times a sum are a gradient."""

    def make(self):
        self.net, self.critic = mlp(4, shape=(2,)), mlp(1)

    def loss_of_fake(self, fake, x):
        return -ops.sum(self.critic(fake)) / BATCH

    def differentiate(self, loss_of, variables):
        return self.by_jax(loss_of, variables)


@others
class SummedOffset(SummedGan):
    """A generator that only adds a learned offset."""

    def make(self):
        super().make()
        self.net.layers[0].kernel.trainable = False


@means
class LinearGan(SummedGan):
    def loss_of_fake(self, fake, x):
        return -ops.mean(self.critic(fake))


@means
class DeepLinear(OwnStep):
    """A critic of three linear layers, whose loss is linear, too."""

    def make(self):
        self.net = mlp(4, 3, 1, activation=None)

    def loss_of(self, x, y):
        return ops.mean(self(x)) - ops.mean(self(make_noise(x, 4)))


@others
class DeepLinearSum(DeepLinear):
    def loss_of(self, x, y):
        return super().loss_of(x, y) * ops.shape(x)[0] / BATCH


class Vae(OwnStep):
    def make(self):
        self.net, self.decoder = mlp(5, 4), mlp(5, 4, shape=(2,))

    def terms(self, x):
        mean, log_var = ops.split(self.net(x), 2, axis=-1)
        code = mean + ops.exp(0.5 * log_var) * make_noise(x, 2)
        kl = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
        error = ops.sum(ops.square(self.decoder(code) - x), axis=1)
        return error, ops.sum(kl, axis=1)


@means
class MeanVae(Vae):
    def make(self):
        super().make()
        self.kl = keras.metrics.Mean(name="kl")

    def step(self, x, y):
        def loss_of():
            error, kl = self.terms(x)
            return ops.mean(error + kl), kl

        variables = self.trainable_variables
        (loss, kl), grads = ks.value_and_grad(loss_of, variables, True)()
        self.optimizer.apply(grads, variables)
        self.kl.update_state(kl)
        return {"objective": loss, "kl": self.kl.result()}


@others
class SummedVae(Vae):
    def make_optimizer(self):
        return keras.optimizers.SGD(0.01)

    def loss_of(self, x, y):
        error, kl = self.terms(x)
        return ops.mean(error) + ops.sum(kl) / BATCH


class Codebook(OwnStep):
    def make(self):
        self.net, self.decoder = mlp(5, 3), mlp(5, 4, shape=(3,))
        self.book = self.state("book", X[:4, :3])

    def nearest(self, code, book):
        distances = ops.sum(ops.square(code[:, None] - book[None]), axis=-1)
        return ops.one_hot(ops.argmin(distances, axis=1), 4)

    def loss_of(self, x, y):
        code = self.net(x)
        book = ops.convert_to_tensor(self.book)
        near = ops.matmul(self.nearest(code, book), book)
        through = code + ops.stop_gradient(near - code)
        commitment = squared(code, ops.stop_gradient(near))
        matched = squared(ops.stop_gradient(code), near)
        return squared(self.decoder(through), x) + 0.25 * commitment + matched


@means
class LearnedCodebook(Codebook):
    def make(self):
        super().make()
        self.book = self.add_weight(
            name="learned", shape=(4, 3), initializer="random_normal"
        )


@others
class MovingCodebook(Codebook):
    """The averages of sums; the codebook is their ratio."""

    def make(self):
        super().make()
        self.counts = self.state("counts", np.ones(4, "float32"))
        self.totals = self.state("totals", np.array(self.book))

    def step(self, x, y):
        logs = super().step(x, y)
        code = self.net(x)
        hot = self.nearest(code, self.book.value)
        counts = 0.9 * self.counts + 0.1 * ops.sum(hot, axis=0)
        totals = 0.9 * self.totals + 0.1 * ops.matmul(ops.transpose(hot), code)
        self.counts.assign(counts)
        self.totals.assign(totals)
        self.book.assign(totals / counts[:, None])
        return logs


@means
class MovingMeans(Codebook):
    """The averages of means, whose ratio the next step reads."""

    def make(self):
        super().make()
        self.counts = self.state("counts", np.ones(4, "float32"))

    def step(self, x, y):
        logs = super().step(x, y)
        code = self.net(x)
        hot = self.nearest(code, self.book / self.counts[:, None])
        code_means = ops.mean(hot[:, :, None] * code[:, None], axis=0)
        self.counts.assign(0.9 * self.counts + 0.1 * ops.mean(hot, axis=0))
        self.book.assign(0.9 * self.book + 0.1 * code_means)
        return logs


@means
class Diffusion(Averages):
    def make(self):
        self.net = mlp(6, 4, shape=(5,))
        self.teacher = keras.models.clone_model(self.net)
        self.teacher.trainable = False

    def loss_of(self, x, y):
        noise, time = make_noise(x, 4), ops.abs(make_noise(x, 1))
        mixed = ops.sqrt(1.01 - time) * x + ops.sqrt(time + 0.01) * noise
        output = self.net(ops.concatenate([mixed, time], axis=1))
        return ops.mean(ops.abs(output - noise))

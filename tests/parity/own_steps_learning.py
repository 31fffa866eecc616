"""Train steps of contrastive, meta and reinforcement learning."""

import jax
import keras
import numpy as np
from keras import ops

from tests.parity.own_steps import (
    LABELS,
    Averages,
    OwnStep,
    floats,
    integers,
    make_noise,
    means,
    mlp,
    others,
    squared,
)

# Teachers and pairs of views.


@means
class MeanTeacher(Averages):
    def loss_of(self, x, y):
        target = ops.stop_gradient(self.teacher(x + 0.1 * make_noise(x, 4)))
        output = self(x)
        return squared(output, y) + squared(output, target)


@means
class Byol(Averages):
    def make(self):
        super().make()
        self.predictor = mlp(3, 2, shape=(2,))

    def loss_of(self, x, y):
        noise = 0.1 * make_noise(x, 4)
        one = ops.normalize(self.predictor(self.net(x + noise)), axis=1)
        two = ops.normalize(self.teacher(x - noise), axis=1)
        likeness = ops.sum(one * ops.stop_gradient(two), axis=1)
        return 2 - 2 * ops.mean(likeness)


@means
class Distillation(OwnStep):
    y = LABELS

    def make(self):
        self.net, self.teacher = mlp(5, 3), mlp(6, 3)
        self.teacher.trainable = False

    def loss_of(self, x, y):
        hard = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        soft = keras.losses.KLDivergence()
        logits = self(x)
        target = ops.softmax(self.teacher(x, training=False) / 2)
        return 0.3 * hard(y, logits) + 4 * soft(target, ops.softmax(logits / 2))


@others
class SimClr(OwnStep):
    def loss_of(self, x, y):
        noise = 0.1 * make_noise(x, 4)
        one = ops.normalize(self(x + noise), axis=1)
        two = ops.normalize(self(x - noise), axis=1)
        logits = ops.matmul(one, ops.transpose(two)) / 0.5
        labels = ops.arange(ops.shape(x)[0])
        values = keras.losses.sparse_categorical_crossentropy(
            labels, logits, from_logits=True
        )
        return ops.mean(values)


@means
class Triplet(OwnStep):
    def loss_of(self, x, y):
        anchor, near, far = self(x), self(x + 0.1 * make_noise(x, 4)), self(-x)
        to_near = ops.sum(ops.square(anchor - near), axis=1)
        to_far = ops.sum(ops.square(anchor - far), axis=1)
        return ops.mean(ops.maximum(to_near - to_far + 5.0, 0.0))


# Gradients of gradients, and of several tasks.


@others
class Sam(OwnStep):
    """Takes the gradient at weights that a first gradient has moved."""

    def step(self, x, y):
        variables = self.trainable_variables
        loss, grads = self.by_jax(lambda: self.loss_of(x, y))
        norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in grads))
        start = [v.value for v in variables]
        for variable, grad in zip(variables, grads, strict=True):
            variable.assign_add(0.05 * grad / (norm + 1e-12))
        _, grads = self.by_jax(lambda: self.loss_of(x, y))
        for variable, value in zip(variables, start, strict=True):
            variable.assign(value)
        self.optimizer.apply(grads, variables)
        return {"objective": loss}


@others
class Maml(OwnStep):
    """The loss after an inner step on the batch."""

    def step(self, x, y):
        def loss_after(values):
            def loss_of(values):
                mapping = zip(self.trainable_variables, values, strict=True)
                with keras.StatelessScope(state_mapping=mapping):
                    return self.loss_of(x, y)

            grads = jax.grad(loss_of)(values)
            pairs = zip(values, grads, strict=True)
            return loss_of([v - 0.1 * g for v, g in pairs])

        start = [v.value for v in self.trainable_variables]
        loss, grads = jax.value_and_grad(loss_after)(start)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"objective": loss}


@means
class MamlOfTasks(OwnStep):
    """Each row is a task, with rows of its own."""

    x, y = floats(6, 2), floats(6, 1)

    def make(self):
        self.net = mlp(3, 1, shape=(2,))

    def step(self, x, y):
        variables = self.trainable_variables

        def loss_of(values, x, y):
            mapping = zip(variables, values, strict=True)
            with keras.StatelessScope(state_mapping=mapping):
                return squared(self(x), y)

        def task_loss(values, x, y):
            grads = jax.grad(loss_of)(values, x[:3], y[:3])
            pairs = zip(values, grads, strict=True)
            return loss_of([v - 0.1 * g for v, g in pairs], x[3:], y[3:])

        def of_all(values):
            return ops.mean(jax.vmap(task_loss, (None, 0, 0))(values, x, y))

        loss, grads = jax.value_and_grad(of_all)([v.value for v in variables])
        self.optimizer.apply(grads, variables)
        return {"objective": loss}


@others
class PcGrad(OwnStep):
    """Projects the gradient of each task onto the normal of the other's."""

    def step(self, x, y):
        (one, one_gradients), (two, two_gradients) = (
            self.by_jax(lambda task=task: squared(self(x)[:, task], y[:, task]))
            for task in range(2)
        )
        pairs = list(zip(one_gradients, two_gradients, strict=True))
        product = sum(ops.sum(a * b) for a, b in pairs)
        size = sum(ops.sum(ops.square(b)) for _, b in pairs) + 1e-12
        share = ops.minimum(product, 0.0) / size
        grads = [a - share * b + b for a, b in pairs]
        self.optimizer.apply(grads, self.trainable_variables)
        return {"objective": one + two}


# Reinforcement learning; rows are transitions or episodes.


class Policy(OwnStep):
    y = integers(2)

    def log_chances(self, x, y):
        return ops.take_along_axis(ops.log_softmax(self(x)), y[:, None], 1)[
            :, 0
        ]


@means
class PolicyGradient(Policy):
    """The rewards of an episode, discounted by a scan over its steps."""

    x, y = floats(5, 4), integers(2, 5)

    def loss_of(self, x, y):
        rewards = ops.transpose(ops.tanh(x[:, :, 0]))

        def discount(later, reward):
            value = reward + 0.9 * later
            return value, value

        start = ops.zeros_like(rewards[0])
        _, returns = jax.lax.scan(discount, start, rewards, reverse=True)
        logs = ops.log_softmax(self(ops.reshape(x, (-1, 4))))
        logs = ops.reshape(logs, (-1, 5, 2))
        picked = ops.take_along_axis(logs, y[:, :, None], axis=2)[:, :, 0]
        return -ops.mean(picked * ops.transpose(returns))


@others
class NormalizedAdvantages(Policy):
    def loss_of(self, x, y):
        rewards = x[:, 0]
        advantages = (rewards - ops.mean(rewards)) / (ops.std(rewards) + 1e-6)
        return -ops.mean(self.log_chances(x, y) * advantages)


@means
class ActorCritic(Policy):
    def make(self):
        super().make()
        self.critic = mlp(4, 1)

    def loss_of(self, x, y):
        values = self.critic(x)[:, 0]
        advantages = ops.stop_gradient(x[:, 1] - values)
        chances = ops.softmax(self(x))
        bonus = ops.sum(chances * ops.log(chances + 1e-8), axis=1)
        ratio = ops.exp(self.log_chances(x, y) + 0.7)
        clipped = ops.clip(ratio, 0.8, 1.2) * advantages
        actor = -ops.mean(ops.minimum(ratio * advantages, clipped))
        critic = keras.losses.Huber()(x[:, 1:2], values[:, None])
        return actor + 0.5 * critic + 0.01 * ops.mean(bonus)


@means
class DeepQ(Policy):
    """The weights of the target are copied in every second step."""

    def make(self):
        super().make()
        self.target = keras.models.clone_model(self.net)
        self.target.trainable = False
        self.steps = self.state("steps", np.int32(0))

    def loss_of(self, x, y):
        later = ops.max(self.target(ops.flip(x, axis=1)), axis=1)
        goal = ops.stop_gradient(x[:, 0] + 0.9 * later)
        value = ops.sum(self(x) * ops.one_hot(y, 2), axis=1)
        error = value - goal
        is_small = ops.abs(error) < 1
        return ops.mean(
            ops.where(is_small, ops.square(error) / 2, ops.abs(error) - 0.5)
        )

    def step(self, x, y):
        logs = super().step(x, y)
        self.steps.assign_add(1)
        is_due = self.steps % 2 == 0
        pairs = zip(self.target.weights, self.net.weights, strict=True)
        for old, new in pairs:
            old.assign(ops.where(is_due, new.value, old.value))
        return logs

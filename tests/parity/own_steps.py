"""Train steps as users write them: their base, their data, and common ones."""

import dataclasses

import jax
import keras
import numpy as np
from keras import layers, ops

import keras_strategies as ks

ROWS, BATCH, CLASSES = 24, 12, 3
_random = np.random.default_rng(3)


def floats(*shape):
    return _random.normal(size=(ROWS, *shape)).astype("float32")


def integers(high, *shape):
    return _random.integers(0, high, (ROWS, *shape)).astype("int32")


X, Y, LABELS = floats(4), floats(2), integers(CLASSES)
IMAGES, SEQUENCES, TOKENS = floats(6, 6, 1), floats(5, 3), integers(7, 5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A train step.

    Attributes:
      make: Makes the model.
      has_only_means: Whether all that training uses is a mean over rows, so
        that the step must stay mapped.
    """

    make: type
    has_only_means: bool


STEPS = {}


def means(make):
    """Registers a step that uses only means over rows."""
    STEPS[make.__name__] = Case(make=make, has_only_means=True)
    return make


def others(make):
    """Registers a step that combines rows in other ways."""
    STEPS[make.__name__] = Case(make=make, has_only_means=False)
    return make


def mlp(*units, shape=(4,), activation="tanh"):
    *hidden, last = units
    middle = [layers.Dense(n, activation) for n in hidden]
    return keras.Sequential([keras.Input(shape), *middle, layers.Dense(last)])


def squared(one, two):
    return ops.mean(ops.square(one - two))


def make_noise(x, size):
    """Noise that depends on a row only, so that all devices draw the same."""
    flat = ops.reshape(x, (ops.shape(x)[0], -1))
    return ops.sin(37 * flat[:, :size] + 11 * flat[:, -size:])


class OwnStep(keras.Model):
    """A model whose `step` runs in a `StatelessScope` of all state."""

    x, y, keras_loss = X, Y, None
    tolerance = 3e-5

    def __init__(self):
        super().__init__()
        self.make()
        self.built = True

    def make(self):
        self.net = mlp(5, 2)

    def make_optimizer(self):
        return keras.optimizers.SGD(0.1, momentum=0.5)

    def call(self, x, training=None):
        return self.net(x, training=training)

    def state(self, name, like):
        """Adds a variable that is not trained, with an array's value."""
        value = np.array(like)
        return self.add_weight(
            name=name,
            shape=value.shape,
            dtype=str(value.dtype),
            initializer=lambda *_, **__: ops.convert_to_tensor(value),
            trainable=False,
        )

    def loss_of(self, x, y):
        return squared(self(x, training=True), y)

    def train_step(self, state, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        groups = (
            self.trainable_variables,
            self.non_trainable_variables,
            self.optimizer.variables,
            self.metrics_variables,
        )
        pairs = [
            pair
            for variables, values in zip(groups, state, strict=True)
            for pair in zip(variables, values, strict=True)
        ]
        with keras.StatelessScope(state_mapping=pairs) as scope:
            logs = self.step(x, y)
        new = [[scope.get_current_value(v) for v in group] for group in groups]
        return logs, tuple(new)

    def step(self, x, y):
        loss, grads = self.by_jax(lambda: self.loss_of(x, y))
        self.optimizer.apply(
            self.change_gradients(grads), self.trainable_variables
        )
        return {"objective": loss}

    def change_gradients(self, grads):
        return grads

    def by_jax(self, loss_of, variables=None, transform=jax.value_and_grad):
        """Differentiates by JAX, in a `StatelessScope`."""
        variables = self.trainable_variables if variables is None else variables
        state = (*self.variables, *self.optimizer.variables)
        rest = [(v, v.value) for v in state]

        def pure(values):
            mapping = [*rest, *zip(variables, values, strict=True)]
            with keras.StatelessScope(state_mapping=mapping):
                return loss_of()

        return transform(pure)([v.value for v in variables])


class Averages(OwnStep):
    """Follows the weights of `net` by an exponential average."""

    def make(self):
        super().make()
        self.teacher = keras.models.clone_model(self.net)
        self.teacher.set_weights(self.net.get_weights())
        self.teacher.trainable = False

    def step(self, x, y):
        logs = super().step(x, y)
        pairs = zip(self.teacher.weights, self.net.weights, strict=True)
        for slow, fast in pairs:
            slow.assign(0.9 * slow + 0.1 * fast)
        return logs


# How gradients are computed and applied.


@means
class Guide(OwnStep):
    """The step of Keras's guide for JAX."""

    keras_loss = "mse"

    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Mean(name="loss")
        self.mae = keras.metrics.MeanAbsoluteError(name="mae")

    @property
    def metrics(self):
        return [self.seen, self.mae]

    def loss_and_updates(self, weights, others, x, y):
        y_pred, others = self.stateless_call(weights, others, x, training=True)
        return self.compute_loss(x, y, y_pred), (y_pred, others)

    def train_step(self, state, data):
        weights, others, slots, metrics = state
        x, y = data
        grad_fn = jax.value_and_grad(self.loss_and_updates, has_aux=True)
        (loss, (y_pred, others)), grads = grad_fn(weights, others, x, y)
        weights, slots = self.optimizer.stateless_apply(slots, grads, weights)
        logs, new = {}, []
        for metric in self.metrics:
            mine = metrics[len(new) : len(new) + len(metric.variables)]
            args = (loss,) if metric is self.seen else (y, y_pred)
            mine = metric.stateless_update_state(mine, *args)
            logs[metric.name] = metric.stateless_result(mine)
            new += mine
        return logs, (weights, others, slots, new)


@means
class ByStrategy(OwnStep):
    keras_loss = "mse"

    def step(self, x, y):
        variables = self.trainable_variables
        loss, grads = ks.value_and_grad(
            lambda: self.compute_loss(x, y, self(x)), variables
        )()
        self.optimizer.apply(grads, variables)
        return {"objective": loss}


@means
class ApplyGradients(OwnStep):
    def make_optimizer(self):
        return keras.optimizers.Adam(0.01)

    def step(self, x, y):
        loss, grads = self.by_jax(lambda: self.loss_of(x, y))
        self.optimizer.apply_gradients(
            zip(grads, self.trainable_variables, strict=True)
        )
        return {"objective": loss, "double": 2 * loss}


@means
class OnlyGradients(OwnStep):
    def step(self, x, y):
        grads = self.by_jax(lambda: self.loss_of(x, y), transform=jax.grad)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"mae": ops.mean(ops.abs(self(x) - y))}


@means
class ByHand(OwnStep):
    def make(self):
        self.net = mlp(2)

    def step(self, x, y):
        error = self(x) - y
        kernel = ops.matmul(ops.transpose(x), error) / ops.shape(x)[0]
        self.optimizer.apply(
            [kernel, ops.mean(error, axis=0)], self.trainable_variables
        )
        return {"objective": ops.mean(ops.square(error))}


@means
class PlainDescent(OwnStep):
    """Assigns weights without an optimizer, with decay and a schedule."""

    def make(self):
        super().make()
        self.steps = self.state("steps", np.float32(0))

    def step(self, x, y):
        loss, grads = self.by_jax(lambda: self.loss_of(x, y))
        rate = 0.1 / (1.0 + self.steps)
        for variable, grad in zip(self.trainable_variables, grads, strict=True):
            variable.assign(variable * 0.999 - rate * grad)
        self.steps.assign_add(1.0)
        return {"objective": loss, "rate": ops.convert_to_tensor(rate)}


@means
class Accumulated(OwnStep):
    """Accumulates gradients by hand, and applies them in every second step."""

    def make(self):
        super().make()
        self.sums = [
            self.state(f"sum{k}", np.zeros(v.shape, "float32"))
            for k, v in enumerate(self.net.trainable_variables)
        ]
        self.steps = self.state("steps", np.int32(0))

    def step(self, x, y):
        loss, grads = self.by_jax(lambda: self.loss_of(x, y))
        is_due = self.steps % 2 == 1
        triples = zip(self.trainable_variables, self.sums, grads, strict=True)
        for variable, total, grad in triples:
            total.assign_add(grad)
            step = ops.where(is_due, 0.05 * total, 0.0)
            variable.assign_sub(step)
            total.assign(ops.where(is_due, 0.0, total.value))
        self.steps.assign_add(1)
        return {"objective": loss}


@means
class ScaledLoss(OwnStep):
    def make_optimizer(self):
        inner = keras.optimizers.SGD(0.1)
        return keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0)

    def step(self, x, y):
        loss, grads = self.by_jax(
            lambda: self.optimizer.scale_loss(self.loss_of(x, y))
        )
        grads = self.change_gradients(grads)
        groups = (self.trainable_variables, self.optimizer.variables)
        weights, slots = ([v.value for v in group] for group in groups)
        new = self.optimizer.stateless_apply(slots, grads, weights)
        for group, values in zip(groups, new, strict=True):
            for variable, value in zip(group, values, strict=True):
                variable.assign(value)
        return {"scaled": loss}


@means
class MixedPrecision(ScaledLoss):
    tolerance = 2e-3

    def make(self):
        hidden = layers.Dense(5, "tanh", dtype="mixed_bfloat16")
        last = layers.Dense(2, dtype="float32")
        self.net = keras.Sequential([keras.Input((4,)), hidden, last])

    def loss_of(self, x, y):
        return squared(ops.cast(self(x), "float32"), y)


@means
class TwoOptimizers(OwnStep):
    """The slots of the second one are state of the model."""

    def make(self):
        self.net, self.head = mlp(5, 4), mlp(2)
        self.second = keras.optimizers.Adam(0.01)
        self.second.build(self.head.trainable_variables)
        self.slots = self.second.variables

    def loss_of(self, x, y):
        return squared(self.head(self.net(x)), y)

    def step(self, x, y):
        loss, grads = self.by_jax(lambda: self.loss_of(x, y))
        net_variables = self.net.trainable_variables
        self.optimizer.apply(grads[: len(net_variables)], net_variables)
        self.second.apply(
            grads[len(net_variables) :], self.head.trainable_variables
        )
        return {"objective": loss}


@means
class OptimizersByLayer(OwnStep):
    def make_optimizer(self):
        optimizers = keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
        optimizers[".*/bias"] = keras.optimizers.Adam(0.01)
        return keras.optimizers.MultiOptimizer(optimizers)


@means
class Frozen(OwnStep):
    def make(self):
        self.base, self.net = mlp(5, 4), mlp(2)
        self.base.trainable = False

    def loss_of(self, x, y):
        features = ops.stop_gradient(self.base(x, training=False))
        return squared(self.net(features), y)


@means
class SeveralUpdates(OwnStep):
    """Two updates of a batch, the second one at the new weights."""

    def step(self, x, y):
        loss, grads = self.by_jax(lambda: self.loss_of(x, y))
        self.optimizer.apply(grads, self.trainable_variables)
        second, grads = self.by_jax(lambda: self.loss_of(x, y))
        self.optimizer.apply(grads, self.trainable_variables)
        return {"objective": loss, "second": second}

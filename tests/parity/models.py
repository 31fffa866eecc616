"""Layers, metrics, losses and models that only the parity tests need."""

import jax
import keras
import numpy as np
from keras import ops

import keras_strategies as ks


class MaxPrediction(keras.metrics.Metric):
    """The largest prediction: a state that does not add up."""

    def __init__(self, name="max_prediction", **kwargs):
        super().__init__(name=name, **kwargs)
        self.largest = self.add_variable((), "zeros", name="largest")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.largest.assign(ops.maximum(self.largest, ops.max(y_pred)))

    def result(self):
        return ops.convert_to_tensor(self.largest)


class MovingPrediction(keras.metrics.Metric):
    """A moving average over batches, whose order matters."""

    def __init__(self, name="moving_prediction", **kwargs):
        super().__init__(name=name, **kwargs)
        self.average = self.add_variable((), "zeros", name="average")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.average.assign(0.9 * self.average + 0.1 * ops.std(y_pred))

    def result(self):
        return ops.convert_to_tensor(self.average)


class SawLarge(keras.metrics.Metric):
    """A boolean state."""

    def __init__(self, name="saw_large", **kwargs):
        super().__init__(name=name, **kwargs)
        self.seen = self.add_variable((), "zeros", dtype="bool", name="seen")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.seen.assign(ops.logical_or(self.seen, ops.any(y_pred > 1.0)))

    def result(self):
        return ops.cast(self.seen, "float32")


def spread_metric(y_true, y_pred):
    """A metric function that mixes rows."""
    return ops.std(y_pred)


@ks.global_batch_loss
def spread_loss(y_true, y_pred):
    """A loss that mixes rows, marked as such."""
    error = ops.cast(y_true, y_pred.dtype) - y_pred
    return ops.var(error) + ops.mean(ops.square(error))


def scalar_loss(y_true, y_pred):
    """A loss function that reduces its rows itself."""
    error = ops.cast(y_true, y_pred.dtype) - y_pred
    return ops.mean(ops.abs(error) ** 1.5)


class Counters(keras.layers.Layer):
    """State of every kind that is not a weight."""

    def build(self, input_shape):
        def state(name, dtype, shape=()):
            return self.add_weight(
                shape=shape,
                dtype=dtype,
                initializer="zeros",
                trainable=False,
                name=name,
            )

        self.calls = state("calls", "int32")
        self.called = state("called", "bool")
        self.rows = ks.merge(state("rows", "int32"), "sum")
        self.rows_float = ks.merge(state("rows_float", "float32"), "sum")
        self.largest = ks.merge(state("largest", "float32"), "max")
        self.smallest = ks.merge(state("smallest", "float32"), "min")
        self.any_large = ks.merge(state("any_large", "bool"), "any")
        self.average = state("average", "float32", (int(input_shape[-1]),))

    def call(self, inputs):
        rows = inputs.shape[0]
        self.calls.assign_add(1)
        self.called.assign(True)
        if rows is not None:
            self.rows.assign_add(rows)
            self.rows_float.assign_add(rows)
        self.largest.assign(ops.maximum(self.largest, ops.max(inputs)))
        self.smallest.assign(ops.minimum(self.smallest, ops.min(inputs)))
        self.any_large.assign(
            ops.logical_or(self.any_large, ops.any(inputs > 2.5))
        )
        self.average.assign(0.9 * self.average + 0.1 * ops.mean(inputs, axis=0))
        return inputs


class AddsLosses(keras.layers.Layer):
    """`add_loss` of a mean over rows, and of a weight."""

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs):
        self.add_loss(0.1 * ops.mean(ops.square(inputs)))
        self.add_loss(0.01 * ops.square(self.scale))
        return inputs * self.scale


class OwnTrainStep(keras.Model):
    """A functional train step with `stateless_apply` and plain logs."""

    def train_step(self, state, data):
        trainable, other, optimizer, metrics = state
        x, y = data

        def loss_fn(trainable):
            y_pred, updated = self.stateless_call(
                trainable, other, x, training=True
            )
            return self.loss(y, y_pred), (y_pred, updated)

        (loss, (_, other)), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            trainable
        )
        trainable, optimizer = self.optimizer.stateless_apply(
            optimizer, grads, trainable
        )
        return {"loss": loss}, (trainable, other, optimizer, metrics)


class OwnApplyGradients(keras.Model):
    """A train step that applies gradients in a stateless scope."""

    def train_step(self, state, data):
        trainable, other, optimizer, metrics = state
        x, y = data

        def loss_fn(trainable):
            y_pred, _ = self.stateless_call(trainable, other, x, training=True)
            return self.loss(y, y_pred)

        loss, grads = jax.value_and_grad(loss_fn)(trainable)
        mapping = [
            *zip(self.trainable_variables, trainable, strict=True),
            *zip(self.optimizer.variables, optimizer, strict=True),
        ]
        with keras.StatelessScope(state_mapping=mapping) as scope:
            self.optimizer.apply_gradients(
                zip(grads, self.trainable_variables, strict=True)
            )
        return {"loss": loss}, (
            [scope.get_current_value(v) for v in self.trainable_variables],
            other,
            [scope.get_current_value(v) for v in self.optimizer.variables],
            metrics,
        )


class WithoutOptimizer(keras.Model):
    """A train step that descends by hand."""

    def train_step(self, state, data):
        trainable, other, optimizer, metrics = state
        x, y = data

        def loss_fn(trainable):
            y_pred, _ = self.stateless_call(trainable, other, x)
            return self.loss(y, y_pred)

        loss, grads = jax.value_and_grad(loss_fn)(trainable)
        trainable = [w - 0.1 * g for w, g in zip(trainable, grads, strict=True)]
        return {"loss": loss}, (trainable, other, optimizer, metrics)


class BesideOptimizer(keras.Model):
    """A weight changed by hand beside an optimizer, and constant metrics."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.steps = keras.metrics.Sum(name="steps")
        self.features = keras.metrics.Mean(name="features")

    @property
    def metrics(self):
        return [self.steps, self.features]

    def train_step(self, state, data):
        trainable, other, optimizer, metrics = state
        x, y = data

        def loss_fn(trainable):
            y_pred, _ = self.stateless_call(trainable, other, x)
            return ops.mean(ops.square(y - y_pred))

        loss, grads = jax.value_and_grad(loss_fn)(trainable)
        by_hand = grads[0]
        grads = [ops.zeros_like(by_hand), *grads[1:]]
        trainable, optimizer = self.optimizer.stateless_apply(
            optimizer, grads, trainable
        )
        trainable = [trainable[0] - 0.1 * by_hand, *trainable[1:]]
        mapping = list(zip(self.metrics_variables, metrics, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            self.steps.update_state(0.5)
            self.features.update_state(ops.mean(x))
            logs = {m.name: m.result() for m in self.metrics}
        logs["loss"] = loss
        metrics = [scope.get_current_value(v) for v in self.metrics_variables]
        return logs, (trainable, other, optimizer, metrics)


class TrackedLoss(keras.Model):
    """The tutorial's pattern: own trackers, updated with scalars and rows."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.own_loss = keras.metrics.Mean(name="own_loss")
        self.own_mae = keras.metrics.MeanAbsoluteError(name="own_mae")

    @property
    def metrics(self):
        return [self.own_loss, self.own_mae]

    def _finish(self, mapping, loss, y, y_pred):
        with keras.StatelessScope(state_mapping=mapping) as scope:
            self.own_loss.update_state(loss)
            self.own_mae.update_state(y, y_pred)
            logs = {m.name: m.result() for m in self.metrics}
        logs["extra"] = loss * 2
        return logs, [
            scope.get_current_value(v) for v in self.metrics_variables
        ]

    def train_step(self, state, data):
        trainable, other, optimizer, metrics = state
        x, y = data

        def loss_fn(trainable):
            y_pred, _ = self.stateless_call(trainable, other, x)
            return ops.mean(ops.square(y - y_pred)), y_pred

        (loss, y_pred), grads = jax.value_and_grad(loss_fn, has_aux=True)(
            trainable
        )
        trainable, optimizer = self.optimizer.stateless_apply(
            optimizer, grads, trainable
        )
        mapping = list(zip(self.metrics_variables, metrics, strict=True))
        logs, metrics = self._finish(mapping, loss, y, y_pred)
        return logs, (trainable, other, optimizer, metrics)

    def test_step(self, state, data):
        trainable, other, metrics = state
        x, y = data
        y_pred, _ = self.stateless_call(trainable, other, x)
        loss = ops.mean(ops.square(y - y_pred))
        mapping = list(zip(self.metrics_variables, metrics, strict=True))
        logs, metrics = self._finish(mapping, loss, y, y_pred)
        return logs, (trainable, other, metrics)


class OwnComputeLoss(keras.Model):
    """`compute_loss` and `compute_metrics` overridden."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.error = keras.metrics.MeanSquaredError(name="error")

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, training=True
    ):
        return ops.mean(ops.square(y - y_pred)) + 0.1 * ops.mean(
            ops.abs(y_pred)
        )

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        self.error.update_state(y, y_pred)
        results["error"] = self.error.result()
        return results


class TwoOptimizers(keras.Model):
    """Two parts, two optimizers, two losses, as in a GAN."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second
        self.optimizers = {"first": keras.optimizers.SGD(0.1, momentum=0.9)}

    def build(self, input_shape):
        self.first.build(input_shape)
        self.second.build(self.first.compute_output_shape(input_shape))
        self.optimizers["first"].build(self.first.trainable_variables)
        self.slots = self.optimizers["first"].variables
        self.built = True

    def call(self, x):
        return self.second(self.first(x))

    @property
    def non_trainable_variables(self):
        own = super().non_trainable_variables
        known = {id(v) for v in own}
        slots = self.optimizers["first"].variables if self.built else []
        return own + [v for v in slots if id(v) not in known]

    def train_step(self, state, data):
        trainable, other, optimizer, metrics = state
        x, y = data
        count = len(self.first.trainable_variables)
        num_slots = len(self.optimizers["first"].variables)
        other, slots = other[:-num_slots], other[-num_slots:]

        def loss_fn(trainable):
            hidden, _ = self.first.stateless_call(trainable[:count], [], x)
            y_pred, _ = self.second.stateless_call(
                trainable[count:], [], hidden
            )
            return ops.mean(ops.square(y - y_pred))

        loss, grads = jax.value_and_grad(loss_fn)(trainable)
        first, slots = self.optimizers["first"].stateless_apply(
            slots, grads[:count], trainable[:count]
        )
        halfway, grads = jax.value_and_grad(loss_fn)(
            [*first, *trainable[count:]]
        )
        second, optimizer = self.optimizer.stateless_apply(
            optimizer, grads[count:], trainable[count:]
        )
        state = ([*first, *second], [*other, *slots], optimizer, metrics)
        return {"loss": loss, "halfway": halfway}, state


def rows_of(count, *shape, seed=0):
    """Seeded normal data."""
    random = np.random.default_rng(seed + 10 * count)
    return random.normal(size=(count, *shape)).astype("float32")


class SortedSteps(keras.layers.Layer):
    """Each feature's smallest step and its median."""

    def call(self, inputs):
        ordered = ops.sort(inputs, axis=1)
        return ordered[:, 0] + 2 * ops.median(inputs, axis=1)

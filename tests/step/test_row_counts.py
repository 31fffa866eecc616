"""Steps that compute with their number of rows, outside of the loss."""

import contextlib
import re
import warnings

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks
from keras_strategies.fit.binding import find_binding
from keras_strategies.step.lower_step import lower_step
from tests.support.combinations import combine, cover
from tests.support.plain_keras import assert_same, dense, mirrored

_random = np.random.default_rng(5)
X = _random.normal(size=(32, 3)).astype("float32")
Y = _random.normal(size=(32, 2)).astype("float32")


class Scaled(keras.optimizers.SGD):
    """Multiplies gradients by an attribute."""

    scale = 1.0

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * self.scale, variable, learning_rate)


class ScaledSum(keras.metrics.Metric):
    """A sum that is multiplied by an attribute."""

    scale = 1.0

    def __init__(self):
        super().__init__(name="scaled")
        self.total = self.add_weight(shape=(), initializer="zeros")

    def update_state(self, values):
        self.total.assign_add(ops.sum(values) * self.scale)

    def result(self):
        return self.total + 0.0


class Step(keras.Model):
    """A step with places at which subclasses compute with `x.shape[0]`."""

    def __init__(self, *middle):
        super().__init__()
        self.inner = keras.Sequential([keras.Input((3,)), *middle, dense(2)])
        self.tracker = keras.metrics.Mean(name="tracker")
        self.scaled = ScaledSum()
        self.built = True

    def call(self, x, training=None):
        return self.inner(x, training=training)

    def start(self, rows):
        pass

    def loss_of(self, x, y):
        return self.compute_loss(x, y, self(x, training=True))

    def gradients(self, grads, rows):
        return grads

    def slots(self, slots, rows):
        return slots

    def weights_before(self, weights, rows):
        return weights

    def logs(self, x, loss):
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}

    def apply(self, x, y, weights, others, slots):
        """Makes one update."""
        rows = x.shape[0]

        def loss_of(weights, others):
            mapping = [
                *zip(self.trainable_variables, weights, strict=True),
                *zip(self.non_trainable_variables, others, strict=True),
            ]
            with keras.StatelessScope(state_mapping=mapping) as scope:
                loss = self.loss_of(x, y)
                scaled = self.optimizer.scale_loss(loss)
            values = map(scope.get_current_value, self.non_trainable_variables)
            pairs = zip(values, others, strict=True)
            return scaled, (loss, [o if n is None else n for n, o in pairs])

        grad = jax.grad(loss_of, has_aux=True)
        grads, (loss, others) = grad(weights, others)
        weights, slots = self.optimizer.stateless_apply(
            self.slots(slots, rows),
            self.gradients(grads, rows),
            self.weights_before(weights, rows),
        )
        return loss, weights, others, slots

    def train_step(self, state, data):
        *state, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.start(x.shape[0])
        loss, *state = self.apply(x, y, *state)
        mapping = list(zip(self.metrics_variables, metrics, strict=True))
        with keras.StatelessScope(state_mapping=mapping) as scope:
            logs = self.logs(x, loss)
        metrics = [scope.get_current_value(v) for v, _ in mapping]
        pairs = zip(metrics, mapping, strict=True)
        new = [old if value is None else value for value, (_, old) in pairs]
        return logs, (*state, new)


class OptimizersAttribute(Step):
    def start(self, rows):
        self.optimizer.scale = 4.0 / rows


class Momentum(Step):
    def start(self, rows):
        self.optimizer.momentum = 4.0 / rows


class Decay(Step):
    def start(self, rows):
        self.optimizer.weight_decay = rows


class Clip(Step):
    def start(self, rows):
        self.optimizer.clipvalue = 1.0 / rows


class Gradients(Step):
    def gradients(self, grads, rows):
        return [g / rows for g in grads]


class ClippedGradients(Step):
    def gradients(self, grads, rows):
        return [ops.clip(g, -0.1, 0.1) * rows for g in grads]


class ClippedMeans(Step):
    """A mean that is a product by hand, and then multiplied by its rows."""

    def gradients(self, grads, rows):
        means = [g * rows / rows for g in grads]
        return [ops.clip(g, -0.1, 0.1) * rows for g in means]


class AddedToGradients(Step):
    def gradients(self, grads, rows):
        return [g + 0.01 * rows for g in grads]


class LearningRate(Step):
    def slots(self, slots, rows):
        iteration, rate, *others = slots
        return [iteration, rate * rows / 16, *others]


class Slot(Step):
    def apply(self, *args):
        loss, weights, others, slots = super().apply(*args)
        rows = args[0].shape[0]
        return (
            loss,
            weights,
            others,
            [*slots[:1], np.float32(1 / rows), *slots[2:]],
        )


class Weights(Step):
    def weights_before(self, weights, rows):
        return [w * (1 - 0.1 / rows) for w in weights]


class WeightsWithoutOptimizer(Step):
    def apply(self, x, y, weights, others, slots):
        loss, new, others, slots = super().apply(x, y, weights, others, slots)
        pairs = zip(weights, new, strict=True)
        new = [old + (n - old) * (8 / x.shape[0]) for old, n in pairs]
        return loss, new, others, slots


class Average(layers.Layer):
    """A moving average of the rows."""

    def build(self, shape):
        self.average = self.add_weight(name="average", trainable=False)

    def call(self, x):
        self.average.assign(self.changed(self.average, ops.mean(x), x.shape[0]))
        return x

    def changed(self, old, mean, rows):
        return 0.9 * old + 0.1 * mean


class AverageByRows(Average):
    def changed(self, old, mean, rows):
        return old * (1 - 1 / rows) + mean / rows


class Count(Average):
    def changed(self, old, mean, rows):
        return old + rows


class LayersState(Step):
    def __init__(self):
        super().__init__(AverageByRows())


class LayersCount(Step):
    def __init__(self):
        super().__init__(Count())


class OwnGradients(Step):
    """Computes means over the rows as gradients, without `jax.grad`."""

    def apply(self, x, y, weights, others, slots):
        kernel, bias = weights
        error = ops.matmul(x, kernel) + bias - y
        grads = self.average(ops.matmul(ops.transpose(x), error), error)
        weights, slots = self.update(grads, weights, slots)
        return ops.mean(ops.square(error)), weights, others, slots

    def average(self, product, error):
        return [product / error.shape[0], ops.mean(error, axis=0)]

    def update(self, grads, weights, slots):
        return self.optimizer.stateless_apply(slots, grads, weights)


class OwnSums(OwnGradients):
    """Computes sums over the rows."""

    def average(self, product, error):
        return [product / 16, ops.sum(error, axis=0) / 16]


class OwnMeansAndSums(OwnSums):
    def average(self, product, error):
        return [product / error.shape[0] + product / 160, ops.mean(error, 0)]


class OwnSumsInLoop(OwnGradients):
    def apply(self, x, y, weights, others, slots):
        kernel, bias = weights
        error = ops.matmul(x, kernel) + bias - y
        start = ops.zeros((3, 2)), ops.zeros(2)

        def add(sums, row):
            one, two = row
            return (sums[0] + ops.outer(one, two) / 16, sums[1] + two / 16), ()

        grads, _ = jax.lax.scan(add, start, (x, error))
        weights, slots = self.update(list(grads), weights, slots)
        return ops.mean(ops.square(error)), weights, others, slots


class ClippedOwnGradients(OwnGradients):
    def update(self, grads, weights, slots):
        clipped = [ops.clip(g, -0.1, 0.1) for g in grads]
        return super().update(clipped, weights, slots)


class ClippedOwnSums(ClippedOwnGradients, OwnSums):
    pass


class Square(Average):
    def changed(self, old, mean, rows):
        return 0.9 * old + 0.1 * ops.square(mean)


class LayersSquare(Step):
    def __init__(self):
        super().__init__(Square())


class OwnUpdates(OwnGradients):
    def update(self, grads, weights, slots):
        pairs = zip(weights, grads, strict=True)
        return [weight - 0.1 * grad for weight, grad in pairs], slots


class OwnUpdatesBySums(OwnUpdates, OwnSums):
    pass


class MetricDivided(Step):
    def start(self, rows):
        self.scaled.scale = 1 / rows

    def logs(self, x, loss):
        self.scaled.update_state(x[:, 0])
        return {"sum": self.scaled.result()}


class MetricMultiplied(MetricDivided):
    def start(self, rows):
        self.scaled.scale = float(rows)


class Log(Step):
    def logs(self, x, loss):
        return {"rows": ops.convert_to_tensor(float(x.shape[0]))}


class NumberInLogs(Step):
    def logs(self, x, loss):
        return {"rows": x.shape[0]}


COUNTING = [
    *(OptimizersAttribute, Momentum, Decay, Clip, Gradients),
    *(
        ClippedGradients,
        ClippedMeans,
        AddedToGradients,
        LearningRate,
        Slot,
        Weights,
    ),
    *(WeightsWithoutOptimizer, LayersState, LayersCount),
    *(MetricDivided, MetricMultiplied, Log, NumberInLogs),
    *(OwnSums, ClippedOwnSums, OwnMeansAndSums, OwnSumsInLoop),
    *(OwnUpdatesBySums, ClippedOwnGradients, LayersSquare),
]


def train(make, strategy, act):
    """Trains a model; its logs, its variables and the warnings."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        keras.utils.set_random_seed(0)
        model = make()
        model.compile(Scaled(0.1, momentum=0.5), "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logs = act(model)
    told = [str(w.message) for w in caught if "global batch" in str(w.message)]
    return (logs, model.get_weights()), told


def fit(model):
    options = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
    return model.fit(X, Y, **options).history


def train_on_batch(model):
    return [model.train_on_batch(X, Y, return_dict=True) for _ in range(2)]


def sharded(replicas):
    return ks.MirroredStrategy(
        [f"cpu:{i}" for i in range(replicas)],
        variable_partitioner=ks.experimental.FullySharded(min_size=1),
    )


@pytest.mark.parametrize(
    ("make", "make_strategy"), combine(COUNTING, [mirrored, sharded], every=4)
)
def test_a_step_that_counts_rows_is_that_of_one_device(make, make_strategy):
    plain, _ = train(make, None, fit)
    ours, told = train(make, make_strategy(2), fit)
    assert_same(plain, ours)
    (message,) = told
    assert re.search("depends on the number of rows|is not shown to", message)


@pytest.mark.parametrize("make_strategy", [mirrored, sharded])
def test_the_place_of_a_sum_is_reported(make_strategy):
    _, (message,) = train(ClippedOwnSums, make_strategy(2), train_on_batch)
    assert "at test_row_counts.py:" in message


@pytest.mark.parametrize("make_strategy", [mirrored, sharded])
def test_a_batch_of_a_step_that_counts_rows(make_strategy):
    plain, _ = train(OptimizersAttribute, None, train_on_batch)
    strategy = make_strategy(2)
    ours, told = train(OptimizersAttribute, strategy, train_on_batch)
    plain, ours = ([jax.tree.map(np.float32, one)] for one in (plain, ours))
    assert_same(plain, ours)
    (message,) = told
    assert "at test_row_counts.py:" in message


def test_a_replica_of_one_row():
    def act(model):
        return [
            model.train_on_batch(X[k : k + 2], Y[k : k + 2]) for k in (0, 2)
        ]

    plain, _ = train(OptimizersAttribute, None, act)
    ours, told = train(OptimizersAttribute, mirrored(2), act)
    for one, two in zip(plain[1], ours[1], strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5)
    assert len(told) == 1


# Steps that stay mapped.


class Linear(Step):
    """Two updates, whose loss is linear, so that gradients are constants."""

    def loss_of(self, x, y):
        return ops.mean(self(x)) - ops.mean(self(ops.square(x)))

    def apply(self, x, y, weights, others, slots):
        state = super().apply(x, y, weights, others, slots)
        return super().apply(x, y, *state[1:])


class Critic(Step):
    """A linear loss of rows and of noise."""

    def __init__(self, *middle):
        super().__init__(*middle)
        self.seeds = keras.random.SeedGenerator(3)

    def loss_of(self, x, y):
        noise = keras.random.normal(ops.shape(x), seed=self.seeds)
        return ops.mean(self(x)) - ops.mean(self(noise))


class Norms(Step):
    """Logs what it computes from gradients and rows."""

    def gradients(self, grads, rows):
        self.norms = [ops.sqrt(ops.sum(ops.square(g))) for g in grads]
        return grads

    def logs(self, x, loss):
        self.scaled.update_state(ops.mean(x, axis=1))
        return super().logs(x, loss) | {
            "norm": sum(self.norms) / len(self.norms),
            "mean": ops.mean(x),
            "spread": ops.std(x),
        }


class GradientsOfRows(Step):
    """Clips the gradients of each row."""

    def apply(self, x, y, weights, others, slots):
        def loss_of(weights, x, y):
            pairs = zip(self.trainable_variables, weights, strict=True)
            with keras.StatelessScope(state_mapping=list(pairs)):
                return ops.mean(ops.square(self(x[None]) - y[None]))

        compute = jax.vmap(jax.value_and_grad(loss_of), (None, 0, 0))
        rows, grads = compute(weights, x, y)
        grads = [ops.mean(ops.clip(g, -0.1, 0.1), axis=0) for g in grads]
        apply = self.optimizer.stateless_apply
        weights, slots = apply(slots, grads, weights)
        return ops.mean(rows), weights, others, slots


class SumOfLosses(Step):
    """Keras's own sum, which counts the rows of all replicas."""

    def loss_of(self, x, y):
        weight = ops.cast(x[:, 0] > 0, "float32")
        loss = keras.losses.MeanSquaredError(reduction="sum")
        mean = keras.losses.MeanSquaredError("mean_with_sample_weight")
        output = self(x)
        return loss(y, output, weight) / 16 + mean(y, output, weight)


OF_OWN_MEANS = [OwnGradients, OwnUpdates, GradientsOfRows, SumOfLosses]


class ConvolutionsOfRows(GradientsOfRows):
    """The gradients of a kernel for each row are convolutions in groups."""

    def __init__(self):
        super().__init__()
        self.inner = keras.Sequential(
            [
                keras.Input((3,)),
                layers.Reshape((3, 1)),
                layers.Conv1D(2, 2, kernel_initializer="ones"),
                layers.GlobalAveragePooling1D(),
            ]
        )


@pytest.mark.parametrize("replicas", [2, 3, 8])
def test_gradients_of_a_kernel_for_each_row_are_those_of_one_device(replicas):
    plain, _ = train(ConvolutionsOfRows, None, fit)
    ours, told = train(ConvolutionsOfRows, mirrored(replicas), fit)
    assert_same(plain, ours)
    assert not told


def with_layers():
    return Step(
        layers.Dense(4),
        Average(),
        layers.BatchNormalization(),
        layers.Dropout(0.5),
        layers.Dense(4, "relu", kernel_regularizer="l2"),
    )


def check_is_mapped(make, optimizer, make_strategy, rows=32, **compile_args):
    strategy = make_strategy(2)
    with strategy.scope(), warnings.catch_warnings():
        warnings.filterwarnings("error", ".*global batch instead")
        keras.utils.set_random_seed(0)
        model = make()
        model.compile(optimizer, "mse", **compile_args)
        build = find_binding(model).build_for_shapes
        lowered = lower_step(
            model, strategy.mesh, "train", (X[:rows], Y[:rows]), build
        )
    assert "whole" not in lowered.as_text()[:200]


def of_inner(**options):
    return keras.optimizers.Adam(0.1, **options)


OPTIMIZERS = {
    **{
        cls.__name__: cls
        for cls in vars(keras.optimizers).values()
        if isinstance(cls, type)
        and issubclass(cls, keras.optimizers.Optimizer)
        and cls is not keras.optimizers.Optimizer
        and cls.__name__ not in ("LossScaleOptimizer", "MultiOptimizer")
    },
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(of_inner()),
    "loss_scale_factor": lambda: of_inner(loss_scale_factor=8.0),
    "clipnorm": lambda: of_inner(clipnorm=0.5, weight_decay=0.1),
    "global_clipnorm": lambda: of_inner(global_clipnorm=0.5),
    "average": lambda: of_inner(use_ema=True, ema_overwrite_frequency=2),
    "accumulation": lambda: of_inner(gradient_accumulation_steps=2),
    "schedule": lambda: keras.optimizers.SGD(
        keras.optimizers.schedules.CosineDecay(0.1, 10)
    ),
    "scaled": lambda: Scaled(0.1, momentum=0.9),
}


@pytest.mark.parametrize(
    ("name", "make_strategy"),
    [
        # A penalty of weights is added to a share of a sum.
        ("loss_scale", mirrored),
        *combine(OPTIMIZERS, [mirrored, sharded], every=9),
    ],
)
def test_each_optimizer_of_an_own_step_is_mapped(name, make_strategy):
    check_is_mapped(with_layers, OPTIMIZERS[name](), make_strategy)


@pytest.mark.parametrize(
    ("middle", "name", "make_strategy"),
    cover([0, 1], ["Adam", "loss_scale", "accumulation"], [mirrored, sharded]),
)
def test_linear_losses_are_mapped(middle, name, make_strategy):
    check_is_mapped(
        lambda: Critic(*[layers.Dense(4, "relu")] * middle),
        OPTIMIZERS[name](),
        make_strategy,
    )


@pytest.mark.parametrize(
    ("name", "make_strategy"),
    cover(["Adam", "loss_scale"], [mirrored, sharded]),
)
def test_two_updates_are_mapped(name, make_strategy):
    check_is_mapped(Linear, OPTIMIZERS[name](), make_strategy)


@pytest.mark.parametrize("make_strategy", [mirrored, sharded])
def test_logs_of_gradients_and_rows_are_mapped(make_strategy):
    with pytest.warns(UserWarning, match="for the logs is not shown") as caught:
        check_is_mapped(Norms, OPTIMIZERS["Adam"](), make_strategy)
    assert len(caught) == 1


@pytest.mark.parametrize("rows", [2, 32])
@pytest.mark.parametrize("make", OF_OWN_MEANS)
def test_means_as_gradients_are_mapped(make, rows):
    check_is_mapped(make, OPTIMIZERS["Adam"](), mirrored, rows)


@pytest.mark.parametrize("make", OF_OWN_MEANS)
def test_means_as_gradients_are_those_of_one_device(make):
    plain, _ = train(make, None, fit)
    ours, told = train(make, mirrored(2), fit)
    assert_same(plain, ours)
    assert not told


@pytest.mark.parametrize(
    ("make", "rows", "make_strategy"),
    cover([with_layers, Linear, Critic], [2, 4], [mirrored, sharded]),
)
def test_few_rows_are_mapped(make, rows, make_strategy):
    check_is_mapped(make, OPTIMIZERS["Adam"](), make_strategy, rows)


class ForRows(layers.Layer):
    """Doubles its inputs for one number of rows, and else computes nothing."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def call(self, x):
        return 2.0 * x if x.shape[0] == self.rows else x


@pytest.mark.filterwarnings("ignore:This step runs:UserWarning")
@pytest.mark.parametrize(
    ("rows", "replicas"), [(2, 2), (3, 3), (4, 4), (12, 2)]
)
def test_a_layer_that_computes_only_for_the_rows_of_the_batch(rows, replicas):
    """One row a replica, and several."""
    found = []
    for strategy in (mirrored(replicas), ks.OneDeviceStrategy("CPU:0")):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential([layers.Dense(2), ForRows(rows)])
            model.compile("sgd", "mse")
        options = {"batch_size": rows, "shuffle": False, "verbose": 0}
        history = model.fit(X[:rows], Y[:rows], epochs=2, **options)
        found.append([history.history["loss"], *model.get_weights()])
    assert_same(*found)


class Derivative(layers.Layer):
    """An identity whose derivative is a function of the gradient."""

    def __init__(self, function, kind):
        super().__init__()
        self.function = function
        self.kind = kind

    def call(self, x):
        if self.kind == "forward":
            identity = jax.custom_jvp(jax.numpy.negative)
            identity.defjvps(lambda tangent, *_: -self.function(tangent))
        elif self.kind == "wrapped":
            identity = jax.custom_gradient(lambda x: (x, self.function))
        else:
            identity = jax.custom_vjp(ops.copy)
            identity.defvjp(
                lambda x: (x, None), lambda _, grad: (self.function(grad),)
            )
        if self.kind == "activation":
            return layers.Activation(identity)(x)
        return identity(x=x) if self.kind == "named" else identity(x)


DERIVATIVES = {
    "reversed": lambda gradient: -0.5 * gradient,
    "counted": lambda gradient: gradient * gradient.shape[0] / 32,
    "clipped": lambda gradient: ops.clip(gradient, -0.01, 0.01),
    "centered": lambda gradient: gradient - ops.mean(gradient, axis=0),
    "normalized": lambda gradient: gradient / ops.norm(gradient),
}


@pytest.mark.parametrize(
    ("name", "replicas", "make_strategy"),
    [
        *((name, 2, mirrored) for name in DERIVATIVES),
        ("counted", 8, mirrored),
        ("clipped", 4, sharded),
        ("centered forward", 2, mirrored),
        ("clipped wrapped", 2, mirrored),
        ("clipped activation", 2, mirrored),
        ("clipped named", 2, mirrored),
        ("reversed wrapped", 2, mirrored),
        ("reversed activation", 2, mirrored),
    ],
)
def test_derivatives_of_a_layer_are_those_of_one_device(
    name, replicas, make_strategy
):
    """A step of Keras, whose losses are means."""

    def make():
        function, *kind = name.split()
        middle = Derivative(DERIVATIVES[function], "".join(kind))
        return keras.Sequential([keras.Input((3,)), dense(4), middle, dense(2)])

    def act(model):
        return fit(model), model.train_on_batch(X[:8], Y[:8], return_dict=True)

    plain, _ = train(make, None, act)
    ours, told = train(make, make_strategy(replicas), act)
    assert_same(plain, ours)
    assert bool(told) is not name.startswith("reversed")

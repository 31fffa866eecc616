"""Steps in TensorFlow's form: `train_step(self, data)`, with a tape."""

import contextlib
import warnings

import jax
import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks
from tests.support.combinations import combine

RNG = np.random.default_rng(3)
X = RNG.normal(size=(24, 5)).astype("float32")
Y = RNG.normal(size=(24, 1)).astype("float32")


class InPlace(keras.Model):
    """A model whose steps have TensorFlow's form."""

    tracked = "loss"

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first = keras.layers.Dense(
            8, "tanh", activity_regularizer=keras.regularizers.L2(1e-3)
        )
        self.norm = keras.layers.BatchNormalization(synchronized=True)
        self.last = keras.layers.Dense(1, kernel_regularizer="l2")
        self.tracker = keras.metrics.Mean(name=self.tracked)

    @property
    def metrics(self):
        return [self.tracker]

    def call(self, x, training=None):
        return self.last(self.norm(self.first(x), training=training))

    def find_loss(self, x, y, output):
        if self.kind == "sum":
            return ops.sum((output - y) ** 2) / 8
        if self.kind == "mean":
            return ops.mean((output - y) ** 2)
        if self.kind == "parts":
            # Of more than two dimensions, as images have: divided by the
            # product of a shape.
            both = ops.stack([output, 2 * output], axis=1)
            return keras.losses.MeanSquaredError()(y[:, None], both)
        return self.compute_loss(x, y, output)

    def train_step(self, data):
        x, y = data
        with ks.GradientTape() as tape:
            loss = self.find_loss(x, y, self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        weights = self.trainable_variables
        gradients = tape.gradient(scaled, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.tracker.update_state(loss)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        x, y = data
        output = self(x, training=False)
        self.tracker.update_state(ops.mean((output - y) ** 2))
        return {"loss": self.tracker.result()}

    def predict_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        return self(x, training=False)


class Stateless(InPlace):
    """The same model with the steps of Keras for JAX."""

    tracked = "other"
    metrics = keras.Model.metrics
    train_step = keras.Model.train_step
    test_step = keras.Model.test_step
    predict_step = keras.Model.predict_step


def train(
    replicas, kind="mean", rows=24, cls=InPlace, partitioner=None, **options
):
    keras.utils.set_random_seed(1)
    strategy = ks.MirroredStrategy(
        devices=jax.devices()[:replicas], variable_partitioner=partitioner
    )
    with strategy.scope():
        model = cls(kind)
        model.compile(keras.optimizers.Adam(0.01), "mse", **options)
    data = X[:rows], Y[:rows]
    fits = [
        model.fit(*data, batch_size=8, epochs=2, verbose=0, shuffle=False)
        for _ in range(2)
    ]
    return (
        [fit.history["loss"] for fit in fits],
        model.get_weights(),
        model.evaluate(*data, batch_size=8, verbose=0, return_dict=True)[
            "loss"
        ],
        model.predict(data[0], batch_size=8, verbose=0),
    )


def compare(found, expected):
    jax.tree.map(
        lambda one, two: np.testing.assert_allclose(
            one, two, rtol=3e-5, atol=2e-6
        ),
        found,
        expected,
    )


@contextlib.contextmanager
def quiet():
    """Without the warning that a step runs over the global batch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This step runs over")
        yield


@pytest.mark.parametrize(
    ("kind", "rows", "replicas"),
    combine(["mean", "sum", "compute", "parts"], [24, 22], [2, 3, 8], every=4),
)
def test_equals_one_device(kind, rows, replicas):
    with quiet():
        compare(train(replicas, kind, rows), train(1, kind, rows))


def test_one_device_has_the_numbers_of_keras_own_steps():
    losses, weights, _, outputs = train(1, "compute")
    expected = train(1, "compute", cls=Stateless)
    compare((losses, weights, outputs), (*expected[:2], expected[3]))


@pytest.mark.parametrize("kind", ["mean", "compute"])
def test_equals_one_device_with_sharded_variables(kind):
    sharded = ks.experimental.FullySharded(min_size=1)
    compare(train(2, kind, partitioner=sharded), train(1, kind))


def test_equals_one_device_with_several_steps_in_an_execution():
    compare(train(2, steps_per_execution=3), train(1))


def test_a_mean_is_mapped_and_a_sum_is_not():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="This step runs over")
        train(2, "mean")
        train(2, "parts")
    with pytest.warns(UserWarning, match="runs over the global batch"):
        train(2, "sum")


def test_losses_are_scaled_in_half_precision():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        found = train(1, "compute")
        expected = train(1, "compute", cls=Stateless)
    finally:
        keras.config.set_dtype_policy("float32")
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-3)


def test_a_tape_in_an_eager_step_is_refused():
    with pytest.raises(RuntimeError, match="value_and_grad"):
        train(2, run_eagerly=True)


class EvaluatesWithTape(InPlace):
    def test_step(self, data):
        with ks.GradientTape() as tape:
            tape.watch(data[0])
        return {}


@pytest.mark.parametrize("run_eagerly", [True, False])
def test_a_tape_in_an_eager_evaluation_is_refused(run_eagerly):
    with ks.MirroredStrategy(devices=jax.devices()[:2]).scope():
        model = EvaluatesWithTape("mean")
        model.compile("sgd", "mse", run_eagerly=run_eagerly)
    if not run_eagerly:
        model.evaluate(X, Y, batch_size=8, verbose=0)
        return
    with pytest.raises(RuntimeError, match="value_and_grad"):
        model.evaluate(X, Y, batch_size=8, verbose=0)


class WithOtherVariable(InPlace):
    def __init__(self, kind):
        super().__init__(kind)
        self.hidden = (lambda variable: lambda: variable)(keras.Variable(0.0))

    def train_step(self, data):
        self.hidden().assign_add(1.0)
        return super().train_step(data)


def test_a_write_of_a_variable_that_is_not_the_models_is_refused():
    with pytest.raises(ValueError, match="must only write variables of its"):
        train(2, cls=WithOtherVariable)


class WithVariableInLogs(InPlace):
    def train_step(self, data):
        logs = super().train_step(data)
        return logs | {"rate": self.optimizer.learning_rate}


def test_logs_may_have_variables():
    with ks.MirroredStrategy(devices=jax.devices()[:2]).scope():
        model = WithVariableInLogs("mean")
        model.compile(keras.optimizers.Adam(0.01), "mse")
    fit = model.fit(X, Y, batch_size=8, verbose=0)
    np.testing.assert_allclose(fit.history["rate"], [0.01], rtol=1e-6)


class OfNeitherForm(InPlace):
    def train_step(self):
        return {}


class WithKeyword(InPlace):
    def train_step(self, data, *, rate):
        return {}


@pytest.mark.parametrize("cls", [OfNeitherForm, WithKeyword])
def test_a_step_of_neither_form_is_refused(cls):
    with pytest.raises(
        TypeError, match=r"must accept .*train_step\((data, \*, rate)?\)"
    ):
        train(2, cls=cls)


class CallsKeras(keras.Model):
    def __init__(self, kind):
        super().__init__()
        self.layer = keras.layers.Dense(1)

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        return super().train_step(data)


def test_a_call_of_keras_own_step_is_refused_with_the_fix():
    # A note of the error names the fix.
    with pytest.raises(TypeError, match=r"super\(\).train_step.*compute_loss"):
        train(2, cls=CallsKeras)


def test_a_call_of_a_step_of_the_same_form_is_none_of_keras():
    class Child(InPlace):
        def train_step(self, data):
            return super().train_step(data)

    compare(train(2, cls=Child), train(2))


class OfSeveralTasks(keras.Model):
    """MAML: each row is a task, whose inner step moves weights of its own."""

    def __init__(self, kind):
        super().__init__()
        self.kernel = self.add_weight(shape=(5, 1), initializer="ones")

    def call(self, x):
        return ops.matmul(x, self.kernel)

    def train_step(self, data):
        x, y = data
        rows = ops.shape(x)[0]
        with ks.GradientTape() as outer:
            kernels = ops.tile(self.kernel.value[None], (rows, 1, 1))
            with ks.GradientTape() as inner:
                inner.watch(kernels)
                errors = ops.einsum("ri,rio->ro", x, kernels) - y
                loss = ops.sum(errors**2)
            kernels -= 0.1 * inner.gradient(loss, kernels)
            errors = ops.einsum("ri,rio->ro", ops.tanh(x), kernels) - y
            loss = ops.mean(errors**2)
        weights = self.trainable_variables
        gradients = outer.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.metrics[0].update_state(loss)
        return self.get_metrics_result()


class WithActivationMaps(InPlace):
    """Grad-CAM: the loss has the maps of where the score comes from."""

    def train_step(self, data):
        x, y = data
        if not self.built:
            self(x)
        with ks.GradientTape() as outer:
            with ks.GradientTape() as inner:
                hidden = self.first(x)
                inner.watch(hidden)
                output = self.last(hidden)
            slopes = inner.gradient(output, hidden)
            maps = ops.tanh(ops.sum(slopes * hidden, axis=-1))
            loss = ops.mean((output - y) ** 2) + 0.1 * ops.mean(maps)
        weights = [*self.first.weights, *self.last.weights]
        gradients = outer.gradient(loss, weights)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


@pytest.mark.parametrize("cls", [OfSeveralTasks, WithActivationMaps])
def test_nested_tapes_are_mapped(cls):
    def fit(replicas):
        keras.utils.set_random_seed(1)
        with ks.MirroredStrategy(devices=jax.devices()[:replicas]).scope():
            model = cls("mean")
            model.compile(keras.optimizers.SGD(0.01), "mse")
        fit = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
        return fit.history["loss"], model.get_weights()

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="This step runs over")
        found = fit(2)
    compare(found, fit(1))

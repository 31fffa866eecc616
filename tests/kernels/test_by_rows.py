"""Parts of models that are marked with `ks.by_rows`."""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_strategies as ks
from tests.support.combinations import cover, some
from tests.support.plain_keras import mirrored
from tests.support.strategies import make_strategy

FEATURES, ROWS = 4, 24
_random = np.random.default_rng(0)
X = _random.normal(size=(ROWS, FEATURES)).astype("float32")
Y = _random.normal(size=(ROWS, FEATURES)).astype("float32")


def compute(fn, x, *others):
    """Computes a function in Python, of which a trace shows nothing."""

    def call(*arrays):
        return fn(*map(np.asarray, arrays))

    return jax.pure_callback(
        call, jax.ShapeDtypeStruct(x.shape, x.dtype), x, *others
    )


def make_multiply(scale=lambda x: 1.0, slope=lambda x: 1.0):
    """Makes a function of rows and weights: their product, in Python.

    Args:
      scale: A function of the rows by which the results are multiplied.
      slope: The same for the derivatives.
    """

    @jax.custom_vjp
    def multiply(x, weights):
        return compute(lambda x, w: x * w * np.float32(scale(x)), x, weights)

    def forward(x, weights):
        return multiply(x, weights), (x, weights)

    def backward(kept, cotangent):
        x, weights = kept
        x_gradient = compute(
            lambda c, w: c * w * np.float32(slope(c)), cotangent, weights
        )
        return x_gradient, jnp.sum(
            compute(lambda c, x: c * x, cotangent, x), axis=0
        )

    multiply.defvjp(forward, backward)
    return multiply


multiply = make_multiply()


class Scale(keras.layers.Layer):
    """Multiplies rows by weights, or by what is computed of them."""

    def __init__(self, fn=multiply):
        super().__init__()
        self.fn = fn

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        return self.fn(x, jnp.asarray(self.scale))

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


class Own(keras.Sequential):
    """Has a train step that differentiates by itself."""

    def train_step(self, state, data):
        weights, others, slots, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)

        def loss_of(weights):
            y_pred, _ = self.stateless_call(weights, others, x)
            return jnp.mean(jnp.square(y - y_pred))

        loss, gradients = jax.value_and_grad(loss_of)(weights)
        weights, slots = self.optimizer.stateless_apply(
            slots, gradients, weights
        )
        return {"loss": loss}, (weights, others, slots, metrics)


def train(layer, strategy, batch=12, make=keras.Sequential, **options):
    """Trains a model; its weights, and warnings of the global batch."""
    scope = strategy.scope() if strategy else contextlib.nullcontext()
    with scope:
        keras.utils.set_random_seed(0)
        model = make(
            [
                keras.Input((FEATURES,)),
                keras.layers.Dense(FEATURES, "tanh"),
                layer(),
                keras.layers.Dense(FEATURES),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, Y, batch_size=batch, epochs=2, shuffle=False, verbose=0)
    messages = [str(w.message) for w in caught]
    return model, [m for m in messages if "global batch" in m]


def check(layer, strategy, plain=Scale, **options):
    """Checks for one device's weights; returns the warnings."""
    expected, _ = train(plain, None, **options)
    model, messages = train(layer, strategy, **options)
    for one, other in zip(
        model.get_weights(), expected.get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=3e-5, atol=3e-5)
    return messages


def build_marked_function(fn=multiply):
    return Scale(ks.by_rows(fn))


@ks.by_rows
class Marked(Scale):
    pass


PLACES = {
    "function": build_marked_function,
    "class": Marked,
    "subclass": type("Subclass", (Marked,), {}),
    "layer": lambda: ks.by_rows(Scale()),
}


@pytest.mark.parametrize(
    "place", some(PLACES, {"function", "subclass", "layer"})
)
def test_a_marked_part_is_mapped(place):
    assert not check(PLACES[place], mirrored(2))


def test_without_a_mark_a_warning_names_the_primitive():
    (message,) = check(Scale, mirrored(2))
    assert "`pure_callback`" in message


@pytest.mark.parametrize(
    ("kind", "batch", "make"),
    cover(
        ["mirrored2", "mirrored3", "sharded2"],
        [12, 11],
        [Own, keras.Sequential],
    ),
)
def test_gradients_and_weights_are_those_of_one_device(kind, batch, make):
    strategy = make_strategy(kind)
    assert not check(Marked, strategy, batch=batch, make=make)


@pytest.mark.parametrize("batch", [12, 11])
def test_a_rematerialized_part_is_mapped(batch):
    with keras.RematScope(mode="full"):
        assert not check(Marked, mirrored(2), batch=batch)


def test_evaluate_and_predict():
    expected, _ = train(Scale, None)
    model, _ = train(Marked, mirrored(3))
    for batch in (12, 11):
        options = {"batch_size": batch, "verbose": 0}
        np.testing.assert_allclose(
            model.evaluate(X, Y, **options),
            expected.evaluate(X, Y, **options),
            rtol=3e-5,
        )
        np.testing.assert_allclose(
            *(m.predict(X, **options) for m in (model, expected)), rtol=3e-5
        )


def test_several_steps_in_one_execution():
    assert not check(Marked, mirrored(2), steps_per_execution=2)


def divide_by_captured_mean(x, weights):
    mean = x.mean(axis=0)
    return ks.by_rows(lambda x: multiply(x, weights + mean))(x)


def divide_by_captured_count(x, weights):
    count = 1.0 * len(x)
    return ks.by_rows(lambda x: multiply(x, weights) / count)(x)


def divide_by_count(x, weights):
    return MARKED(x, weights / len(x))


MARKED = ks.by_rows(multiply)
BESIDE = {
    "captured_mean": divide_by_captured_mean,
    "captured_count": divide_by_captured_count,
    "count": divide_by_count,
}


@pytest.mark.parametrize("name", some(BESIDE, {"captured_mean", "count"}))
def test_what_mixes_rows_outside_of_a_part_is_seen(name):
    fn = BESIDE[name]
    assert len(check(lambda: Scale(fn), mirrored(2), lambda: Scale(fn))) == 1


FALSE = {
    "the results": make_multiply(scale=np.mean),
    "the derivatives": make_multiply(slope=np.mean),
}


@pytest.mark.parametrize("found", FALSE)
@pytest.mark.parametrize("batch", [12, 11])
def test_a_false_mark_raises(found, batch):
    message = f"must compute each row by itself.*{found} of two halves"
    with pytest.raises(ValueError, match=message):
        train(lambda: Marked(FALSE[found]), mirrored(2), batch)


def test_a_part_of_a_fixed_number_of_rows_raises():
    def fn(x, weights):
        return multiply(x, weights) * jnp.ones((12, 1))

    with pytest.raises(ValueError, match=r"fails for 6 rows \(TypeError: mul"):
        train(lambda: build_marked_function(fn), mirrored(2))


def test_a_result_without_rows_raises():
    @ks.by_rows
    def total(x):
        return jnp.sum(x, axis=0)

    with pytest.raises(ValueError, match="a row for each of the"):
        train(lambda: Scale(lambda x, w: x * total(x) * w), mirrored(2))


class AddsLoss(Scale):
    def call(self, x):
        self.add_loss(jnp.mean(x))
        return super().call(x)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (keras.layers.Dropout, {"rate": 0.5}),
        (keras.layers.BatchNormalization, {}),
        (AddsLoss, {}),
    ],
)
def test_a_part_that_writes_raises(kind, options):
    marked = ks.by_rows(type("Writing", (kind,), {}))
    with pytest.raises(RuntimeError, match="must not write variables"):
        train(lambda: marked(**options), mirrored(2))


@pytest.mark.parametrize("part", ["name", keras.Variable(1.0), dict])
def test_other_parts_are_refused(part):
    with pytest.raises(TypeError, match="Pass a layer, or a function"):
        ks.by_rows(part)


def test_outside_of_steps_a_mark_changes_nothing():
    x = jnp.asarray(X)
    np.testing.assert_array_equal(MARKED(x, x[0]), multiply(x, x[0]))
    np.testing.assert_array_equal(Marked()(x), x)


@keras.saving.register_keras_serializable("tests")
class Registered(keras.layers.Layer):
    def call(self, x):
        return 2 * x


@pytest.mark.parametrize("kind", [keras.layers.Flatten, Registered])
def test_a_marked_layer_is_saved_as_its_class(tmp_path, kind):
    layer = ks.by_rows(kind())
    model = keras.Sequential([keras.Input((FEATURES,)), layer])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.layers[-1]) is type(layer) is kind

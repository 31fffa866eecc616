"""`run` with divided variables: what is captured, passed and made late."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks
from keras_strategies.testing import assert_replicated

KINDS = (ks.experimental.FullySharded, ks.experimental.SlotsOnly)


def dividing(count=4, kind=ks.experimental.FullySharded, **kwargs):
    return ks.MirroredStrategy(
        jax.devices()[:count],
        variable_partitioner=kind(min_size=1, **kwargs),
    )


def is_divided(variable):
    return not variable.value.sharding.is_fully_replicated


def mean(strategy, fn, *args):
    return float(strategy.reduce("mean", strategy.run(fn, args), axis=None))


@pytest.fixture(params=[{}, {"shards": 2}], ids=["all", "groups"])
def strategy(request):
    return dividing(**request.param)


@pytest.fixture
def kernel(strategy):
    with strategy.scope():
        layer = keras.layers.Dense(16)
        layer.build((None, 8))
    assert is_divided(layer.kernel)
    return layer.kernel


@pytest.mark.parametrize("copied", [False, True])
def test_a_captured_array_is_whole_to_the_function(strategy, kernel, copied):
    value = np.array(kernel)
    array = jnp.array(kernel.value, copy=True) if copied else kernel.value
    assert not array.sharding.is_fully_replicated

    def fn():
        return ops.sum(array * kernel)

    wanted = (value * value).sum()
    assert mean(strategy, fn) == pytest.approx(wanted, rel=1e-5)
    with strategy.debug():
        assert mean(strategy, fn) == pytest.approx(wanted, rel=1e-5)


def test_a_captured_array_that_is_indexed_is_refused(strategy, kernel):
    before, array = np.array(kernel), kernel.value

    def fn(array=None):
        kernel.assign(kernel * 2.0)
        return (captured["array"] if array is None else array)[0]

    captured = {"array": array}
    # JAX's own, of meshes.
    with pytest.raises(ValueError, match="mesh"):
        strategy.run(fn)
    np.testing.assert_array_equal(kernel, before)
    rows = strategy.run(fn, (array,))
    np.testing.assert_array_equal(rows.values[3], before[0])
    np.testing.assert_array_equal(kernel, 2 * before)


def test_a_functions_own_error_is_raised_whatever_it_captures(strategy):
    nest = {1: "keys of two kinds", "a": 2}

    def fn():
        if not nest:
            return unassigned
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        strategy.run(fn)
    unassigned = None
    with pytest.raises(ValueError, match="its own"):
        strategy.run(fn)


def test_arguments_that_are_divided_are_whole_to_the_function(strategy, kernel):
    value = np.array(kernel)

    def fn(arrays):
        return ops.sum(arrays["kernel"] * kernel)

    wanted = pytest.approx((value * value).sum(), rel=1e-5)
    assert mean(strategy, fn, {"kernel": kernel.value}) == wanted
    assert mean(strategy, fn, {"kernel": kernel}) == wanted
    with strategy.debug():
        assert mean(strategy, fn, {"kernel": kernel.value}) == wanted


def test_a_variable_is_written_to_a_reference(strategy, kernel):
    with strategy.scope():
        other = keras.layers.Dense(8)
        other.build((None, 16))

    def fn():
        reference = jax.new_ref(jnp.zeros((8, 16)))
        reference[...] = kernel.value
        return ops.sum(other.kernel.value @ reference[...])

    wanted = (np.array(other.kernel) @ np.array(kernel)).sum()
    assert mean(strategy, fn) == pytest.approx(wanted, rel=1e-5, abs=1e-5)


def test_a_loss_with_captured_weights_gives_one_devices_gradients(
    strategy, kernel
):
    first = np.array(kernel)
    target = kernel.value
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.25)

    def step():
        def loss():
            # Twice the same array, but one of them is a constant.
            return ops.sum(kernel * target) / 4

        value, grads = ks.value_and_grad(loss, [kernel])()
        optimizer.apply(grads, [kernel])
        return value

    for steps in (1, 2):
        strategy.run(step)
        np.testing.assert_allclose(
            kernel, (1 - 0.25 * steps) * first, rtol=1e-5, atol=1e-6
        )
        assert is_divided(kernel)
    # The step has not taken it.
    np.testing.assert_array_equal(target, first)
    assert_replicated(kernel)


class Distilled(keras.Model):
    """Its loss compares outputs with those of weights that it was given."""

    def __init__(self):
        super().__init__()
        kernel = keras.initializers.GlorotUniform(3)
        self.dense = keras.layers.Dense(16, kernel_initializer=kernel)
        self.given = {}

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
        error = y_pred - 0.5 * ops.matmul(x, self.given["kernel"])
        return ops.mean(ops.mean(ops.square(error), -1))


def test_fit_with_captured_weights():
    x = np.random.default_rng(0).normal(size=(22, 8)).astype("float32")
    losses = []
    for strategy in (None, dividing()):
        model = Distilled()
        if strategy is not None:
            strategy.attach(model)
        model.compile(keras.optimizers.SGD(0.1), None)
        model.predict(x[:8], verbose=0)
        kernel = model.dense.kernel
        assert is_divided(kernel) == (strategy is not None)
        # Keras's own step would take it from its variable.
        given = jnp.copy(kernel.value) if strategy is None else kernel.value
        object.__setattr__(model, "given", {"kernel": given})
        # The last batch of six cannot be shared evenly.
        history = model.fit(
            x, x, batch_size=8, epochs=2, shuffle=False, verbose=0
        )
        losses.append([*history.history["loss"], *np.ravel(kernel)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4, atol=1e-6)
    assert is_divided(kernel)


# Made late.


def test_variables_that_a_later_call_makes_are_divided(strategy):
    made = {}

    def fn(count):
        total = 0.0
        for index in range(count):
            if index not in made:
                made[index] = keras.Variable(np.arange(8.0) + index)
            made[index].assign_add(ops.ones(8))
            total = total + ops.sum(made[index])
        return total

    assert mean(strategy, fn, 1) == 36
    assert mean(strategy, fn, 2) == 44 + 44
    for index, variable in made.items():
        assert is_divided(variable)
        np.testing.assert_array_equal(
            variable, np.arange(8.0) + index + 2 - index
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["in the scope", "outside", "in run"])
def test_an_optimizers_slots_are_divided_wherever_it_is_built(kind, where):
    strategy = dividing(4, kind)
    with strategy.scope():
        layer = keras.layers.Dense(16, kernel_initializer="ones")
        layer.build((None, 8))
        optimizer = keras.optimizers.Adam(0.1)
        if where == "in the scope":
            optimizer.build(layer.trainable_variables)
    if where == "outside":
        optimizer.build(layer.trainable_variables)

    def step():
        def loss():
            return ops.mean(ops.square(layer(ops.ones((2, 8)))))

        value, grads = ks.value_and_grad(loss, layer.trainable_variables)()
        optimizer.apply(grads, layer.trainable_variables)
        return value

    for _ in range(2):
        strategy.run(step)
        slots = [v for v in optimizer.variables if v.shape]
        assert len(slots) == 4
        assert all(map(is_divided, slots))
    assert_replicated(layer.kernel, *optimizer.variables)


class Growing(keras.Model):
    """Makes a layer in a later call than its first ones."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(16)
        self.later = None
        self.grows = False

    def call(self, x):
        if self.grows and self.later is None:
            self.later = keras.layers.Dense(16)
        return (self.later or self.first)(x)


def test_a_layer_that_a_later_step_makes_is_refused():
    strategy = dividing()
    x = np.ones((8, 16), "float32")
    with strategy.scope():
        model = Growing()
        model.compile("sgd", "mse")
    model.fit(x, x, batch_size=8, verbose=0)
    before = model.get_weights()
    model.grows = True
    with pytest.raises(ValueError, match="cannot add new elements of state"):
        model.fit(x[:4], x[:4], batch_size=4, verbose=0)
    for got, want in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(got, want)
    assert is_divided(model.first.kernel)
    model.grows = False
    model.fit(x, x, batch_size=8, verbose=0)

"""An optimizer's update is traced once, however often its step is."""

import warnings

import jax
import keras
import numpy as np
import pytest
from keras import layers

import keras_strategies as ks
from tests.support.combinations import combine

_random = np.random.default_rng(3)
X = _random.normal(size=(8, 4)).astype("float32")
Y = _random.normal(size=(8, 4)).astype("float32")


class Counting(keras.optimizers.SGD):
    """Counts the traces of its updates of matrices."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.traced = []

    def update_step(self, gradient, variable, learning_rate):
        if len(variable.shape) == 2:
            self.traced.append(variable.path)
        super().update_step(gradient, variable, learning_rate)


class Own(layers.Dense):
    """Is traced again with other numbers of rows, as user-defined code is."""

    def call(self, x, training=None):
        return super().call(x) * 2


class Twice(keras.Model):
    """A model whose second loss depends on the first update."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = Own(4), 0
        self.layer.build((None, 4))
        self.built = True

    def call(self, x):
        return self.layer(x)

    def train_step(self, state, data):
        weights, others, slots, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.calls += 1

        def loss_of(values):
            mapping = zip(self.trainable_variables, values, strict=True)
            with keras.StatelessScope(state_mapping=mapping):
                return self.compute_loss(x, y, self(x))

        for _ in range(2):
            loss, grads = jax.value_and_grad(loss_of)(weights)
            weights, slots = self.optimizer.stateless_apply(
                slots, grads, weights
            )
        return {"loss": loss}, (weights, others, slots, metrics)


def fit(make, *, replicas, is_sharded=True):
    partitioner = ks.experimental.FullySharded(min_size=1)
    strategy = ks.MirroredStrategy(
        [f"cpu:{i}" for i in range(replicas)],
        variable_partitioner=partitioner if is_sharded else None,
    )
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = make()
        model.compile(Counting(0.1, momentum=0.9), "mse")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(X, Y, batch_size=4, epochs=1, shuffle=False, verbose=0)
    warned = [w for w in caught if "global batch" in str(w.message)]
    return model, [np.asarray(v) for v in model.variables], len(warned)


def chain():
    return keras.Sequential([keras.Input((4,)), Own(4), Own(4)])


@pytest.mark.parametrize(
    ("make", "replicas"), combine([chain, Twice], [2, 4], every=2)
)
def test_an_update_is_traced_once(make, replicas):
    model, found, warned = fit(make, replicas=replicas)
    assert not warned
    assert make is chain or model.calls > 1
    assert len(model.optimizer.traced) == 2
    _, wanted, _ = fit(make, replicas=1, is_sharded=False)
    jax.tree.map(lambda *a: np.testing.assert_allclose(*a, 1e-5), found, wanted)


class Tells(keras.optimizers.SGD):
    """Returns the norm of the gradients, which are reduced."""

    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)
        return {"norm": keras.ops.norm(grads[0])}


@pytest.mark.parametrize("is_sharded", [False, True])
def test_an_optimizer_returns_what_its_method_returns(is_sharded):
    partitioner = ks.experimental.FullySharded(min_size=1)
    strategy = ks.MirroredStrategy(
        ["cpu:0", "cpu:1"],
        variable_partitioner=partitioner if is_sharded else None,
    )
    with strategy.scope():
        weight = keras.Variable(np.ones(4, "float32"))
        optimizer = Tells(0.1)
        optimizer.build([weight])
    results = strategy.run(
        lambda: optimizer.apply([np.ones(4, "float32")], [weight])
    )
    norms = strategy.experimental_local_results(results)
    assert [float(norm["norm"]) for norm in norms] == [4.0, 4.0]
    np.testing.assert_allclose(weight, np.full(4, 0.8), rtol=1e-6)

"""`model.losses` in a function given to `run`: as plain Keras on its rows."""

import contextlib

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks
from tests.support.combinations import combine, few
from tests.support.plain_keras import assert_same, mirrored

X = np.random.default_rng(5).normal(size=(12, 3)).astype("float32")


class AddLoss(keras.layers.Layer):
    """Adds two losses in each call."""

    def call(self, x):
        self.add_loss(ops.mean(x))
        self.add_loss(0.5 * ops.sum(ops.square(x)))
        return x


class Subclassed(keras.Model):
    """Calls a nested model twice, and adds a loss of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def call(self, x):
        y = self.inner(self.inner(x))
        self.add_loss(ops.sum(y))
        return y


def build():
    keras.utils.set_random_seed(2)
    inputs = keras.Input((3,))
    x = keras.layers.Dense(
        3,
        kernel_regularizer=keras.regularizers.L2(0.1),
        activity_regularizer=keras.regularizers.L1(0.01),
    )(inputs)
    nested = keras.Sequential([keras.Input((3,)), AddLoss()])
    outer = Subclassed(keras.Model(inputs, nested(x)))
    outer(X[:2])
    return outer


def total(model):
    return ops.sum(ops.stack([ops.convert_to_tensor(v) for v in model.losses]))


# Functions of a model and a replica's rows.


def one_call(model, x):
    model(x)
    return [ops.convert_to_tensor(v) for v in model.losses]


def several_calls(model, x):
    model(x)
    first = total(model)
    model(2 * x)
    model.inner(x)
    return first, total(model)


def where_replicas_meet(model, x):
    """In debug mode the others call the model before the losses are read."""
    model(x)
    if context := ks.get_replica_context():
        context.all_reduce("sum", jnp.ones(()))
    return total(model)


def in_the_gradient(model, x):
    def loss():
        return ops.mean(model(x)) + total(model)

    value, grads = ks.value_and_grad(loss, model.trainable_variables)()
    return value, grads, total(model)


def in_a_nested_gradient(model, x):
    variables = model.trainable_variables

    def loss():
        value, _ = ks.value_and_grad(
            lambda: ops.mean(model(x)) + total(model), variables
        )()
        return value - total(model) + total(model)

    value, grads = ks.value_and_grad(loss, variables)()
    return value, grads, total(model)


def before_the_gradient(model, x):
    y = model(x)
    variables = model.trainable_variables
    loss = ks.value_and_grad(lambda: ops.mean(y) + total(model), variables)
    return loss()[0], total(model)


def in_a_gradient_of_jax(model, x):
    def loss(x):
        model(x)
        return total(model)

    return jax.value_and_grad(loss)(x)


def in_a_loop(model, x):
    def body(carry, row):
        model(row[None])
        return carry + total(model), None

    return jax.lax.scan(body, jnp.zeros(()), x)[0]


def unread_after_a_loop(model, x):
    def loss():
        return ops.sum(jax.lax.map(lambda row: model(row[None]), x))

    return ks.value_and_grad(loss, model.trainable_variables)()[0]


def around_a_loop_of_gradients(model, x):
    """Losses of a call before a loop outlive the gradients in it."""
    model(x)

    def loss():
        def body(carry, row):
            value = ks.value_and_grad(
                lambda: ops.sum(row) * ops.sum(model.weights[0]),
                model.trainable_variables,
            )()[0]
            return carry + value, None

        return jax.lax.scan(body, jnp.zeros(()), x)[0]

    ks.value_and_grad(loss, model.trainable_variables)()
    return total(model)


# The same of plain Keras.


def value_and_losses(model, x):
    """The value, the gradients and the losses, in Keras's own scope."""
    variables = model.trainable_variables

    def loss(values):
        mapping = zip(variables, values, strict=True)
        with keras.StatelessScope(mapping, collect_losses=True):
            y = model(x)
            return ops.mean(y) + total(model), total(model)

    values = [v.value for v in variables]
    (value, losses), grads = jax.value_and_grad(loss, has_aux=True)(values)
    return value, grads, losses


PLAIN = {
    in_the_gradient: value_and_losses,
    in_a_nested_gradient: value_and_losses,
    before_the_gradient: lambda *args: value_and_losses(*args)[::2],
    around_a_loop_of_gradients: lambda *args: value_and_losses(*args)[2],
    unread_after_a_loop: lambda model, x: ops.sum(model(x)),
}
FUNCTIONS = [
    *(one_call, several_calls, where_replicas_meet, in_the_gradient),
    *(in_a_nested_gradient, before_the_gradient, in_a_gradient_of_jax),
    *(in_a_loop, around_a_loop_of_gradients, unread_after_a_loop),
]
each_function = pytest.mark.parametrize(
    "fn", FUNCTIONS, ids=lambda fn: fn.__name__
)


def in_run(strategy, fn, rows, *, debug=False):
    """What each replica returned, in a second call, and its rows."""
    with strategy.scope():
        model = build()
    data = next(iter(strategy.experimental_distribute_dataset(iter([rows]))))
    with strategy.debug() if debug else contextlib.nullcontext():
        for _ in range(2):
            result = strategy.run(lambda x: fn(model, x), args=(data,))
    assert not any(layer._losses for layer in model._flatten_layers())
    of_all = strategy.experimental_local_results
    leaves, structure = jax.tree.flatten(
        result, is_leaf=lambda leaf: isinstance(leaf, ks.DistributedValues)
    )
    columns = zip(*map(of_all, leaves), strict=True)
    results = [jax.tree.unflatten(structure, column) for column in columns]
    return results, list(map(np.asarray, of_all(data)))


def check(strategy, fn, rows, **kwargs):
    results, parts = in_run(strategy, fn, rows, **kwargs)
    assert len(results) == strategy.num_replicas_in_sync
    for ours, part in zip(results, parts, strict=True):
        plain = PLAIN.get(fn, fn)(build(), jnp.asarray(part))
        assert_same(plain, ours, tolerance=1e-4)


@pytest.mark.parametrize(
    "fn", combine(FUNCTIONS, every=2), ids=lambda fn: fn.__name__
)
def test_losses_in_run(fn):
    check(mirrored(2), fn, X[:4])


@pytest.mark.parametrize(
    "strategy",
    combine([mirrored(4), mirrored(3), ks.OneDeviceStrategy("CPU:1")], every=3),
    ids=["uneven", "three", "one device"],
)
def test_losses_on_other_replicas(strategy):
    check(strategy, in_the_gradient, X[:6])


@pytest.mark.parametrize(
    ("fn", "rows"),
    few(
        [
            (several_calls, 4),
            (where_replicas_meet, 4),
            (in_the_gradient, 4),
            (one_call, 3),
            (one_call, 1),
        ],
        every=4,
    ),
)
def test_losses_in_debug_mode(fn, rows):
    check(mirrored(2), fn, X[:rows], debug=True)


@pytest.mark.parametrize(
    "fn",
    # Losses of a call outside of any scope are not seen in a gradient.
    combine([fn for fn in FUNCTIONS if fn is not before_the_gradient], every=3),
    ids=lambda fn: fn.__name__,
)
def test_losses_without_a_strategy(fn):
    plain = PLAIN.get(fn, fn)(build(), jnp.asarray(X))
    assert_same(plain, fn(build(), jnp.asarray(X)), tolerance=1e-4)


@pytest.mark.parametrize(
    "debug", combine([False, True], every=2), ids=["compiled", "debug"]
)
def test_losses_are_not_those_of_an_earlier_call(debug):
    strategy = mirrored(2)
    with strategy.scope():
        model = build()

    def step(is_called):
        if is_called:
            model(jnp.ones((2, 3)))
        return len(model.losses)

    with strategy.debug() if debug else contextlib.nullcontext():
        assert [strategy.run(step, args=(flag,)) for flag in (True, False)] == [
            8,
            1,
        ]
        assert len(model.losses) == 1

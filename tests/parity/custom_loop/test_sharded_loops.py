"""Custom loops on replicas that divide variables: the replicated numbers.

A step of one's own sees whole weights and gradients, whatever it does with
them before and after an optimizer is applied.
"""

import contextlib

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.support.combinations import combine
from tests.support.strategies import SHARDED, make_strategy

ops = keras.ops
GLOBAL = 8


def make_model(optimizer):
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(24, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(8, activation="tanh", use_bias=False),
            keras.layers.Dense(3),
        ]
    )
    optimizer.build(model.trainable_variables)
    return model


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def adam():
    return keras.optimizers.Adam(0.01, epsilon=0.01)


def scaled():
    return keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=64.0)


def loss_of(model, x, y, training=False):
    # Statistics of BatchNormalization are a replica's own in training.
    error = ops.square(model(x, training=training) - y)
    return ops.sum(ops.mean(error, -1)) / GLOBAL


def compute_gradients(model, x, y, fn=loss_of):
    weights = model.trainable_variables
    return ks.value_and_grad(lambda: fn(model, x, y), weights)()


def plain(model, optimizer, x, y):
    loss, grads = compute_gradients(model, x, y)
    optimizer.apply(grads, model.trainable_variables)
    return loss


def stateless(model, optimizer, x, y):
    weights = model.trainable_variables
    loss, grads = compute_gradients(model, x, y)
    new, slots = optimizer.stateless_apply(
        [v.value for v in optimizer.variables],
        grads,
        [v.value for v in weights],
    )
    for variable, value in zip(
        [*weights, *optimizer.variables], [*new, *slots], strict=True
    ):
        variable.assign(value)
    return loss


def clipped_by_hand(model, optimizer, x, y):
    loss, grads = compute_gradients(model, x, y)
    norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in grads))
    assert all(
        g.shape == v.shape
        for g, v in zip(grads, model.trainable_variables, strict=True)
    )
    grads = [g * ops.minimum(1.0, 0.05 / norm) for g in grads]
    optimizer.apply(grads, model.trainable_variables)
    return loss


def reduced_by_hand(model, optimizer, x, y):
    loss, grads = compute_gradients(model, x, y)
    context = ks.get_replica_context()
    grads = context.all_reduce("sum", grads)
    norm = ops.sqrt(sum(ops.sum(ops.square(g)) for g in grads))
    replicas = context.num_replicas_in_sync
    factor = ops.minimum(1.0, 0.1 / norm) / replicas
    optimizer.apply([g * factor for g in grads], model.trainable_variables)
    return loss


def with_l2(model, optimizer, x, y):
    def loss(model, x, y):
        count = ks.get_replica_context().num_replicas_in_sync
        l2 = sum(ops.sum(ops.square(v)) for v in model.trainable_variables)
        return loss_of(model, x, y) + 0.01 * l2 / count

    loss, grads = compute_gradients(model, x, y, loss)
    optimizer.apply(grads, model.trainable_variables)
    return loss


def with_gradient_penalty(model, optimizer, x, y):
    def loss(model, x, y):
        slope = jax.grad(lambda x: ops.sum(model(x)))(x)
        return loss_of(model, x, y) + ops.sum(ops.square(slope)) / GLOBAL

    loss, grads = compute_gradients(model, x, y, loss)
    optimizer.apply(grads, model.trainable_variables)
    return loss


def sharpness_aware(model, optimizer, x, y):
    weights = model.trainable_variables
    context = ks.get_replica_context()
    _, grads = compute_gradients(model, x, y)
    grads = context.all_reduce("sum", grads)
    before = [v.value for v in weights]
    for variable, grad in zip(weights, grads, strict=True):
        variable.assign_add(0.05 * grad)
    loss, grads = compute_gradients(model, x, y)
    for variable, value in zip(weights, before, strict=True):
        variable.assign(value)
    optimizer.apply(grads, weights)
    return loss


def applied_twice(model, optimizer, x, y):
    plain(model, optimizer, x, y)
    return plain(model, optimizer, x, y)


def read_and_assigned_after(model, optimizer, x, y):
    loss = plain(model, optimizer, x, y)
    weight = model.trainable_variables[0]
    size = ops.sum(ops.abs(weight))
    weight.assign(ops.clip(weight, -0.3, 0.3))
    context = ks.get_replica_context()
    return loss + size / context.num_replicas_in_sync


def in_merge_call(model, optimizer, x, y):
    loss, grads = compute_gradients(model, x, y)

    def merge(strategy, grads):
        for variable, grad in zip(
            model.trainable_variables, grads, strict=True
        ):
            total = strategy.extended.reduce_to("sum", grad, variable)
            strategy.extended.update(
                variable, lambda v, g: v.assign_sub(0.1 * g), args=(total,)
            )

    ks.get_replica_context().merge_call(merge, args=(grads,))
    return loss


def in_a_branch(model, optimizer, x, y):
    loss, grads = compute_gradients(model, x, y)
    weights = model.trainable_variables
    before = [v.value for v in (*weights, *optimizer.variables)]
    new = jax.lax.cond(
        jnp.bool_(True),
        lambda grads: optimizer.stateless_apply(
            before[len(weights) :], grads, before[: len(weights)]
        ),
        lambda grads: (before[: len(weights)], before[len(weights) :]),
        grads,
    )
    for variable, value in zip(
        [*weights, *optimizer.variables], [*new[0], *new[1]], strict=True
    ):
        variable.assign(value)
    return loss


def compiled_inside(model, optimizer, x, y):
    loss, grads = jax.jit(lambda x, y: compute_gradients(model, x, y))(x, y)
    optimizer.apply(grads, model.trainable_variables)
    return loss


def rematerialized(model, optimizer, x, y):
    hidden, rest = model.layers[0], model.layers[1:]

    def loss(model, x, y):
        value = jax.checkpoint(lambda x: hidden(x))(x)
        for layer in rest:
            value = layer(value)
        return ops.sum(ops.mean(ops.square(value - y), -1)) / GLOBAL

    loss, grads = compute_gradients(model, x, y, loss)
    optimizer.apply(grads, model.trainable_variables)
    return loss


def through_a_reference(model, optimizer, x, y):
    loss, grads = compute_gradients(model, x, y)
    factor = jax.new_ref(jnp.ones(()))
    factor[...] = 0.5 * factor[...]
    grads = [g * factor[...] for g in grads]
    optimizer.apply(grads, model.trainable_variables)
    return loss


STEPS = {
    fn.__name__: fn
    for fn in (
        *(plain, stateless, clipped_by_hand, reduced_by_hand, with_l2),
        *(with_gradient_penalty, sharpness_aware, applied_twice),
        *(read_and_assigned_after, in_merge_call, in_a_branch),
        *(compiled_inside, rematerialized, through_a_reference),
    )
}
# Of a replica's own gradients: no step of one device does the same.
_PER_REPLICA = {"clipped_by_hand"}
OPTIMIZERS = {"sgd": sgd, "adam": adam, "scaled": scaled}


def train(name, step, optimizer, rows=(GLOBAL,), debug=False):
    strategy = make_strategy(name)
    with strategy.scope():
        optimizer = OPTIMIZERS[optimizer]()
        model = make_model(optimizer)
    variables = [*model.variables, *optimizer.variables]
    placed = [v.value.sharding for v in variables]
    rng = np.random.default_rng(5)
    losses = []
    for k in range(4):
        count = rows[k % len(rows)]
        x = rng.normal(size=(GLOBAL, 6)).astype("float32")[:count]
        y = np.tanh(x[:, :3])
        batch = _make_global_batch(strategy, x, y)
        with strategy.debug() if debug else contextlib.nullcontext():
            per_replica = strategy.run(
                lambda x, y: STEPS[step](model, optimizer, x, y), batch
            )
        losses.append(float(strategy.reduce("sum", per_replica, axis=None)))
    assert_replicated(*variables)
    if name.startswith("sharded"):
        assert any(not sharding.is_fully_replicated for sharding in placed)
    for variable, sharding in zip(variables, placed, strict=True):
        value = variable.value
        assert value.sharding.is_equivalent_to(sharding, value.ndim)
    return losses, [np.asarray(v.value) for v in variables]


def _make_global_batch(strategy, x, y):
    make = strategy.experimental_distribute_values_from_function
    count = strategy.num_replicas_in_sync
    own = [np.array_split(a, count) for a in (x, y)]
    return tuple(
        make(lambda context, of=of: of[context.replica_id_in_sync_group])
        for of in own
    )


def assert_same(actual, wanted, tolerance=1e-5):
    for got, want in zip(
        jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("step", combine(STEPS, every=4))
def test_equals_one_device(step):
    wanted = "mirrored4" if step in _PER_REPLICA else "one"
    expected = train(wanted, step, "sgd")
    assert_same(train("sharded4", step, "sgd"), expected)


@pytest.mark.parametrize("optimizer", ["adam", "scaled"])
def test_other_optimizers(optimizer):
    assert_same(
        train("sharded4", "plain", optimizer), train("one", "plain", optimizer)
    )


@pytest.mark.parametrize(
    "step", combine(["plain", "read_and_assigned_after"], every=2)
)
def test_other_rows_on_each_replica(step):
    rows = (7, 3, 5)
    assert_same(
        train("sharded4", step, "sgd", rows), train("one", step, "sgd", rows)
    )


def test_calls_of_python_after_the_update():
    strategy = make_strategy("sharded4")
    with strategy.scope():
        optimizer = sgd()
        model = make_model(optimizer)
    seen = []

    def step(x, y):
        loss = plain(model, optimizer, x, y)
        kernel = model.layers[0].kernel
        jax.debug.callback(lambda v: seen.append(float(v)), ops.sum(kernel))
        return loss

    rows = np.ones((GLOBAL, 6), "float32")
    strategy.run(step, _make_global_batch(strategy, rows, rows[:, :3]))
    jax.effects_barrier()
    wanted = float(np.sum(model.layers[0].kernel.numpy()))
    np.testing.assert_allclose(seen, [wanted] * 4, rtol=1e-5)


@pytest.mark.slow
def test_debug():
    wanted = train("one", "plain", "sgd")
    assert_same(train("sharded4", "plain", "sgd", debug=True), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHARDED)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("step", STEPS)
def test_every_step_everywhere(step, optimizer, name):
    count = make_strategy(name).num_replicas_in_sync
    wanted = f"mirrored{count}" if step in _PER_REPLICA else "one"
    # Replicas that meet in a branch need equally many rows, divided or not.
    left_over = GLOBAL % count if step == "in_a_branch" else 0
    rows = (GLOBAL - left_over,)
    assert_same(
        train(name, step, optimizer, rows),
        train(wanted, step, optimizer, rows),
    )

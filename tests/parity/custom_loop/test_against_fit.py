"""Loops of one's own give fit's numbers: weights, statistics, masks, metrics.

Batches that the replicas share evenly: of others fit computes Batch-
Normalization and Dropout over the whole batch (docs/parity.md).
"""

import gc

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.support.combinations import few
from tests.support.plain_keras import mirrored

STEPS = 20
_random = np.random.default_rng(0)


def data(replicas):
    rows = 4 * replicas * STEPS
    random = np.random.default_rng(replicas)
    x = random.normal(size=(rows, 6)).astype("float32")
    return x, random.integers(0, 3, rows).astype("int32")


def mlp():
    seeds = iter(range(1, 9))

    def dense(units, **kwargs):
        kernel = keras.initializers.GlorotUniform(seed=next(seeds))
        return keras.layers.Dense(units, kernel_initializer=kernel, **kwargs)

    return keras.Sequential(
        [
            keras.Input((6,)),
            dense(8, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3, seed=7),
            dense(3, dtype="float32"),
        ]
    )


CASES = {
    "sgd": (lambda: keras.optimizers.SGD(0.1, momentum=0.9), "float32", 1e-5),
    # Division by the root of small second moments enlarges rounding.
    "adam": (lambda: keras.optimizers.Adam(0.01), "float32", 1e-4),
    # Products have two to three digits, and a third of a gradient (with 3
    # replicas) is rounded otherwise: of all weights together, 10 %.
    "bfloat16": (lambda: keras.optimizers.SGD(0.1), "mixed_bfloat16", 0.1),
    "float16": (
        lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=2.0**8
        ),
        "mixed_float16",
        5e-3,
    ),
}


DEFAULT = {
    ("sgd", 1),
    ("sgd", 2),
    ("sgd", 8),
    ("adam", 3),
    ("adam", 8),
    ("bfloat16", 3),
    ("float16", 3),
}
ALL = [
    pytest.param(
        name,
        replicas,
        marks=() if (name, replicas) in DEFAULT else pytest.mark.slow,
    )
    for name in CASES
    for replicas in (1, 2, 3, 8)
]


@pytest.mark.parametrize(("name", "replicas"), few(ALL, every=4))
def test_twenty_steps_are_those_of_fit(name, replicas):
    make_optimizer, policy, tolerance = CASES[name]
    x, y = data(replicas)
    batch_size = 4 * replicas
    strategy = mirrored(replicas)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        with strategy.scope():
            fitted, own = mlp(), mlp()
            optimizer = make_optimizer()
            accuracy = keras.metrics.SparseCategoricalAccuracy()
            fitted.compile(
                make_optimizer(),
                keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                metrics=["accuracy"],
            )
    finally:
        keras.config.set_dtype_policy(before)
    history = fitted.fit(
        x, y, batch_size=batch_size, shuffle=False, verbose=0
    ).history
    loss_of_rows = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )

    def step(x, y):
        def loss_fn():
            logits = own(x, training=True)
            accuracy.update_state(y, logits)
            loss = ks.compute_average_loss(loss_of_rows(y, logits))
            return optimizer.scale_loss(loss), loss

        (_, loss), grads = ks.value_and_grad(
            loss_fn, own.trainable_variables, has_aux=True
        )()
        optimizer.apply(grads, own.trainable_variables)
        return loss

    dataset = strategy.experimental_distribute_dataset(
        strategy.experimental_make_numpy_dataset((x, y)).batch(batch_size)
    )
    total = sum(
        float(strategy.reduce("sum", strategy.run(step, args=batch), None))
        for batch in dataset
    )
    assert strategy._runner.num_programs == 1
    assert int(optimizer.iterations) == STEPS
    assert_replicated(own)
    close = {"rtol": tolerance, "atol": tolerance}
    np.testing.assert_allclose(total / STEPS, history["loss"][0], **close)
    np.testing.assert_allclose(
        float(accuracy.result()), history["accuracy"][0], atol=0.02
    )
    if policy == "mixed_bfloat16":
        ours, theirs = (
            np.concatenate([w.ravel() for w in m.get_weights()])
            for m in (own, fitted)
        )
        error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        assert error < tolerance
        return
    for ours, theirs in zip(own.variables, fitted.variables, strict=True):
        np.testing.assert_allclose(
            np.asarray(ours.value, "float32"),
            np.asarray(theirs.value, "float32"),
            err_msg=ours.path,
            **close,
        )


def test_two_models_and_two_optimizers():
    """A GAN's loop, 200 steps, against the same on one device."""
    x = _random.normal(size=(8, 2)).astype("float32")
    noise = _random.normal(size=(8, 3)).astype("float32")

    def made():
        initial = keras.initializers.GlorotUniform
        generator = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(2, None, True, initial(1))]
        )
        critic = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(1, None, True, initial(2))]
        )
        optimizers = [keras.optimizers.SGD(0.01) for _ in range(2)]
        return generator, critic, *optimizers

    def step_of(generator, critic, generator_optimizer, critic_variables):
        def step(x, noise):
            def score_loss(scores, sign):
                return ks.compute_average_loss(
                    jax.nn.softplus(sign * scores[:, 0])
                )

            def critics():
                return score_loss(critic(x), -1) + score_loss(
                    critic(generator(noise)), 1
                )

            loss, grads = ks.value_and_grad(
                critics, critic.trainable_variables
            )()
            critic_variables.apply(grads, critic.trainable_variables)
            grads = ks.grad(
                lambda: score_loss(critic(generator(noise)), -1),
                generator.trainable_variables,
            )()
            generator_optimizer.apply(grads, generator.trainable_variables)
            return loss

        return step

    states = []
    for replicas in (1, 2, 8):
        strategy = mirrored(replicas)
        with strategy.scope():
            parts = made()
        step = step_of(*parts)
        batch = next(
            iter(
                strategy.experimental_distribute_dataset(
                    [(x, noise)].__iter__()
                )
            )
        )
        for _ in range(200):
            strategy.run(step, args=batch)
        states.append([w for m in parts[:2] for w in m.get_weights()])
        assert strategy._runner.num_programs == 1
    for other in states[1:]:
        for one, two in zip(states[0], other, strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("replicas", [2, 8])
def test_a_target_network_that_is_assigned(replicas):
    """200 steps; the target's buffers are those of the online network."""
    strategy = mirrored(replicas)
    x = _random.normal(size=(8, 2)).astype("float32")
    with strategy.scope():
        online = keras.Variable(np.ones((2,), "float32"), name="online")
        target = keras.Variable(np.zeros((2,), "float32"), name="target")
        optimizer = keras.optimizers.SGD(0.05)
    batch = next(iter(strategy.experimental_distribute_dataset(iter([x]))))

    def step(x):
        def loss():
            error = x @ online.value - (0.9 * (x @ target.value) + 1)
            return ks.compute_average_loss(error**2)

        grads = ks.grad(loss, [online])()
        optimizer.apply(grads, [online])
        return 0

    theirs, copy = np.ones(2), np.zeros(2)
    for k in range(200):
        strategy.run(step, args=(batch,))
        error = x @ theirs - (0.9 * (x @ copy) + 1)
        theirs = theirs - 0.05 * 2 * x.T @ error / len(x)
        if k % 10 == 9:
            target.assign(online)
            copy = theirs.copy()
    np.testing.assert_allclose(online.numpy(), theirs, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(target.numpy(), copy, rtol=1e-4, atol=1e-5)


def test_a_loop_leaves_no_arrays_behind():
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable(0.0, aggregation="mean", name="v")

    def step(x):
        variable.assign_add(jnp.mean(x))
        return jnp.sum(x)

    counts = []
    for k in range(1000):
        x = strategy.experimental_distribute_values_from_function(
            lambda context: np.ones((2,), "float32")
        )
        strategy.reduce("sum", strategy.run(step, args=(x,)), axis=None)
        if k in (20, 999):
            gc.collect()  # what earlier tests left behind counts in neither
            counts.append(len(jax.live_arrays()))
    assert counts[1] <= counts[0]
    assert float(variable) == 1000.0

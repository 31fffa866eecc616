"""A custom loop against one in plain JAX that visits the replicas in turn.

Every replica has its own rows, its own dropout and its own batch statistics;
of 4N + 1 rows the first one has five, and a tail leaves replicas without any,
which have no say in the averaged statistics.
"""

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.spmd.rows import rows_of_replicas
from keras_strategies.testing import assert_replicated
from tests.parity.custom_loop.test_against_fit import mlp
from tests.parity.test_per_replica_layers import hashed
from tests.support.combinations import few
from tests.support.plain_keras import mirrored

STEPS = 20
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "bfloat16": lambda: keras.optimizers.SGD(0.1),
}
# Of Adam, divisions by the roots of small moments enlarge rounding; of
# bfloat16, products have two to three digits: of all weights together, 10 %.
TOLERANCES = {"sgd": 2e-5, "adam": 5e-4, "bfloat16": 0.1}
DEFAULT = {("sgd", 2), ("adam", 3), ("bfloat16", 2)}
ALL = [
    pytest.param(
        name,
        replicas,
        marks=() if (name, replicas) in DEFAULT else pytest.mark.slow,
    )
    for name in OPTIMIZERS
    for replicas in (1, 2, 3, 8)
]


def batches(replicas):
    """20 batches, the last with no rows for some of the replicas."""
    random = np.random.default_rng(replicas)
    sizes = [4 * replicas + 1] * (STEPS - 1) + [2 * replicas]
    return [
        (
            random.normal(size=(size, 6)).astype("float32"),
            random.integers(0, 3, size).astype("int32"),
        )
        for size in sizes
    ]


def train_by_hand(model, optimizer, data, replicas):
    """The state after all batches, and each step's loss."""
    variables = model.non_trainable_variables
    seeds = [
        i for i, v in enumerate(variables) if v.name == "seed_generator_state"
    ]
    weights = [v.value for v in model.trainable_variables]
    others = [v.value for v in variables]
    slots = [v.value for v in optimizer.variables]
    losses = []

    @jax.jit
    def gradient(weights, others, x, y, size):
        def loss_of(weights, others):
            logits, new = model.stateless_call(
                weights, others, x, training=True
            )
            rows = keras.losses.sparse_categorical_crossentropy(
                y, logits, from_logits=True
            )
            return keras.ops.sum(rows) / size, new

        return jax.value_and_grad(loss_of, has_aux=True)(weights, others)

    for x, y in data:
        shares = rows_of_replicas(len(x), len(data[0][0]), replicas)
        ends = np.cumsum(shares)
        parts = []
        for replica, (end, share) in enumerate(zip(ends, shares, strict=True)):
            if not share:
                continue
            own = list(others)
            for i in seeds:
                folded = own[i][0] ^ np.uint32(hashed(replica))
                own[i] = own[i].at[0].set(folded)
            rows = slice(end - share, end)
            parts.append(gradient(weights, own, x[rows], y[rows], len(x)))
        grads = [sum(g) for g in zip(*(p[1] for p in parts), strict=True)]
        merged = [
            sum(o) / len(parts)
            for o in zip(*(p[0][1] for p in parts), strict=True)
        ]
        for i in seeds:
            merged[i] = others[i].at[1].set(parts[0][0][1][i][1])
        others = merged
        losses.append(float(sum(p[0][0] for p in parts)))
        weights, slots = optimizer.stateless_apply(slots, grads, weights)
    return [np.asarray(v) for v in (*weights, *others, *slots)], losses


@pytest.fixture
def _policy(name):
    before = keras.config.dtype_policy()
    if name == "bfloat16":
        keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy(before)


@pytest.mark.usefixtures("_policy")
@pytest.mark.parametrize(("name", "replicas"), few(ALL, every=3))
def test_twenty_steps_are_those_of_a_loop_over_replicas(name, replicas):
    data = batches(replicas)
    strategy = mirrored(replicas)
    with strategy.scope():
        model, optimizer = mlp(), OPTIMIZERS[name]()
        optimizer.build(model.trainable_variables)
    by_hand, its_optimizer = mlp(), OPTIMIZERS[name]()
    its_optimizer.build(by_hand.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )

    def step(x, y, size):
        loss, grads = ks.value_and_grad(
            lambda: ks.compute_average_loss(
                loss_of(y, model(x, training=True)), global_batch_size=size
            ),
            model.trainable_variables,
        )()
        optimizer.apply(grads, model.trainable_variables)
        return loss

    losses = []
    dataset = strategy.experimental_distribute_dataset(iter(data))
    for (x, y), (rows, _) in zip(dataset, data, strict=True):
        loss = strategy.run(step, args=(x, y, len(rows)))
        losses.append(float(strategy.reduce("sum", loss, axis=None)))
    expected, their_losses = train_by_hand(
        by_hand, its_optimizer, data, replicas
    )
    assert_replicated(model, *optimizer.variables)
    close = {"rtol": TOLERANCES[name], "atol": TOLERANCES[name]}
    np.testing.assert_allclose(losses, their_losses, **close)
    state = (
        *model.trainable_variables,
        *model.non_trainable_variables,
        *optimizer.variables,
    )
    if name == "bfloat16":
        ours = np.concatenate([np.ravel(v.value) for v in state])
        theirs = np.concatenate([np.ravel(value) for value in expected])
        error = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
        assert error < TOLERANCES[name]
        return
    for variable, value in zip(state, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(variable.value), value, err_msg=variable.path, **close
        )


def test_batch_statistics_of_replicas_without_rows_have_no_say():
    strategy = mirrored(8)
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5)
        layer.build((None, 1))
    x = np.array([[1.0], [3.0], [5.0]], "float32")
    dataset = strategy.experimental_distribute_dataset(
        iter([np.zeros((8, 1), "float32"), x])
    )
    for batch in dataset:
        strategy.run(lambda x: layer(x, training=True), args=(batch,))
    # Batch means of the three replicas with rows: 1, 3 and 5.
    assert float(layer.moving_mean.value[0]) == pytest.approx(1.5)
    for batch in strategy.experimental_distribute_dataset(iter([x])):
        with strategy.debug():
            strategy.run(lambda x: layer(x, training=True), args=(batch,))
    assert float(layer.moving_mean.value[0]) == pytest.approx(2.25)

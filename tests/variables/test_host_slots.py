"""Slots on the host: the numbers of slots on the devices, bit by bit."""

import contextlib
import functools

import jax
import keras
import numpy as np
import pytest
from keras import layers, optimizers

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from keras_strategies.variables.model_variables import all_variables

FullySharded = ks.experimental.FullySharded
SlotsOnly = ks.experimental.SlotsOnly
Replicated = ks.experimental.Replicated
WIDTH = 128
"""A kernel has as many entries as the smallest variable that is sharded."""
ROWS = 25
_random = np.random.default_rng(0)
X = _random.normal(size=(ROWS, WIDTH)).astype("float32")
Y = np.tanh(X[:, :3])

adam = functools.partial(optimizers.Adam, 0.01)
momentum = functools.partial(optimizers.SGD, 0.01, momentum=0.9)


def make_strategy(kind, count, offload="optimizer"):
    return ks.MirroredStrategy(
        jax.devices()[:count], variable_partitioner=kind(offload=offload)
    )


def build(strategy, optimizer=adam, blocks=2, **compiled):
    keras.utils.set_random_seed(0)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras.Sequential(
            [
                keras.Input((WIDTH,)),
                *[layers.Dense(WIDTH, "tanh") for _ in range(blocks)],
                layers.Dropout(0.1, seed=1),
                layers.Dense(3),
            ]
        )
        model.compile(optimizer(), "mse", metrics=["mae"], **compiled)
    return model


def fit(model, batch_size, epochs=1, **options):
    return model.fit(
        X,
        Y,
        batch_size=batch_size,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        **options,
    ).history


def values_of(model):
    return [np.array(v) for v in [*model.variables, *model.optimizer.variables]]


def list_on_host(model):
    return [
        v.path
        for v in all_variables(model)
        if v.value.sharding.memory_kind == "pinned_host"
    ]


def check_equal(model, expected):
    for found, value in zip(values_of(model), expected, strict=True):
        np.testing.assert_array_equal(found, value)


def train(kind, count, offload, optimizer, batch_size, options):
    strategy = make_strategy(kind, count, offload)
    model = build(strategy, optimizer, **options)
    first = fit(model, batch_size, epochs=2)
    loss = model.evaluate(X, Y, batch_size=batch_size, verbose=0)
    second = fit(model, batch_size)
    return model, [first, loss, second]


CASES = {
    # The slots on the host of each of the two large kernels.
    "one device": (2, FullySharded, 1, adam, 8, {}),
    "sharded": (2, FullySharded, 2, adam, 8, {}),
    "uneven": (
        3,
        SlotsOnly,
        2,
        functools.partial(optimizers.AdamW, use_ema=True),
        5,
        {"steps_per_execution": 2},
    ),
    "no dimension fits": (1, FullySharded, 3, momentum, 6, {}),
    "replicated": (
        3,
        Replicated,
        2,
        functools.partial(adam, gradient_accumulation_steps=2),
        8,
        {"steps_per_execution": 3},
    ),
    "accumulated": (
        3,
        FullySharded,
        2,
        functools.partial(adam, gradient_accumulation_steps=3),
        8,
        {"steps_per_execution": 2},
    ),
    "scaled": (
        1,
        Replicated,
        8,
        lambda: optimizers.LossScaleOptimizer(momentum()),
        8,
        {},
    ),
    "eager": (1, SlotsOnly, 2, momentum, 8, {"run_eagerly": True}),
}


@pytest.mark.parametrize("name", CASES)
def test_fits_have_the_same_bits(name):
    slots, *case = CASES[name]
    kind, count, *how = case
    expected, logs = train(kind, count, None, *how)
    model, found = train(kind, count, "optimizer", *how)
    assert found == logs
    check_equal(model, values_of(expected))
    assert len(list_on_host(model)) == 2 * slots
    assert not list_on_host(expected)
    assert_replicated(model)


@pytest.mark.parametrize("kind", [FullySharded, Replicated])
def test_describe_names_the_host(kind, capsys):
    strategy = make_strategy(kind, 2)
    model = build(strategy)
    with strategy.scope():
        model.optimizer.build(model.trainable_variables)
    strategy.describe(model)
    text = " ".join(capsys.readouterr().out.split())
    assert "offload='optimizer'" in text
    size = 4 * 4 * WIDTH * WIDTH / (2 if kind is FullySharded else 1)
    assert f"{size / 1e6:.3f} MB on the host for each device" in text


@pytest.mark.parametrize("kind", [FullySharded, Replicated])
def test_blocks_in_a_loop_have_the_same_bits(kind):
    found = []
    for offload in (None, "optimizer"):
        strategy = make_strategy(kind, 2, offload)
        model = build(strategy, blocks=4)
        assert ks.experimental.scan_blocks(model)
        logs = [fit(model, 8, epochs=2), fit(model, 5)]
        found.append((logs, values_of(model)))
    assert found[0][0] == found[1][0]
    check_equal(model, found[0][1])
    assert len(list_on_host(model)) == 2 * 4


def test_float16_with_loss_scaling_has_the_same_bits():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        expected, logs = train(FullySharded, 2, None, adam, 8, {})
        model, found = train(FullySharded, 2, "optimizer", adam, 8, {})
    finally:
        keras.config.set_dtype_policy(before)
    assert found == logs
    check_equal(model, values_of(expected))
    assert len(list_on_host(model)) == 2 * 2


@pytest.mark.parametrize("kind", [FullySharded, Replicated])
def test_run_has_the_same_bits(kind):
    def train(offload):
        strategy = make_strategy(kind, 2, offload)
        model = build(strategy)

        def step(x, y):
            def loss(weights):
                predicted, _ = model.stateless_call(
                    weights,
                    [v.value for v in model.non_trainable_variables],
                    x,
                )
                return keras.ops.mean((predicted - y) ** 2)

            weights = model.trainable_variables
            grads = jax.grad(loss)([v.value for v in weights])
            model.optimizer.apply(grads, weights)
            return keras.ops.sum(model.optimizer.variables[2])

        with strategy.scope():
            model.optimizer.build(model.trainable_variables)
        dataset = strategy.experimental_make_numpy_dataset((X[:24], Y[:24]))
        data = strategy.experimental_distribute_dataset(dataset.batch(8))
        for batch in data:
            sums = strategy.run(step, args=batch)
        first = strategy.experimental_local_results(sums)[0]
        return model, float(first)

    expected, total = train(None)
    model, found = train("optimizer")
    assert found == total
    check_equal(model, values_of(expected))
    assert len(list_on_host(model)) == 4


def make_manager(model, directory):
    checkpoint = ks.checkpoint.Checkpoint(model=model)
    return ks.checkpoint.CheckpointManager(checkpoint, directory)


@pytest.mark.parametrize("offloads", [(None, "optimizer"), ("optimizer", None)])
def test_training_resumes_with_slots_elsewhere(tmp_path, offloads):
    models = [build(make_strategy(FullySharded, 2, x)) for x in offloads]
    fit(models[0], 8)
    path = tmp_path / "model.weights.h5"
    models[0].save_weights(path)
    fit(models[1], 8)
    directory = tmp_path / "checkpoints"
    with make_manager(models[0], directory) as manager:
        manager.save(3)
    with make_manager(models[1], directory) as manager:
        assert manager.restore_or_initialize() == 3
    check_equal(models[1], values_of(models[0]))
    count = 4 if offloads[1] else 0
    assert len(list_on_host(models[1])) == count
    fit(models[1], 8)
    expected = values_of(models[1])
    models[1].load_weights(path)
    assert len(list_on_host(models[1])) == count
    fit(models[1], 8)
    fit(models[0], 8)
    check_equal(models[0], expected)


def test_other_values_are_refused():
    with pytest.raises(ValueError, match="must be 'optimizer' or None"):
        FullySharded(offload="cpu")
    with pytest.raises(ValueError, match="must be 'optimizer' or None"):
        Replicated(offload=True)

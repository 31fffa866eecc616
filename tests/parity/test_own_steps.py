"""Train steps of users: one device's numbers, and mapped if they are means."""

import functools
import warnings

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.step.analysis import LogWarning
from keras_strategies.variables.model_variables import all_variables
from tests.parity import (  # noqa: F401
    own_steps_generative,
    own_steps_layers,
    own_steps_learning,
    own_steps_losses,
)
from tests.parity.own_steps import BATCH, STEPS
from tests.support.combinations import some
from tests.support.plain_keras import mirrored
from tests.support.strategies import make_strategy

INDIVISIBLE = 11


def train(name, strategy, batch):
    """Trains two epochs; the logs, the variables, and the warnings."""
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = STEPS[name].make()
        model.compile(model.make_optimizer(), model.keras_loss)
        model.optimizer.build(model.trainable_variables)
    if isinstance(strategy, ks.OneDeviceStrategy):
        # Plain Keras trains it; its layers only need a scope to be made.
        strategy.detach(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = model.fit(
            *(model.x, model.y),
            batch_size=batch,
            epochs=2,
            shuffle=False,
            verbose=0,
        ).history
    state = [np.array(v) for v in all_variables(model)]
    return history, dict(enumerate(state)), caught


@functools.cache
def expected(name, batch):
    return train(name, ks.OneDeviceStrategy("cpu:0"), batch)[:2]


def find_differences(ours, plain, tolerance):
    """Names of the values that differ."""
    assert ours.keys() == plain.keys()
    return [
        key
        for key, value in ours.items()
        if not np.allclose(
            np.asarray(value, "float64"),
            np.asarray(plain[key], "float64"),
            rtol=tolerance,
            atol=tolerance,
        )
    ]


def check(name, strategy, batch):
    """Asserts one device's numbers; returns whether the step was mapped."""
    history, state, caught = train(name, strategy, batch)
    plain_history, plain_state = expected(name, batch)
    # A log with a metric's name would be replaced by that metric's result.
    assert all(np.any(value) for value in plain_history.values())
    tolerance = STEPS[name].make.tolerance
    assert not find_differences(state, plain_state, tolerance)
    if not any(w.category is LogWarning for w in caught):
        assert not find_differences(history, plain_history, tolerance)
    return not any("global batch instead" in str(w.message) for w in caught)


DEFAULT = {list(STEPS)[k * len(STEPS) // 12] for k in range(12)}


@pytest.mark.parametrize("name", some(STEPS, DEFAULT))
def test_a_step_has_one_devices_numbers_and_is_mapped_if_of_means(name):
    is_mapped = check(name, mirrored(2), BATCH)
    assert is_mapped or not STEPS[name].has_only_means


def test_a_scaled_gradient_of_a_replica_of_one_row():
    # The last batch has two rows.
    check("ScaledByHand", mirrored(2), INDIVISIBLE)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [BATCH, INDIVISIBLE])
@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("kind", ["mirrored", "sharded"])
@pytest.mark.parametrize("name", STEPS)
def test_each_step_on_more_replicas(name, kind, replicas, batch):
    is_mapped = check(name, make_strategy(f"{kind}{replicas}"), batch)
    assert is_mapped or not STEPS[name].has_only_means or batch != BATCH


def test_the_steps_are_as_many_as_are_claimed():
    assert len(STEPS) >= 60
    assert sum(case.has_only_means for case in STEPS.values()) >= 40

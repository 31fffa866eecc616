"""The names under which profiles and dumps show our programs."""

import logging
import re

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks

X = np.ones((12, 3), "float32")
Y = np.ones((12, 1), "float32")


@pytest.fixture
def compiled(caplog):
    """Makes a function: the names of what was compiled since it was made."""
    caplog.set_level(logging.WARNING)

    def names():
        found = re.findall(r"XLA compilation of jit\((\w+)\)", caplog.text)
        caplog.clear()
        return set(found)

    with jax.log_compiles():
        yield names


def make_model(strategy, steps=1):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", steps_per_execution=steps)
    return model


def test_steps_have_the_names_of_the_loops(compiled):
    strategy = ks.MirroredStrategy(devices=jax.devices()[:2])
    model = make_model(strategy)
    model.fit(X, Y, batch_size=4, verbose=0)
    assert "train_step" in compiled()
    model.evaluate(X, Y, batch_size=4, verbose=0)
    assert "test_step" in compiled()
    model.predict(X, batch_size=4, verbose=0)
    assert "predict_step" in compiled()


def test_steps_of_an_execution_are_told_apart(compiled):
    strategy = ks.MirroredStrategy(devices=jax.devices()[:2])
    model = make_model(strategy, steps=3)
    model.fit(X, Y, batch_size=4, verbose=0)
    assert "train_steps" in compiled()
    model.predict(X, batch_size=4, verbose=0)
    assert "predict_steps" in compiled()


def test_steps_over_the_whole_batch_are_told_apart(compiled):
    strategy = ks.MirroredStrategy(devices=jax.devices()[:2])
    model = make_model(strategy)
    model.fit(X, Y, batch_size=3, verbose=0)
    assert "train_step_global" in compiled()


def test_a_users_function_is_run(compiled):
    strategy = ks.MirroredStrategy(devices=jax.devices()[:2])
    strategy.run(lambda: ks.get_replica_context().replica_id_in_sync_group)
    assert "run" in compiled()

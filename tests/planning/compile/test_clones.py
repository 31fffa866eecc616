"""Models made from others, and compiled as they are."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_strategies.planning.compile.fit_step import (
    clone_from_config,
    compile_like,
)
from tests.support.combinations import combine

ROWS = np.ones((4, 3), "float32")
COUNT = 5


def squares(y, found):
    return (y - found) ** 2


def functional():
    x = inputs = keras.Input((3,))
    for _ in range(COUNT):
        x = layers.Dense(3, activation="relu")(x)
    return keras.Model(inputs, layers.Dense(1)(x))


def sequential(*shape):
    inputs = [keras.Input((3,))] if not shape else []
    model = keras.Sequential([*inputs, layers.Dense(3), layers.Dense(1)])
    if shape:
        model.build(shape)
    return model


@keras.saving.register_keras_serializable("twins")
class Own(keras.Model):
    def __init__(self, units=2, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.dense = layers.Dense(units)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x)

    def get_config(self):
        return super().get_config() | {"units": self.units}


def own():
    model = Own(units=5)
    model.build((None, 3))
    return model


@pytest.mark.parametrize(
    "make",
    combine(
        [functional, sequential, lambda: sequential(None, 3), own], every=2
    ),
)
def test_a_twin_has_the_same_shapes_and_variables_of_its_own(make):
    model = make()
    model.compile("adam", "mse")
    twin = clone_from_config(model)
    assert type(twin) is type(model)
    assert twin.compiled
    assert [tuple(v.shape) for v in twin.weights] == [
        tuple(v.shape) for v in model.weights
    ]
    mine = {id(v) for v in model.variables}
    assert not mine & {id(v) for v in twin.variables}
    assert twin(ROWS).shape == model(ROWS).shape


def test_a_model_that_is_not_compiled_has_a_twin_that_is_not():
    assert not clone_from_config(functional()).compiled


def test_a_twin_is_compiled_as_the_model_is():
    model = functional()
    metric = keras.metrics.MeanAbsoluteError()
    model.compile(
        keras.optimizers.AdamW(
            keras.optimizers.schedules.ExponentialDecay(0.1, 7, 0.5),
            weight_decay=0.3,
            clipnorm=2.0,
        ),
        squares,
        loss_weights=0.5,
        metrics=[metric],
        steps_per_execution=3,
        jit_compile=True,
    )
    twin = clone_from_config(model)
    assert isinstance(twin.optimizer, keras.optimizers.AdamW)
    assert twin.optimizer is not model.optimizer
    assert twin.optimizer.get_config() == model.optimizer.get_config()
    assert twin.steps_per_execution == 3
    assert twin.jit_compile is True
    config = twin._compile_config.config
    assert config["loss"] is squares
    assert config["loss_weights"] == 0.5
    assert config["metrics"] == [metric]


def test_a_loss_that_has_no_config_is_the_same_object():
    model = functional()
    model.compile("sgd", lambda y, found: squares(y, found))
    twin = clone_from_config(model)
    loss = model._compile_config.config["loss"]
    assert twin._compile_config.config["loss"] is loss


def test_an_optimizer_that_scales_losses_is_not_wrapped_again():
    policy = keras.dtype_policies.DTypePolicy("mixed_float16")
    inputs = keras.Input((3,))
    model = keras.Model(inputs, layers.Dense(1, dtype=policy)(inputs))
    model.dtype_policy = policy
    model.compile("adam", "mse")
    twin = clone_from_config(model)
    kind = keras.optimizers.LossScaleOptimizer
    assert isinstance(model.optimizer, kind) == isinstance(twin.optimizer, kind)
    wrapped = functional()
    wrapped.compile(kind(keras.optimizers.SGD(0.3)), "mse")
    inner = clone_from_config(wrapped).optimizer.inner_optimizer
    assert type(inner) is keras.optimizers.SGD
    assert float(inner.learning_rate) == pytest.approx(0.3)


def test_what_is_computed_again_is_so_in_the_twin():
    with keras.RematScope(mode="full"):
        dense = layers.Dense(3)
    inputs = keras.Input((3,))
    model = keras.Model(inputs, layers.Dense(1)(dense(inputs)))
    modes = [x._remat_mode for x in clone_from_config(model)._flatten_layers()]
    assert modes == [x._remat_mode for x in model._flatten_layers()]
    assert sum(mode is not None for mode in modes) == 1


class NoConfig(Own):
    def get_config(self):
        raise NotImplementedError("no config")


def test_a_model_without_a_config_is_refused_with_what_to_do():
    model = NoConfig(2)
    with pytest.raises(ValueError, match="creates and compiles") as caught:
        clone_from_config(model)
    for words in ("NoConfig", "NotImplementedError: no config"):
        assert words in str(caught.value)


def test_without_an_optimizer_it_is_compiled_without_one():
    model, twin = functional(), functional()
    model.compile(optimizer=None, loss="mse")
    compile_like(twin, model)
    assert (twin.optimizer is None) == (model.optimizer is None)

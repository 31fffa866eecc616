"""Variables made in a scope lie on the mesh and are known to the strategy."""

import gc
import threading

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.variables.model_variables import (
    all_variables,
)
from tests.support.plain_keras import mirrored
from tests.support.rows_seen import compile_, fit, sequential


def model_with_all_kinds():
    """Weights, statistics, seeds; with slots and metrics when trained."""
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])
    return model


def list_devices(variable):
    return variable.value.sharding.device_set


def test_every_variable_made_in_scope_lies_on_the_mesh():
    strategy = mirrored(3)
    created = strategy.extended.variable_created_in_scope
    with strategy.scope():
        model = model_with_all_kinds()
        free = keras.Variable([1.0, 2.0])
        seed = keras.random.SeedGenerator(3).state
        metric = keras.metrics.Accuracy()
    fit(model)  # Makes the slots, after the scope.
    variables = [*all_variables(model), free, seed, *metric.variables]
    kinds = {v.path.split("/")[0] for v in variables}
    assert {"adam", "mean_absolute_error", "loss"} & kinds
    assert len(model.optimizer.variables) > 6
    for variable in variables:
        assert list_devices(variable) == set(strategy.extended.worker_devices)
        assert variable.value.is_fully_replicated
        assert created(variable), variable.path


def test_variables_made_elsewhere_are_not_the_strategys():
    strategy, other = mirrored(2), mirrored(3)
    created = strategy.extended.variable_created_in_scope
    outside = compile_(sequential())
    with other.scope():
        others = compile_(sequential())
    for model in (outside, others):
        assert not any(map(created, model.variables))
    strategy.attach(outside)
    # Moved to the strategy's devices; not created there.
    assert not any(map(created, outside.weights))
    assert all(len(list_devices(v)) == 2 for v in outside.weights)


def test_only_variables_can_be_asked_about():
    with pytest.raises(TypeError, match="expects a Keras variable"):
        mirrored(2).extended.variable_created_in_scope(np.zeros(3))


def test_strategy_does_not_keep_variables_alive():
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable([1.0])
        assert len(list(strategy._runtime.registry)) == 1
    del variable
    gc.collect()
    assert len(list(strategy._runtime.registry)) == 0


# Creators of a user's own.


def naming(calls, name):
    def creator(next_creator, **kwargs):
        calls.append(name)
        return next_creator(**kwargs)

    return creator


def test_innermost_creator_is_called_first():
    calls = []
    with (
        ks.variable_creator_scope(naming(calls, "outer")),
        ks.variable_creator_scope(naming(calls, "inner")),
    ):
        keras.Variable([1.0])
    assert calls == ["inner", "outer"]
    keras.Variable([1.0])
    assert calls == ["inner", "outer"]


def test_creator_is_told_the_arguments_by_name():
    told = []

    def creator(next_creator, **kwargs):
        told.append(kwargs)
        return next_creator(**kwargs)

    with ks.variable_creator_scope(creator):
        keras.Variable(np.zeros(3), None, "float16", name="mine")
        keras.layers.Dense(2, name="dense").build((None, 3))
    assert told[0]["dtype"] == "float16"
    assert told[0]["name"] == "mine"
    assert told[0]["trainable"] is True
    assert [t["name"] for t in told[1:]] == ["kernel", "bias"]
    assert told[1]["shape"] == (3, 2)


def test_creator_changes_the_arguments():
    def frozen(next_creator, **kwargs):
        kwargs["name"] = f"frozen_{kwargs['name']}"
        return next_creator(**(kwargs | {"trainable": False}))

    strategy = mirrored(2)
    with strategy.scope(), ks.variable_creator_scope(frozen):
        layer = keras.layers.Dense(2)
        layer.build((None, 3))
    assert [v.name for v in layer.variables] == ["frozen_kernel", "frozen_bias"]
    assert not any(v.trainable for v in layer.variables)
    for variable in layer.variables:
        assert strategy.extended.variable_created_in_scope(variable)
        assert len(list_devices(variable)) == 2


@pytest.mark.parametrize("wrong", [None, np.zeros(3)], ids=["None", "array"])
def test_creator_that_returns_another_object_is_refused(wrong):
    def creator(next_creator, **kwargs):
        next_creator(**kwargs)
        return wrong

    with (
        ks.variable_creator_scope(creator),
        pytest.raises(ValueError, match="must return the variable"),
    ):
        keras.Variable([1.0])
    assert keras.Variable([1.0]).numpy() == [1.0]


def test_creator_scope_closes_after_an_error():
    def fails():
        with ks.variable_creator_scope(naming([], "a")):
            assert keras.Variable.__init__ is not before
            raise KeyError

    before = keras.Variable.__init__
    with pytest.raises(KeyError):
        fails()
    assert keras.Variable.__init__ is before


def test_creator_does_not_reach_other_threads():
    calls = []
    with ks.variable_creator_scope(naming(calls, "main")):
        thread = threading.Thread(target=lambda: keras.Variable([1.0]))
        thread.start()
        thread.join()
    assert calls == []


def test_model_built_under_a_creator_trains():
    calls = []
    with mirrored(2).scope(), ks.variable_creator_scope(naming(calls, "all")):
        model = compile_(sequential())
    fit(model)
    assert len(calls) >= len(model.weights)


class WithLayout(keras.initializers.Initializer):
    """Draws numbers where Keras says, as its initializers will."""

    def __call__(self, shape, dtype=None, layout=None):
        value = keras.random.normal(shape, dtype=dtype, seed=3)
        return value if layout is None else jax.sharding.reshard(value, layout)


def cores():
    topology = ks.tpu.experimental.Topology.from_devices(jax.devices()[:4])
    assignment = ks.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=[2, 1, 1, 1], num_replicas=2
    )
    return ks.TPUStrategy(
        device_assignment=assignment, layout_map={".*kernel": (None, "model")}
    )


def shards():
    partitioner = ks.experimental.FullySharded(min_size=1)
    devices = [f"cpu:{i}" for i in range(2)]
    return ks.MirroredStrategy(devices, variable_partitioner=partitioner)


@pytest.mark.parametrize(
    "make", [lambda: mirrored(1), lambda: mirrored(3), cores, shards]
)
def test_an_initializer_may_place_its_value(make):
    expected = np.asarray(WithLayout()((4, 6), "float32"))
    strategy = make()
    with strategy.scope():
        layer = keras.layers.Dense(6, kernel_initializer=WithLayout())
        layer.build((None, 4))
        other = keras.layers.Dense(6)
        other.build((None, 4))
        with ks.abstract():
            later = keras.Sequential(
                [
                    keras.Input((4,)),
                    keras.layers.Dense(6, kernel_initializer=WithLayout()),
                ]
            )
    strategy.attach(later)
    strategy.materialize(later)
    for kernel in (layer.kernel, later.layers[0].kernel):
        sharding = kernel.value.sharding
        assert sharding.is_equivalent_to(other.kernel.value.sharding, 2)
        np.testing.assert_array_equal(np.asarray(kernel), expected)

"""Replicas that divide variables among them give one device's numbers.

The invariant: a step with divided variables is the replicated one, rearranged
(docs/sharding.md). So every case of tests/parity holds, with its tolerance.
"""

import functools
import re

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from keras_strategies.variables import model_variables
from tests.parity import one_device
from tests.parity.cases import CASES, by_optimizer
from tests.parity.one_device import list_seen
from tests.support.combinations import some
from tests.support.strategies import SHARDED, make_strategy

_QUICK = ((15, 4),)
# One of each way in which a step reads, changes or skips variables; with whole
# ones tests/parity/test_fit.py has the others.
_BY_DEFAULT = {
    *("sgd", "global_clipnorm", "accumulation", "ema", "loss_scale_overflow"),
    *("two_optimizers", "kernel_regularizer", "own_apply_gradients"),
    *("beside_optimizer", "frozen_after_compile", "steps_per_execution"),
    *("synchronized_masked", "transformer", "bfloat16"),
}
# Of matrices as a whole, of parts, of other optimizers, and entry by entry.
_OPTIMIZERS_BY_DEFAULT = {
    *("Adafactor", "MultiOptimizer", "ScheduleFreeAdamW"),
}
# What Keras 3.15 cannot rematerialize, on one device neither: losses and state
# that a call leaves on its layer, and layers that ask whether they train or are
# masked, which are tracers then. Masks that a layer computes it loses.
NOT_REMATERIALIZED = {
    *("mask", "mask_and_weight", "mask_sum", "masked"),
    *("activity_regularizer", "add_loss", "counters"),
    *("synchronized", "synchronized_masked", "synchronized_renorm"),
    *("lstm", "transformer"),
}


@pytest.fixture
def lowered(tmp_path):
    """The texts of the training steps that a test lowers, by a function."""
    jax.config.update("jax_dump_ir_to", str(tmp_path))
    try:
        yield lambda: [
            path.read_text() for path in tmp_path.glob("*_train_*_compile.mlir")
        ]
    finally:
        jax.config.update("jax_dump_ir_to", None)


def assert_divided(model):
    """Some variables are divided, and no device holds all of one of those."""
    divided = [
        v
        for v in model_variables.all_variables(model)
        if isinstance(v.value, jax.Array)
        and not v.value.sharding.is_fully_replicated
    ]
    assert divided
    for variable in divided:
        shards = variable.value.addressable_shards
        assert all(s.data.size < variable.value.size for s in shards)


def assert_gathers(name, texts):
    """A training step that is compiled gathers what it reads."""
    if name != "run_eagerly":
        assert any("stablehlo.all_gather" in text for text in texts)


@pytest.mark.parametrize("name", some(CASES, _BY_DEFAULT))
def test_equals_one_device(name, lowered):
    assert_divided(one_device.check(name, "sharded4", _QUICK, list_seen(name)))
    assert_gathers(name, lowered())


def optimizers_of_keras():
    base = keras.optimizers.Optimizer
    found = {
        name: cls
        for name, cls in vars(keras.optimizers).items()
        if isinstance(cls, type) and issubclass(cls, base) and cls is not base
    }
    options = {
        "SGD": {"momentum": 0.9, "nesterov": True},
        "RMSprop": {"momentum": 0.9, "centered": True, "epsilon": 0.01},
        "Ftrl": {"l1_regularization_strength": 1e-3},
    }
    # They divide by a gradient's size, and so enlarge its last bit near zero.
    for name in ("Adam", "AdamW", "Adamax", "Nadam", "Lamb", "Adagrad"):
        options[name] = {"epsilon": 0.01}
    makers = {
        name: functools.partial(cls, **options.get(name, {}))
        for name, cls in found.items()
    }
    return makers | {
        "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=64.0
        ),
        "MultiOptimizer": lambda: keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(
                makers["SGD"](), {".*/kernel": makers["Adam"]()}
            )
        ),
    }


@pytest.mark.parametrize(
    "name", some(optimizers_of_keras(), _OPTIMIZERS_BY_DEFAULT)
)
def test_every_optimizer_equals_one_device(name, lowered):
    case = by_optimizer(optimizers_of_keras()[name], tolerance=1e-4)
    wanted = one_device.Trained(case).run(15, 4, ())
    with make_strategy("sharded4").scope():
        ours = one_device.Trained(case)
    one_device.assert_close(
        ours.run(15, 4, ()), wanted, case.tolerance, (15, 4)
    )
    assert_divided(ours.model)
    assert_gathers(name, lowered())
    assert_replicated(ours.model)


@pytest.mark.parametrize(
    "name", some(["adam", "sgd", "clipnorm"], {"adam", "sgd"})
)
def test_divided_slots_equal_one_device(name, lowered):
    one_device.check(name, "sharded_slots4", _QUICK)
    texts = lowered()
    is_scattered = any("stablehlo.reduce_scatter" in text for text in texts)
    # Plain SGD, which "clipnorm" uses, has no slots.
    assert is_scattered == (name == "adam")
    # Weights are whole.
    assert not any("stablehlo.all_gather" in text for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", SHARDED)
@pytest.mark.parametrize("name", CASES)
def test_every_case_equals_one_device_everywhere(name, strategy, lowered):
    assert_divided(
        one_device.check(name, strategy, one_device.PAIRS, list_seen(name))
    )
    assert_gathers(name, lowered())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "pairs"),
    [("sharded4", _QUICK), ("sharded8_in_groups_of_4", ((64, 16),))],
)
@pytest.mark.parametrize("name", sorted(set(CASES) - NOT_REMATERIALIZED))
def test_rematerialized_cases_equal_one_device(name, strategy, pairs, lowered):
    for pair in pairs:
        one_device.expected(name, *pair, list_seen(name))
    with keras.RematScope(mode="full"):
        assert_divided(one_device.check(name, strategy, pairs, list_seen(name)))
    assert_gathers(name, lowered())


def _trained(partitioner, count):
    keras.utils.set_random_seed(3)
    strategy = ks.MirroredStrategy(
        jax.devices()[:count], variable_partitioner=partitioner
    )
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8,)),
                keras.layers.Dense(24, activation="tanh"),
                keras.layers.Dense(4),
            ]
        )
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    x = np.random.default_rng(0).normal(size=(48, 8)).astype("float32")
    model.fit(x, np.tanh(x[:, :4]), batch_size=24, epochs=2, verbose=0)
    assert_replicated(model)
    return model.get_weights()


@pytest.mark.parametrize(
    ("kind", "count", "shards"),
    [
        pytest.param(
            *(ks.experimental.FullySharded, 4, None), marks=pytest.mark.slow
        ),
        (ks.experimental.FullySharded, 8, 2),
        (ks.experimental.SlotsOnly, 3, None),
    ],
)
def test_gradients_travel_in_another_dtype(kind, count, shards, lowered):
    wanted = _trained(None, 1)
    assert "bf16" not in "".join(lowered())
    found = _trained(
        kind(shards=shards, min_size=1, reduce_dtype="bfloat16"), count
    )
    scatters = [
        line
        for text in lowered()
        # The operator's region comes between its name and its type.
        for line in re.findall(
            r'"stablehlo\.reduce_scatter".*?\}\) : .*?\n', text, re.S
        )
    ]
    assert scatters
    assert all("bf16" in line for line in scatters)
    distances = [
        float(abs(a - b).max()) for a, b in zip(found, wanted, strict=True)
    ]
    assert 1e-7 < max(distances) < 1e-2

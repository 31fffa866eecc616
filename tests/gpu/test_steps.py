"""Kinds of steps, compiled for GPUs without one: `./run test -m gpu`.

Bytes are counted by hand, in entries of 4 bytes where nothing else is said.
"""

import dataclasses

import jax
import jax.numpy as jnp
import keras
import pytest
from keras import layers, optimizers

import keras_strategies as ks
from keras_strategies.experimental import (
    FullySharded,
    Replicated,
    SlotsOnly,
)
from tests.gpu.programs import LOGS, Case, check_donation, check_step
from tests.support.kernel_gradients import adds_up_copies, compile_gradient

pytestmark = pytest.mark.gpu

KERNELS, BIASES = 64 * 256 + 256 * 8, 256 + 8
# Of the normalization: its scale and offset, and its mean and variance.
NORM, STATISTICS = 2 * 256, 2 * 256
GRADIENTS = KERNELS + BIASES + NORM


def make_dense():
    return keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(256, "relu"),
            layers.BatchNormalization(),
            layers.Dense(8),
        ]
    )


def make_remat():
    with keras.RematScope(mode="full"):
        return keras.Sequential(
            [
                keras.Input((64,)),
                layers.Dense(128, "relu"),
                layers.Dense(128, "relu"),
                layers.Dense(8),
            ]
        )


def make_scanned():
    blocks = [layers.Dense(64, "tanh") for _ in range(4)]
    model = keras.Sequential([keras.Input((64,)), *blocks, layers.Dense(8)])
    ks.experimental.scan_blocks(model)
    return model


def sharded(**kwargs):
    return FullySharded(min_size=1, **kwargs)


def one_sum(entries):
    return {"all-reduce": (1, 4 * entries)}


REMAT = 64 * 128 + 128 + 128 * 128 + 128
STEP = Case(
    model=make_dense,
    x=((64,), "float32"),
    rows=32,
    sent=one_sum(GRADIENTS + STATISTICS + LOGS),
)
SHARDED = dataclasses.replace(
    STEP,
    partitioner=sharded(),
    sent={
        "all-gather": (1, 4 * (GRADIENTS + STATISTICS)),
        "reduce-scatter": (1, 4 * GRADIENTS),
        "all-reduce": (1, 4 * (STATISTICS + LOGS)),
    },
)


def step(**changes):
    return dataclasses.replace(STEP, **changes)


def shards(**changes):
    sent = {**SHARDED.sent, **changes.pop("sent", {})}
    return dataclasses.replace(SHARDED, sent=sent, **changes)


CASES = {
    "train": STEP,
    "test": step(kind="test", sent=one_sum(LOGS)),
    "predict": step(kind="predict", sent={}),
    "steps per execution": step(steps=4),
    "metrics": step(
        compiled={"metrics": ["mae", keras.metrics.AUC]},
        # AUC counts by 200 thresholds.
        sent=one_sum(GRADIENTS + STATISTICS + LOGS + 2 + 4 * 200),
    ),
    "uneven rows": step(
        missing=3,
        # The rows' mean and variance, forward and backward; no statistics.
        sent={"all-reduce": (5, 4 * (GRADIENTS + 4 * 256 + 1))},
    ),
    "uneven rows in test": step(kind="test", missing=3, sent=one_sum(1)),
    "64 GPUs on 8 hosts": step(topology="h100:8x8"),
    "clipping and moving averages": step(
        optimizer=lambda: optimizers.AdamW(global_clipnorm=1.0, use_ema=True)
    ),
    # Gradients in the branch of an update.
    "accumulation": step(
        optimizer=lambda: optimizers.Adam(gradient_accumulation_steps=4),
        sent={"all-reduce": (2, 4 * (GRADIENTS + STATISTICS + LOGS))},
    ),
    "Muon": step(optimizer=lambda: optimizers.Muon(0.01)),
    "loss scaling": step(policy="mixed_float16"),
    "sums in bfloat16": step(
        partitioner=Replicated("bfloat16"),
        sent={"all-reduce": (2, 2 * GRADIENTS + 4 * (STATISTICS + LOGS))},
    ),
    "sharded": SHARDED,
    "sharded slots": shards(
        partitioner=SlotsOnly(min_size=1),
        sent={"all-gather": (1, 4 * GRADIENTS)},
    ),
    "sharded, in float16": shards(
        policy="mixed_float16",
        sent={
            "all-gather": (
                1,
                2 * (KERNELS + BIASES) + 4 * (NORM + STATISTICS),
            ),
            # Whether all gradients are finite.
            "all-reduce": (2, 4 * (STATISTICS + LOGS) + 1),
        },
    ),
    "sharded, sums in bfloat16": shards(
        partitioner=sharded(reduce_dtype="bfloat16"),
        sent={"reduce-scatter": (1, 2 * GRADIENTS)},
    ),
    "sharded over the GPUs of each host": shards(
        topology="h100:8x8",
        partitioner=sharded(shards=8),
        # The shards of gradients are summed over the hosts.
        sent={
            "all-reduce": (2, 4 * (GRADIENTS // 8 + STATISTICS + LOGS)),
        },
    ),
    "sharded over 64 GPUs": shards(
        topology="h100:8x8",
        partitioner=sharded(shards=64),
        # The last bias has 8 entries, and is replicated.
        sent={
            "all-gather": (1, 4 * (GRADIENTS - 8 + STATISTICS)),
            "reduce-scatter": (1, 4 * (GRADIENTS - 8)),
            "all-reduce": (1, 4 * (8 + STATISTICS + LOGS)),
        },
    ),
    "rematerialized": step(
        model=make_remat, sent=one_sum(REMAT + 128 * 8 + 8 + LOGS)
    ),
    "rematerialized and sharded": shards(
        model=make_remat,
        sent={
            # Keras computes the model again, and each of its layers.
            "all-gather": (8, 4 * (3 * REMAT + 2 * 128 * 8 + 8)),
            "reduce-scatter": (1, 4 * (REMAT + 128 * 8 + 8)),
            "all-reduce": (1, 4 * LOGS),
        },
    ),
    "equal blocks in a loop": step(
        model=make_scanned,
        sent=one_sum(4 * (64 * 64 + 64) + 64 * 8 + 8 + LOGS),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_the_collectives_that_it_needs(name):
    case = CASES[name]
    assert check_step(case) == case.sent


def test_a_custom_loop():
    strategy = ks.MirroredStrategy.for_topology("h100:8")
    with strategy.scope():
        model, optimizer = make_dense(), optimizers.Adam()
        optimizer.build(model.trainable_variables)
    weights, others = (
        model.trainable_variables,
        model.non_trainable_variables,
    )

    def run(x, y):
        def compute_loss(values):
            outputs, _ = model.stateless_call(
                values, [v.value for v in others], x, training=True
            )
            return jnp.mean((outputs - y) ** 2) / 8

        values = [v.value for v in weights]
        loss, grads = jax.value_and_grad(compute_loss)(values)
        optimizer.apply(grads, weights)
        return ks.get_replica_context().all_reduce("sum", loss)

    shapes = [jax.ShapeDtypeStruct((256, n), "float32") for n in (64, 8)]
    program = strategy.compile_run(run, shapes)
    assert program.collectives["all-reduce"] == 2
    # The loss, and the sum of the results.
    assert program.collective_bytes["all-reduce"] == 4 * (GRADIENTS + 2)
    # The rows, and the learning rate.
    check_donation(program, 32 * (64 + 8) * 4 + 4)


def test_gradients_of_convolutions_are_not_added_up_twice():
    devices = ks.MirroredStrategy.for_topology("h100:4").mesh.devices
    for is_constrained in (False, True):
        text = compile_gradient(devices, is_constrained=is_constrained)
        assert adds_up_copies(text) != is_constrained


@pytest.mark.parametrize(
    "make", [ks.experimental.FullySharded, ks.experimental.Replicated]
)
def test_slots_on_the_host_take_no_memory_of_a_gpu(make):
    width, count = 256, 8
    programs = [
        Case(
            sent={},
            model=lambda: keras.Sequential(
                [keras.Input((width,)), *[layers.Dense(width)] * 3]
            ),
            x=((width,), "float32"),
            y=((width,), "float32"),
            partitioner=make(offload=offload),
        ).compile()
        for offload in (None, "optimizer")
    ]
    before, after = (p.executable.memory_analysis() for p in programs)
    shards = count if make is ks.experimental.FullySharded else 1
    slots = 2 * 4 * width * width // shards
    assert after.host_argument_size_in_bytes == slots
    assert after.host_alias_size_in_bytes == slots
    assert before.argument_size_in_bytes - after.argument_size_in_bytes == slots
    check_donation(programs[1], 2 * 4 * 8 * width)

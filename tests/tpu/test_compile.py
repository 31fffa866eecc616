"""Steps as the TPU compiler sees them: `./run test -m tpu`.

The cases of the table in docs/tpu.md, which the benchmark makes.
"""

import math

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from benchmarks.sharded_tpu import LOW_EFFORT
from benchmarks.tpu_collectives import (
    SLICES,
    build,
    check_dtype,
    compile_steps,
    loop_step,
    make_batch,
)
from tests.support.combinations import few
from tests.support.sums import count_reduced_bytes

pytestmark = pytest.mark.tpu

GATHERS = ("all-gather", "all-to-all", "collective-permute")
CASES = [
    (topology, shape, model)
    for topology, shape, models in SLICES
    for model in models
]


@pytest.mark.parametrize(("topology", "shape", "model"), few(CASES, every=8))
def test_steps_compile_with_the_collectives_they_need(topology, shape, model):
    cores = int(np.prod(shape))
    programs = compile_steps(topology, shape, model, options=LOW_EFFORT)
    counts = {kind: p.collectives for kind, p in programs.items()}
    for kind, program in programs.items():
        assert program.cores_per_replica == cores
        assert program.bytes_per_chip > program.argument_bytes > 0
        if cores == 1:
            assert not any(counts[kind][name] for name in GATHERS), kind
            assert counts[kind]["reduce-scatter"] == 0
    if cores == 1:
        assert sum(counts["predict"].values()) == 0
        for kind in ("train", "test", "run"):
            assert 1 <= counts[kind]["all-reduce"] <= 2, kind
        return
    # Where columns meet rows, forward and backward; and gradients.
    meetings = {"mlp": 1, "cnn": 1, "transformer": 2}[model]
    for kind in programs:
        assert not any(counts[kind][name] for name in GATHERS), kind
    assert meetings <= counts["predict"]["all-reduce"] <= meetings + 1
    for kind in ("train", "run"):
        assert counts[kind]["all-reduce"] <= 2 * meetings + 2, kind


# Of the transformer a good part is not divided: tokens, norms, outputs.
@pytest.mark.parametrize(
    ("model", "minimum"), [("mlp", 1.9), ("transformer", 1.25)]
)
def test_cores_that_share_a_model_hold_less_of_it(model, minimum):
    sizes = [
        compile_steps("v5e:4x4", shape, model, ("train",), options=LOW_EFFORT)[
            "train"
        ]
        for shape in [(1, 1, 1, 1), (2, 1, 1, 1), (2, 2, 1, 1)]
    ]
    first, second, third = (program.argument_bytes for program in sizes)
    assert first > minimum * second
    assert second > minimum * third


def test_steps_compute_in_the_policy_asked_for():
    counts = []
    for policy in ("float32", "mixed_bfloat16"):
        program = compile_steps(
            *("v5e:2x2", (1, 1, 1, 1), "cnn", ("train",)),
            policy=policy,
            options=LOW_EFFORT,
        )["train"]
        counts.append(program.as_text().count("bf16["))
    # A float32 program has a few, of the compiler's own.
    assert counts[1] > 5 * counts[0]
    assert keras.config.dtype_policy().name == "float32"


def test_a_model_of_another_dtype_is_refused():
    strategy = ks.TPUStrategy.for_topology("v5e:2x2")
    model = build(strategy, "mlp")
    with pytest.raises(RuntimeError, match="compute in bfloat16") as caught:
        check_dtype(model, "mixed_bfloat16")
    assert "'one': 'float32'" in str(caught.value)


def test_several_slices():
    strategy = ks.TPUStrategy.for_topology("v5e:4x4", num_slices=2)
    assert strategy.num_replicas_in_sync == 32
    model = build(strategy, "mlp")
    program = strategy.compile_step(model, make_batch(strategy, "mlp", 8))
    assert program.collectives["all-reduce"] >= 1
    divided = ks.TPUStrategy.for_topology(
        "v5e:4x4", num_slices=2, computation_shape=[2, 2, 1, 1]
    )
    assert divided.num_replicas_in_sync == 8


def test_cores_and_replicas_divide_variables():
    layout_map = {
        ".*one/kernel": (None, "model"),
        ".*two/kernel": ("model", None),
    }
    kernels = 2 * 512 * 2048 * 4
    programs = []
    for partitioner in (None, ks.experimental.FullySharded()):
        strategy = ks.TPUStrategy.for_topology(
            "v5e:4x4",
            computation_shape=[2, 1, 1, 1],
            layout_map=layout_map,
            variable_partitioner=partitioner,
        )
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((512,)),
                    keras.layers.Dense(2048, "tanh", name="one"),
                    keras.layers.Dense(512, name="two"),
                ]
            )
            model.compile(keras.optimizers.Adam(), "mse")
        shape = jax.ShapeDtypeStruct((64, 512), "float32")
        programs.append(strategy.compile_step(model, (shape, shape)))
    whole, divided = programs
    # Weights and two slots, over two cores, and then over eight replicas.
    assert whole.argument_bytes > 3 * kernels / 2
    assert divided.bytes_per_chip < 3 * kernels / 16 + 0.1e6
    # A core's half; weights as bfloat16, in which a TPU multiplies.
    sent = divided.collective_bytes
    assert sent["all-gather"] <= kernels / 4 + 0.05e6
    assert sent["reduce-scatter"] <= kernels / 2 + 0.05e6


@pytest.mark.parametrize(
    ("shape", "shards", "hosts"), [((2, 1), 2, 1), ((2, 2), 2, 2)]
)
def test_groups_keep_a_replicas_cores_together(shape, shards, hosts):
    strategy = ks.TPUStrategy.for_topology(
        "v5e:4x4",
        computation_shape=[*shape, 1, 1],
        variable_partitioner=ks.experimental.FullySharded(shards),
    )
    groups = strategy.mesh.mesh.devices
    cores = int(np.prod(shape))
    assert groups.shape == (16 // shards // cores, shards, cores)
    for group in groups:
        assert len({device.process_index for device in group.flat}) == hosts
        for replica in group:
            places = np.array([device.coords for device in replica])
            assert tuple(np.ptp(places, axis=0) + 1)[:2] == shape


def test_it_says_that_it_cannot_run():
    strategy = ks.TPUStrategy.for_topology("v5e:16x16")
    assert "256 replicas" in repr(strategy)
    model = build(strategy, "mlp")
    x, y = np.zeros((256, 784), "float32"), np.zeros(256, "int32")
    calls = [
        lambda: model.fit(x, y, verbose=0),
        lambda: model.predict(x, verbose=0),
        lambda: strategy.run(loop_step(strategy, model), ((x, y),)),
        lambda: strategy.reduce("sum", 1.0, axis=None),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="can only compile") as caught:
            call()
        assert "compile_step" in str(caught.value)
    for variable in model.variables:
        assert variable.value.sharding.device_set <= set(jax.devices())


def test_what_replicas_cannot_divide_is_refused_when_it_is_made():
    def last(path, shape, dtype):
        return len(shape) - 1

    strategy = ks.TPUStrategy.for_topology("v5e:2x2", variable_partitioner=last)
    with strategy.scope():
        keras.layers.Dense(8).build((None, 6))
        with pytest.raises(
            ValueError, match="multiple of the number of shards"
        ):
            keras.layers.Dense(6).build((None, 8))
    with pytest.raises(ValueError, match="shards=3 in slices"):
        ks.TPUStrategy.for_topology(
            "v5e:2x2", variable_partitioner=ks.experimental.FullySharded(3)
        )


def test_a_rematerialized_block_is_gathered_when_the_last_is_computed():
    strategy = ks.TPUStrategy.for_topology(
        "v5e:2x4", variable_partitioner=ks.experimental.FullySharded()
    )
    width, depth = 4096, 4
    with strategy.scope(), keras.RematScope(mode="full"):
        layers = [keras.layers.Dense(width, "tanh") for _ in range(depth)]
        model = keras.Sequential([keras.Input((width,)), *layers])
        model.compile("sgd", "mse")
    rows = jax.ShapeDtypeStruct((64, width), "float32")
    program = strategy.compile_step(model, (rows, rows))
    # A layer has 67 MB; gathered as XLA multiplies it, in bfloat16, 34.
    assert program.temporary_bytes < 120e6


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({"name": "v5e:3x3"}, ["v5e:3x3"]),
        ({"name": "none"}, ["'none'", "'v5e:4x4'"]),
        ({"name": "v5e:4x4", "computation_shape": [3, 1, 1, 1]}, ["3"]),
        ({"name": "v5e:4x4", "computation_shape": [3, 3, 1, 1]}, ["all cores"]),
        ({"name": "v5e:4x4", "computation_shape": [8, 1, 1, 1]}, ["8"]),
        ({"name": "v5e:4x4", "computation_shape": [0, 1, 1, 1]}, ["0"]),
        ({"name": "v5e:4x4", "computation_shape": [2, 2]}, ["[2, 2]"]),
    ],
)
def test_impossible_slices_and_shapes_are_refused(arguments, parts):
    with pytest.raises(ValueError, match="Received") as caught:
        ks.TPUStrategy.for_topology(**arguments)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("is_scaled", [False, True])
def test_accumulated_gradients_are_summed_in_the_branch_of_an_update(is_scaled):
    strategy = ks.TPUStrategy.for_topology("v5e:2x2")
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=4)
    if is_scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    with strategy.scope():
        hidden = keras.layers.Dense(512, "relu")
        model = keras.Sequential(
            [keras.Input((256,)), hidden, keras.layers.Dense(16)]
        )
        model.compile(optimizer, "mse")
    shapes = [jax.ShapeDtypeStruct((64, n), "float32") for n in (256, 16)]
    program = strategy.compile_step(model, tuple(shapes))
    weights = model.trainable_variables
    every, bytes_of_all_steps = count_reduced_bytes(program.as_text())
    # A loss, its denominator, and whether gradients are finite.
    assert bytes_of_all_steps <= 16
    assert every - bytes_of_all_steps == sum(
        4 * math.prod(w.shape) for w in weights
    )

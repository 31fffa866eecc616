"""Divided variables as the TPU compiler sees them: `./run test -m tpu`.

The bounds of docs/benchmarks.md, on a decoder of a few layers.
"""

import contextlib
import re

import jax
import keras
import pytest

import keras_strategies as ks
from benchmarks.sharded_tpu import LOW_EFFORT, Decoder, compile_size
from tests.support.kernel_gradients import adds_up_copies, compile_gradient

pytestmark = pytest.mark.tpu

SMALL = Decoder(
    num_layers=2, width=512, heads=4, hidden=2048, vocabulary=4096, length=512
)


def find_arrays(program, kind):
    """The shapes that instructions of a kind return, as text."""
    pattern = rf"= (.*?) {kind}(?:-start)?\("
    return re.findall(pattern, program.as_text())


@pytest.mark.parametrize("shards", [4, 8])
def test_weights_are_gathered_and_gradients_scattered(shards):
    count, program = compile_size(SMALL, "v5e:4x4", shards, options=LOW_EFFORT)
    sent = program.collective_bytes
    # Six of each block, forward and backward; the embedding and the head once.
    gathers = 6 * 2 * SMALL.num_layers + 2
    assert program.collectives["all-gather"] == gathers
    assert sent["reduce-scatter"] >= 0.6 * 4 * count
    # Of shards, between the groups; and of what is whole.
    assert sent["all-reduce"] < 1.2 * 4 * count / shards
    assert all(
        "bf16" not in shape for shape in find_arrays(program, "all-reduce")
    )
    assert program.collectives["collective-permute"] == 0
    whole = 4 * 3 * 512 * (2 * SMALL.num_layers + 1)
    batch = 2 * 4 * SMALL.length
    state = 12 * count / shards + whole + batch
    assert program.argument_bytes < 1.01 * state
    assert program.output_bytes < 1e5


def test_the_default_group_is_no_entire_torus():
    _, program = compile_size(SMALL, "v5p:4x4x4", options=LOW_EFFORT)
    sent = program.collective_bytes
    assert sent["all-gather"] > sent["all-reduce"]
    assert sent["reduce-scatter"] > sent["all-reduce"]


def test_programs_of_models_without_values_are_those_of_the_real_ones():
    texts = []
    for abstract in (False, True):
        keras.backend.clear_session()
        strategy = ks.TPUStrategy.for_topology(
            "v5e:2x4", variable_partitioner=ks.experimental.FullySharded()
        )
        values = ks.abstract() if abstract else contextlib.nullcontext()
        with strategy.scope(), values:
            model = keras.Sequential(
                [keras.Input((256,)), keras.layers.Dense(256, "relu")]
            )
            model.compile("adam", "mse")
        rows = jax.ShapeDtypeStruct((16, 256), "float32")
        text = strategy.compile_step(model, (rows, rows)).as_text()
        text = re.sub(r", metadata={[^}]*}", "", text)
        texts.append([t for t in text.splitlines() if t[:1] in (" ", "%")])
    assert texts[0] == texts[1]


def test_blocks_that_are_computed_again_keep_no_weights():
    _, again = compile_size("dense", "v5e:2x4", rows=2, options=LOW_EFFORT)
    _, kept = compile_size(
        "dense", "v5e:2x4", rows=2, remat=False, options=LOW_EFFORT
    )
    # Two float32 weights of 16.8 MB and a gradient at a time, not all twelve.
    assert again.temporary_bytes < 3.2 * 16.8e6
    assert kept.temporary_bytes > 10 * 16.8e6
    state = 12 * (12 * 2048 * 2048 / 8 + 12 * 2048)
    assert again.argument_bytes < state + 1e5
    assert again.output_bytes < 1e5


def test_gradients_of_convolutions_are_not_added_up_twice():
    devices = ks.TPUStrategy.for_topology("v5e:2x2").mesh.devices
    for is_constrained in (False, True):
        text = compile_gradient(devices, is_constrained=is_constrained)
        assert adds_up_copies(text) != is_constrained


@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1"])
def test_slots_on_the_host_take_no_memory_of_a_chip(topology):
    """The bytes of arguments are computed by hand."""
    programs, width, words, length = [], 1024, 4096, 32
    for offload in (None, "optimizer"):
        keras.backend.clear_session()
        strategy = ks.TPUStrategy.for_topology(
            topology,
            variable_partitioner=ks.experimental.FullySharded(offload=offload),
        )
        with strategy.scope(), ks.abstract():
            model = keras.Sequential(
                [
                    keras.Input((length,), dtype="int32"),
                    keras.layers.Embedding(words, width),
                    *[keras.layers.Dense(width, "gelu") for _ in range(4)],
                    keras.layers.Dense(words),
                ]
            )
            model.compile(
                "adam", keras.losses.SparseCategoricalCrossentropy(True)
            )
        ids = jax.ShapeDtypeStruct(
            (strategy.num_replicas_in_sync, length), "int32"
        )
        programs.append(
            strategy.compile_step(
                model, (ids, ids), compiler_options=LOW_EFFORT
            )
        )
    before, after = programs
    chips = before.num_replicas
    kernels = 4 * (2 * words * width + 4 * width * width) / chips
    biases = 4 * (4 * width + words)
    batch = 2 * 4 * length
    memory = after.executable.memory_analysis()
    # Tiles of small arrays, the numbers of steps, and metrics.
    small = 20_000
    assert abs(before.argument_bytes - 3 * (kernels + biases) - batch) < small
    assert abs(after.argument_bytes - kernels - 3 * biases - batch) < small
    assert memory.host_argument_size_in_bytes == 2 * kernels
    assert memory.host_alias_size_in_bytes == 2 * kernels
    assert after.output_bytes < small
    # The update takes a few slots at a time.
    assert after.bytes_per_chip < before.bytes_per_chip - 1.5 * kernels

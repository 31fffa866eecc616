"""Long contexts, compiled for TPUs: `./run test -m tpu`."""

import keras
import pytest

import keras_strategies as ks
from keras_strategies.planning.program.costs import Costs
from keras_strategies.tpu.chips import find_chip
from tests.support.long_decoders import compile_decoder

pytestmark = pytest.mark.tpu

LENGTH, CORES = 131_072, 16
LLAMA = {"width": 4096, "heads": 32, "kv_heads": 8, "hidden": 14336}


@pytest.fixture(autouse=True)
def dtype_policy():
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy("float32")


def count_whole(words):
    """The operations of a step of one sequence, all blocks' forward twice."""
    width, heads, kv_heads, hidden = LLAMA.values()
    size = width // heads
    block = width * size * 2 * (heads + kv_heads) + 3 * width * hidden
    # The head: forward, again, and two derivatives.
    products = 2 * LENGTH * (2 * 4 * block + 4 * width * words)
    # A kernel's pass has 2, 2 (again), 3 and 4 products.
    pairs = LENGTH * (LENGTH + 1) // 2
    return products + 2 * 11 * 2 * pairs * width


def test_a_sequence_of_131072_tokens_on_16_chips():
    words = 128_256
    strategy = ks.TPUStrategy.for_topology(
        "v5p:4x4x4",
        computation_shape=(4, 4, 1, 1),
        context_parallel=True,
        variable_partitioner=ks.experimental.FullySharded(
            4, reduce_dtype="bfloat16"
        ),
    )
    program = compile_decoder(strategy, LENGTH, words=words, **LLAMA)
    assert program.temporary_bytes <= 3.0e9
    # Weights and two moments, in float32, over all 64 chips.
    assert program.argument_bytes < 0.29e9
    devices = list(strategy.mesh.devices)
    costs = Costs.measure(program.executable, 0, find_chip(devices[0]), devices)
    share = costs.flops / (count_whole(words) / CORES)
    assert 0.95 < share < 1.1
    # Each chip has 8,192 tokens, outside of attention.
    text = program.as_text()
    assert "[1,8192,4096]" in text
    assert f"[1,{LENGTH},4096]" not in text

"""Long contexts, compiled for GPUs without one: `./run test -m gpu`."""

import keras
import pytest

import keras_strategies as ks
from tests.support.long_decoders import compile_decoder

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def dtype_policy():
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy("float32")


def test_eight_gpus_share_65536_tokens():
    length = 65_536
    strategy = ks.MirroredStrategy.for_topology(
        "h100:8x8",
        computation_shape=[8, 1, 1, 1],
        context_parallel=True,
        variable_partitioner=ks.experimental.FullySharded(8),
    )
    sizes = {"width": 1024, "heads": 8, "kv_heads": 8, "hidden": 2048}
    program = compile_decoder(strategy, length, words=4096, **sizes)
    text = program.as_text()
    # cuDNN's attention of two blocks: forward, again, and the gradient.
    assert text.count("__cudnn$fmha") == 6
    assert f"{length},{length}" not in text
    assert f"[1,{length},1024]" not in text
    # An array of a width for each token of a GPU has 17 MB.
    assert program.temporary_bytes < 0.8e9

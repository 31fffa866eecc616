"""cuDNN's kernels in steps that are compiled for absent GPUs."""

import re
from collections import Counter

import jax
import keras
import pytest
from keras.src.backend.common import global_state

import keras_strategies as ks

pytestmark = pytest.mark.gpu

LENGTH, WIDTH, HEADS = 256, 64, 2
ATTENTION = re.compile(r'"__cudnn\$fmha\w*?(Backward)?"')


class Block(keras.layers.Layer):
    def __init__(self, dropout=0.0, **options):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(
            HEADS, WIDTH // HEADS, dropout=dropout
        )
        self.options = options

    def build(self, shape):
        self.attention.build(shape, shape)
        super().build(shape)

    def call(self, x):
        options = self.options
        if options.get("attention_mask") == "causal":
            ones = keras.ops.ones((1, LENGTH, LENGTH), "bool")
            options = {"attention_mask": keras.ops.tril(ones)}
        return x + self.attention(x, x, **options)


@pytest.fixture(autouse=True)
def dtype_policy():
    yield
    keras.config.set_dtype_policy("float32")


def strategy_of(gpus="h100:4", cores=1, is_sharded=False):
    partitioner = ks.experimental.FullySharded() if is_sharded else None
    return ks.MirroredStrategy.for_topology(
        gpus,
        computation_shape=(cores, 1, 1, 1),
        variable_partitioner=partitioner,
    )


def decoder(
    kind="train",
    *,
    rows=8,
    layers=1,
    dtype="mixed_bfloat16",
    has_padding=False,
    has_remat=False,
    dropout=0.0,
    is_causal=True,
    **options,
):
    strategy = strategy_of(**options)
    keras.config.set_dtype_policy(dtype)
    causal = {"use_causal_mask": True} if is_causal else {}
    if is_causal == "array":
        causal = {"attention_mask": "causal"}
    with strategy.scope(), ks.abstract():
        tokens = keras.Input((LENGTH,), dtype="int32")
        x = keras.layers.Embedding(9, WIDTH, mask_zero=has_padding)(tokens)
        if has_padding:
            layer = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
            x = layer(x, x, **causal)
        else:
            with keras.RematScope(mode="full" if has_remat else None):
                for _ in range(layers):
                    x = Block(dropout, **causal)(x)
        model = keras.Model(tokens, x)
        model.compile("sgd", "mse")
    x = jax.ShapeDtypeStruct((rows, LENGTH), "int32")
    y = jax.ShapeDtypeStruct((rows, LENGTH, WIDTH), "float32")
    if kind == "run":
        return strategy.compile_run(model, (x,))
    return strategy.compile_step(model, (x, y), kind=kind)


CASES = {
    "train, sharded": ({"is_sharded": True}, 1, 1),
    "causal array": ({"is_causal": "array"}, 1, 1),
    "causal array, two cores": ({"is_causal": "array", "cores": 2}, 1, 1),
    "padding, A100": (
        {"has_padding": True, "dtype": "mixed_float16", "gpus": "a100:4"},
        *(1, 1),
    ),
    # Keras 3.15 cannot rematerialize a layer whose call is causal.
    "rematerialized, hosts": (
        {"has_remat": True, "is_causal": False, "gpus": "h100:2x2"},
        *(2, 1),
    ),
    # The kernel's function is mapped over the GPUs of a replica.
    "two layers, two cores": ({"layers": 2, "cores": 2}, 2, 2),
    "one replica": ({"cores": 4, "kind": "predict"}, 1, 0),
    "indivisible, two cores, padding": (
        {"rows": 7, "cores": 2, "has_padding": True},
        *(1, 1),
    ),
    "indivisible": ({"rows": 6, "kind": "test"}, 1, 0),
    "run": ({"kind": "run"}, 1, 0),
    "float32": ({"dtype": "float32", "kind": "predict"}, 0, 0),
    "dropout": ({"dropout": 0.1, "kind": "predict"}, 0, 0),
}


@pytest.mark.parametrize(
    ("case", "forward", "backward"), CASES.values(), ids=CASES
)
def test_attention_of_a_step(recwarn, case, forward, backward):
    text = decoder(**case).as_text()
    found = Counter(ATTENTION.findall(text))
    assert (found[""], found["Backward"]) == (forward, backward)
    is_causal = case.get("is_causal", True) and not case.get("has_padding")
    kind = "CAUSAL" if is_causal else "NO_MASK"
    assert text.count(f'"mask_type": "{kind}"') == forward + backward
    # A step with the kernel is still known to be a mean over rows.
    assert not [w for w in recwarn if "global batch" in str(w.message)]


@pytest.fixture
def switch_off():
    before = keras.config.is_flash_attention_enabled()
    yield keras.config.disable_flash_attention
    global_state.set_global_attribute("flash_attention", before)


def test_a_step_with_the_kernel_stores_no_scores(switch_off):
    kernel = decoder()
    switch_off()
    operations = decoder()
    assert not ATTENTION.search(operations.as_text())
    # Two rows on each GPU, in float32.
    scores = 2 * HEADS * LENGTH**2 * 4
    assert kernel.temporary_bytes < operations.temporary_bytes - 2 * scores


def lstm(kind="train", *, rows=16, dtype="float32", layer=None, **options):
    strategy = strategy_of(**options)
    keras.config.set_dtype_policy(dtype)
    with strategy.scope(), ks.abstract():
        layers = [layer or keras.layers.LSTM(32), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((12, 8)), *layers])
        model.compile("sgd", "mse")
    x = jax.ShapeDtypeStruct((rows, 12, 8), "float32")
    y = jax.ShapeDtypeStruct((rows, 4), "float32")
    return strategy.compile_step(model, (x, y), kind=kind)


LSTMS = {
    "both ways, sharded": (
        lambda: lstm(
            layer=keras.layers.Bidirectional(keras.layers.LSTM(32)),
            is_sharded=True,
        ),
        *(1, 1),
    ),
    "two cores": (lambda: lstm(cores=2, gpus="a100:4"), 1, 1),
    "predict": (lambda: lstm("predict"), 1, 0),
    "bfloat16": (lambda: lstm(dtype="mixed_bfloat16"), 0, 0),
    "float16": (lambda: lstm("predict", dtype="mixed_float16"), 0, 0),
    # XLA cannot partition the kernel, but partitions the loop.
    "indivisible": (lambda: lstm("test", rows=6), 0, 0),
    "other activation": (
        lambda: lstm("predict", layer=keras.layers.LSTM(32, activation="relu")),
        *(0, 0),
    ),
}


@pytest.mark.parametrize(
    ("compile_step", "forward", "backward"), LSTMS.values(), ids=LSTMS
)
def test_an_lstm_of_a_step(recwarn, compile_step, forward, backward):
    text = compile_step().as_text()
    found = (
        text.count('"cudnn_rnn_ffi"'),
        text.count('"cudnn_rnn_bwd_ffi"'),
    )
    assert found == (forward, backward)
    assert bool(re.search(r" while\(", text)) == (not forward)
    assert not [w for w in recwarn if "global batch" in str(w.message)]

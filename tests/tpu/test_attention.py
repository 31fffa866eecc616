"""Attention in steps that are compiled for TPUs: `./run test -m tpu`."""

import warnings

import jax
import keras
import pytest
from keras import ops

import keras_strategies as ks
from keras_strategies.kernels import attention, splash_attention
from keras_strategies.planning.program.costs import Costs
from keras_strategies.tpu.chips import find_chip
from keras_strategies.tpu.device_groups import make_tpu_devices

pytestmark = pytest.mark.tpu

LENGTH, WIDTH = 384, 256
KERNEL = "tpu_custom_call"


class Block(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, WIDTH // 2)
        self.options = options

    def build(self, shape):
        self.attention.build(shape, shape)
        super().build(shape)

    def call(self, x):
        return x + self.attention(x, x, **self.options)


def compile_program(
    kind="train",
    *,
    is_sharded=False,
    cores=1,
    length=LENGTH,
    rows=8,
    has_padding=False,
    has_remat=False,
    layers=1,
    dtype="float32",
    **options,
):
    partitioner = ks.experimental.FullySharded() if is_sharded else None
    strategy = ks.TPUStrategy.for_topology(
        "v5e:2x2",
        variable_partitioner=partitioner,
        computation_shape=(1, cores, 1, 1),
    )
    keras.config.set_dtype_policy(dtype)
    with strategy.scope(), ks.abstract():
        tokens = keras.Input((length,), dtype="int32")
        x = keras.layers.Embedding(9, WIDTH, mask_zero=has_padding)(tokens)
        if has_padding:
            layer = keras.layers.MultiHeadAttention(2, WIDTH // 2)
            x = layer(x, x, **options)
        else:
            with keras.RematScope(mode="full" if has_remat else None):
                for _ in range(layers):
                    x = Block(**options)(x)
        model = keras.Model(tokens, x)
        model.compile("sgd", "mse")
    x = jax.ShapeDtypeStruct((rows, length), "int32")
    y = jax.ShapeDtypeStruct((rows, length, WIDTH), "float32")
    if kind == "run":
        return strategy.compile_run(model, (x,))
    return strategy.compile_step(model, (x, y), kind=kind)


@pytest.fixture(autouse=True)
def dtype_policy():
    yield
    keras.config.set_dtype_policy("float32")


CASES = {
    "train": ({}, 3),
    "sharded": ({"is_sharded": True}, 3),
    "test": ({"kind": "test"}, 1),
    "predict": ({"kind": "predict"}, 1),
    "run": ({"kind": "run"}, 1),
    "causal": ({"use_causal_mask": True}, 3),
    "padding": ({"has_padding": True}, 3),
    "causal, padding": ({"has_padding": True, "use_causal_mask": True}, 3),
    "bfloat16": ({"dtype": "mixed_bfloat16", "is_sharded": True}, 3),
    "rematerialized": ({"has_remat": True}, 4),
    "two cores": ({"cores": 2}, 3),
    # Equal layers must not share a mapped function: the compiler would crash.
    "two layers, two cores": ({"layers": 2, "cores": 2}, 6),
    "two cores, padding": ({"cores": 2, "has_padding": True}, 3),
    "two cores predict": ({"cores": 2, "kind": "predict"}, 1),
    "two cores run": ({"cores": 2, "kind": "run"}, 1),
    "indivisible": ({"rows": 6}, 3),
    "indivisible, two cores": ({"rows": 7, "cores": 2}, 3),
    "one row": ({"rows": 1}, 3),
    "predict indivisible": ({"rows": 6, "kind": "predict"}, 1),
    "length 200": ({"length": 200}, 0),
}


@pytest.mark.parametrize(("case", "count"), CASES.values(), ids=CASES)
def test_kernels_of_a_step(recwarn, case, count):
    text = compile_program(**case).as_text()
    assert text.count(KERNEL) == count
    # The scores are not stored.
    has_scores = f",2,{LENGTH},{LENGTH}]" in text
    assert not has_scores
    # A step with the kernel is still known to be a mean over rows.
    assert not [w for w in recwarn if "global batch" in str(w.message)]


class MaskedByRows(keras.layers.Layer):
    """Attention of `heads` heads of depth 64, with an array as its mask."""

    def __init__(self, heads):
        super().__init__()
        self.heads = heads

    def build(self, shape):
        self.dense = keras.layers.Dense(64 * self.heads)
        self.dense.build(shape)
        super().build(shape)

    def call(self, x):
        query = self.dense(x)
        query = query.reshape(*x.shape[:2], self.heads, 64)
        mask = (x[:, None, :, :1] > 0) | (x[:, None, None, :, 1] > 0)
        result = keras.ops.dot_product_attention(query, query, query, mask=mask)
        return keras.ops.mean(result, (2, 3))[..., None]


@pytest.mark.parametrize(
    ("length", "heads", "kind", "count"),
    [(1024, 16, "predict", 1), (384, 12, "train", 3), (1152, 8, "train", 3)],
)
def test_tables_of_mask_arrays_fit_into_scalar_memory(
    length, heads, kind, count
):
    strategy = ks.TPUStrategy.for_topology("v5e:2x2")
    with strategy.scope(), ks.abstract():
        x = keras.Input((length, 32))
        model = keras.Model(x, MaskedByRows(heads)(x))
        model.compile("sgd", "mse")
    # 64 rows for each chip.
    x = jax.ShapeDtypeStruct((256, length, 32), "float32")
    y = jax.ShapeDtypeStruct((256, length, 1), "float32")
    text = strategy.compile_step(model, (x, y), kind=kind).as_text()
    assert text.count(KERNEL) == count


class DecoderAttention(keras.layers.Layer):
    """Attention with a mask as decoders of keras-hub compute it."""

    def __init__(self, heads):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(heads, 64)

    def build(self, shapes):
        self.attention.build(shapes[0], shapes[0])
        super().build(shapes)

    def call(self, inputs):
        x, padding = inputs
        places = ops.arange(x.shape[1], dtype="float32")
        causal = ops.expand_dims(ops.expand_dims(places, 1) >= places, 0)
        causal = ops.broadcast_to(causal, (ops.shape(x)[0], *causal.shape[1:]))
        padding = ops.cast(ops.expand_dims(padding, 1), "int32")
        mask = ops.minimum(padding, causal)
        return self.attention(x, x, attention_mask=mask)


@pytest.mark.parametrize(
    ("length", "heads", "rows", "is_decoder"),
    [
        *((256, 4, rows, False) for rows in (8, 16, 24, 32)),
        *((1024, 12, rows, True) for rows in (4, 8, 16)),
    ],
)
def test_steps_with_mask_arrays_are_mapped(
    recwarn, length, heads, rows, is_decoder
):
    strategy = ks.TPUStrategy.for_topology("v5e:2x2")
    keras.config.set_dtype_policy("mixed_bfloat16")
    shape = (length,) if is_decoder else (length, length)
    dtype = "int32" if is_decoder else "bool"
    with strategy.scope(), ks.abstract():
        inputs = [
            keras.Input((length, 64 * heads)),
            keras.Input(shape, dtype=dtype),
        ]
        if is_decoder:
            x = DecoderAttention(heads)(inputs)
        else:
            layer = keras.layers.MultiHeadAttention(heads, 64)
            x = layer(inputs[0], inputs[0], attention_mask=inputs[1])
        model = keras.Model(inputs, keras.layers.Dense(4)(x))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
    rows *= strategy.num_replicas_in_sync
    x = [
        jax.ShapeDtypeStruct((rows, length, 64 * heads), "float32"),
        jax.ShapeDtypeStruct((rows, *shape), dtype),
    ]
    y = jax.ShapeDtypeStruct((rows, length), "int32")
    options = {"exec_time_optimization_effort": -1.0}
    program = strategy.compile_step(model, (x, y), compiler_options=options)
    assert not [w for w in recwarn if "global batch" in str(w.message)]
    assert program.as_text().count(KERNEL) == 3
    # Of a mask that is known, no array is computed.
    has_array = f",{length},{length}]" in program.as_text()
    assert has_array == (not is_decoder)


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("float32", "high"), ("mixed_bfloat16", "highest")],
)
def test_products_of_other_precisions_are_those_of_xla(dtype, precision):
    with jax.default_matmul_precision(precision):
        assert compile_program(dtype=dtype).as_text().count(KERNEL) == 0


class AttentionByEinsum(keras.layers.Layer):
    def call(self, x):
        scores = ops.softmax(ops.einsum("btd,bsd->bts", x, x))
        return ops.einsum("bts,bsd->btd", scores, x)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (AttentionByEinsum, r"shape \(1, 65536, 65536\).*test_attention.py"),
        (Block, "stores a matrix product of shape"),
    ],
    ids=["einsum", "Keras"],
)
def test_scores_that_do_not_fit_are_told_before_compiling(layer, text):
    strategy = ks.TPUStrategy.for_topology("v5e:2x2")
    length = 2**16
    with strategy.scope(), ks.abstract():
        x = keras.Input((length, WIDTH))
        model = keras.Model(x, layer()(x))
        model.compile("sgd", "mse")
    x = jax.ShapeDtypeStruct((4, length, WIDTH), "float32")
    # Otherwise the compiler's error comes: there is too little memory.
    with (
        jax.default_matmul_precision("highest"),
        warnings.catch_warnings(action="error", category=UserWarning),
        pytest.raises(UserWarning, match=text),
    ):
        strategy.compile_step(model, (x, x))


def list_costs(program):
    devices = make_tpu_devices("v5e:2x2")
    chip = find_chip(devices[0])
    return Costs.measure(program.executable, 0.0, chip, devices)


def test_operations_of_kernels_are_counted(monkeypatch):
    given = {"is_sharded": True, "use_causal_mask": True}
    figures = list_costs(compile_program(**given))
    pairs = LENGTH * (LENGTH + 1) / 2
    # Rows of a replica, heads, depth; products of three kernels.
    assert figures.kernel_flops == 2 * 2 * pairs * (WIDTH // 2) * 2 * 9
    monkeypatch.setattr(
        attention, "find_reason_against_kernel", lambda *_, **__: "a test"
    )
    xla_costs = list_costs(compile_program(**given))
    assert xla_costs.kernel_flops == 0
    # XLA's attention computes the scores that the mask excludes.
    assert figures.flops == pytest.approx(xla_costs.flops, rel=0.2)


def test_operations_of_kernels_in_groups_of_rows_are_counted(monkeypatch):
    def count_operations():
        executable = strategy.compile_step(model, (x, y), kind="test")
        return list_costs(executable).kernel_flops

    strategy = ks.TPUStrategy.for_topology("v5e:2x2")
    with strategy.scope(), ks.abstract():
        x = keras.Input((LENGTH, 32))
        model = keras.Model(x, MaskedByRows(2)(x))
        model.compile("sgd", "mse")
    x = jax.ShapeDtypeStruct((16, LENGTH, 32), "float32")
    y = jax.ShapeDtypeStruct((16, LENGTH, 1), "float32")
    at_once = count_operations()
    monkeypatch.setattr(
        splash_attention, "count_rows_at_once", lambda *sizes: 1
    )
    attention._make_call.cache_clear()
    assert count_operations() == at_once > 0

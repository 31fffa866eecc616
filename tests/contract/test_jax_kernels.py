"""Losses that are computed with kernels are known to be means over rows; and
what JAX asks about the devices before it calls one."""

import contextlib
import inspect
import types

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as attention
from jax.experimental import pallas, rnn
from jaxlib import gpu_rnn
from jaxlib.gpu_common_utils import GpuLibNotLinkedError

from keras_strategies.passes.row_kinds import losses, marks
from keras_strategies.passes.row_kinds.losses import Verdict
from keras_strategies.passes.stages import all_equations

ROWS = 4


def verdict(fn, *shapes, others=()):
    """Of a mean of what `fn` makes of rows, in traces of 4 and of 8 rows."""

    def loss(*values):
        return marks.mark(jnp.mean(fn(*values)), marks.LOSS)

    one, two = (
        jax.make_jaxpr(loss)(
            *(jnp.zeros((rows, *shape)) for shape in shapes), *others
        )
        for rows in (ROWS, 2 * ROWS)
    )
    data = range(len(shapes))
    return losses.losses_in(one, data, ROWS, two).verdict


def attend(query, key, value, bias=None, lengths=None):
    none = jnp.zeros(0)
    operands = [query, key, value, none if bias is None else bias]
    operands += [none if lengths is None else lengths] * 2 + [none] * 4
    return attention._dot_product_attention_fwd_p_wrapper.bind(
        *operands,
        scale=1.0,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(bias is not None, False),
        mask_type=0,
        layout=attention.AttentionLayout.BTNH.value,
        sliding_window_length=0,
        is_training=True,
    )[0]


HEADS = (6, 2, 8)


def test_attention_of_cudnn():
    assert verdict(attend, HEADS, HEADS, HEADS) is Verdict.MEAN
    bias = jnp.ones((1, 2, 6, 6))
    others = [bias]
    found = verdict(attend, HEADS, HEADS, HEADS, others=others)
    assert found is Verdict.MEAN
    of_rows = verdict(attend, HEADS, HEADS, HEADS, (2, 6, 6))
    assert of_rows is Verdict.MEAN


def test_attention_between_rows_is_found():
    # Each row's query meets another's keys.
    def crossed(query, key):
        return attend(query, key[::-1], key)

    assert verdict(crossed, HEADS, HEADS) is Verdict.MIXED

    def by_place(query):
        lengths = jnp.arange(query.shape[0])
        return attend(query, query, query, lengths=lengths)

    assert verdict(by_place, HEADS) is Verdict.MIXED

    def along_the_batch(query):
        turned = jnp.swapaxes(query, 0, 1)
        return attend(turned, turned, turned)

    assert verdict(along_the_batch, HEADS) is Verdict.MIXED


@pytest.fixture
def cudnn(monkeypatch):
    """With the plugin's function that a trace asks for a size."""
    sizes = types.SimpleNamespace(
        compute_rnn_workspace_reserve_space_sizes=lambda *given: (
            0,
            16 * given[3],
        )
    )
    monkeypatch.setattr(rnn, "gpu_rnn", sizes)


def lstm(x, weights, state=None, lengths=None):
    count, steps, size = x.shape
    if state is None:
        state = jnp.zeros((1, count, 3))
    if lengths is None:
        lengths = jnp.full(count, steps, "int32")
    outputs, _, _ = rnn.lstm(
        x, state, state, weights, lengths, size, 3, 1, 0.0, False
    )
    return outputs


def weights():
    return jnp.ones(rnn.get_num_params_in_lstm(5, 3, 1, False))


def test_an_lstm_of_cudnn(cudnn):
    assert verdict(lstm, (7, 5), others=[weights()]) is Verdict.MEAN


def test_an_lstm_with_lengths_by_place_is_found(cudnn):
    def by_place(x, given):
        lengths = jnp.arange(x.shape[0], dtype="int32")
        return lstm(x, given, lengths=lengths)

    assert verdict(by_place, (7, 5), others=[weights()]) is Verdict.MIXED


QUESTIONS = {
    "check_cudnn_version": [],
    "check_compute_capability": ["capability"],
    "is_cuda_compute_capability_equal": ["capability"],
}


def test_attention_of_cudnn_asks_the_process(monkeypatch):
    """kernels/kernels.py answers for the devices of a mesh."""
    asked = []

    def answer(name, value):
        def check(*args):
            asked.append((name, *args))
            return value

        return check

    for name, parameters in QUESTIONS.items():
        question = getattr(attention, name)
        assert list(inspect.signature(question).parameters) == parameters
    monkeypatch.setattr(
        attention, "check_cudnn_version", answer("version", 91000)
    )
    for name in list(QUESTIONS)[1:]:
        monkeypatch.setattr(attention, name, answer(name, name[0] == "c"))

    def attend(query, **options):
        return jax.nn.dot_product_attention(
            query, query, query, implementation="cudnn", **options
        )

    query = jnp.ones((2, 8, 2, 192), "bfloat16")
    assert jax.eval_shape(attend, query).shape == query.shape
    assert set(asked) == {
        ("version",),
        ("check_compute_capability", "9.0"),
        ("is_cuda_compute_capability_equal", "10.3"),
    }
    options = list(inspect.signature(jax.nn.dot_product_attention).parameters)
    assert options[:5] == ["query", "key", "value", "bias", "mask"]


def test_an_lstm_of_cudnn_asks_for_sizes(monkeypatch):
    asked = []

    def sizes(*args):
        asked.append(args)
        return 64, 128

    name = "compute_rnn_workspace_reserve_space_sizes"
    assert rnn.gpu_rnn is gpu_rnn
    monkeypatch.setattr(gpu_rnn, name, sizes, raising=False)
    # JAX caches the answer for these numbers.
    traced = jax.jit(lstm).trace(jnp.zeros((4, 11, 5)), weights())
    assert set(asked) == {(5, 3, 1, 4, 11, 0.0, False, True)}
    (equation,) = (
        e for e in all_equations(traced.jaxpr) if e.primitive.name == "rnn_fwd"
    )
    # JAX reserves as many float32 numbers as cuDNN needs bytes.
    assert equation.outvars[-1].aval.str_short() == "float32[128]"
    asked.clear()
    # Without JAX's CUDA plugin, it fails after the question.
    with contextlib.suppress(GpuLibNotLinkedError):
        traced.lower(lowering_platforms=("cuda",))
    assert asked, "lowering asks for the size of the workspace"


def kernel(x, y, out):
    out[...] = jnp.tanh(x[...] @ y[...])


def product(x, y):
    """A matrix product by blocks of two rows."""
    blocks = x.shape[0] // 2
    return pallas.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype),
        grid=(blocks,),
        in_specs=[
            pallas.BlockSpec((2, x.shape[1]), lambda i: (i, 0)),
            pallas.BlockSpec(y.shape, lambda i: (0, 0)),
        ],
        out_specs=pallas.BlockSpec((2, y.shape[1]), lambda i: (i, 0)),
        interpret=True,
    )(x, y)


def test_a_kernel_mapped_over_rows():
    given = jnp.ones((3, 5))
    shared = jax.vmap(product, (0, None))
    assert verdict(shared, (6, 3), others=[given]) is Verdict.MEAN
    assert verdict(jax.vmap(product), (6, 3), (3, 5)) is Verdict.MEAN
    twice = jax.vmap(jax.vmap(product))
    assert verdict(twice, (2, 6, 3), (2, 3, 5)) is Verdict.MEAN


def test_a_kernel_that_sees_other_rows_is_found():
    shared = jax.vmap(product, (0, None))
    assert verdict(lambda x: product(x, x.T), (3,)) is Verdict.MIXED
    crossed = lambda x, y: jax.vmap(product)(x, y[::-1])  # noqa: E731
    assert verdict(crossed, (6, 3), (3, 5)) is Verdict.MIXED

    # Each row of the batch is in every kernel's block.
    def along(x):
        return shared(jnp.swapaxes(x, 0, 1), jnp.ones((3, 5)))

    assert verdict(along, (6, 3)) is Verdict.MIXED

    def by_place(x):
        scale = jnp.arange(x.shape[0] * 15.0).reshape(-1, 3, 5)
        return jax.vmap(product)(x, scale)

    assert verdict(by_place, (6, 3)) is Verdict.MIXED


def test_a_kernel_that_counts_rows_is_found():
    def counted(x):
        count = x.shape[0]

        def scaled(row, out):
            out[...] = row[...] / count

        shape = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
        call = pallas.pallas_call(scaled, out_shape=shape, interpret=True)
        return jax.vmap(call)(x)

    assert verdict(counted, (6, 3)) is Verdict.MIXED

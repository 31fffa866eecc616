"""Attention in steps for TPUs, by the formula in NumPy."""

import contextlib
import re
import threading
import types
import warnings

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras.src.backend.common import global_state

import keras_strategies as ks
from keras_strategies.keras_bridge.keras_names import NN as keras_nn
from keras_strategies.kernels import attention as attention_module
from keras_strategies.kernels.attention import find_reason_against_kernel
from keras_strategies.kernels.kernels import kernels_for
from keras_strategies.kernels.mapped_kernels import map_attention
from keras_strategies.passes.row_kinds import losses, marks
from keras_strategies.passes.row_kinds.losses import Verdict
from keras_strategies.run import replica_trace
from keras_strategies.step import model_call, model_program
from keras_strategies.step.analysis import warn_of_products
from tests.contract.test_jax_kernels import verdict
from tests.support.combinations import combine, few
from tests.support.splash import interpreted  # noqa: F401
from tests.support.strategies import cores_strategy

pytestmark = pytest.mark.usefixtures("interpreted")


class Mesh(types.SimpleNamespace):
    """Of devices that are no TPUs; equal only to itself."""

    __hash__ = object.__hash__


CHIP = types.SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
TPUS = Mesh(
    devices=[CHIP],
    platform="tpu",
    num_replicas=1,
    cores_per_replica=1,
    model_axis="model",
)
CPUS = types.SimpleNamespace(platform="cpu", devices=jax.devices())
BATCH, LENGTH, HEADS, DEPTH = 3, 128, 2, 8
RNG = np.random.default_rng(0)


def slow(*args):
    return pytest.param(*args, marks=pytest.mark.slow)


def drawn(*shape):
    return RNG.normal(size=shape).astype("float32")


QUERY = drawn(BATCH, LENGTH, HEADS, DEPTH)
KEY, VALUE = drawn(2, BATCH, LENGTH, HEADS, DEPTH)
MASK = RNG.random((BATCH, 1, 1, LENGTH)) > 0.2
BIAS = drawn(1, HEADS, LENGTH, LENGTH)


@pytest.fixture
def on_tpu(monkeypatch):
    """In which Keras takes the machine for a TPU's."""

    class Jax:
        def __getattr__(self, name):
            return getattr(jax, name)

        def devices(self):
            return [TPUS]

    monkeypatch.setattr(keras_nn, "jax", Jax())


@pytest.fixture(params=["kernel", "XLA"])
def computed_by(request, monkeypatch):
    """By what attention is computed, and whether a kernel was made."""
    if request.param == "XLA":
        find = lambda *_, **__: "a test asks for it"  # noqa: E731
        monkeypatch.setattr(
            attention_module, "find_reason_against_kernel", find
        )
    return request.param


def expected(
    query, key, value, bias=0.0, mask=True, scale=None, is_causal=False, cap=0
):
    repeats = query.shape[2] // key.shape[2]
    key, value = (np.repeat(x, repeats, axis=2) for x in (key, value))
    scores = np.einsum("bthd,bshd->bhts", query, key)
    scores *= DEPTH**-0.5 if scale is None else scale
    if cap:
        scores = cap * np.tanh(scores / cap)
    scores = np.where(mask, scores + bias, -np.inf)
    if is_causal:
        later = np.triu(np.ones(scores.shape[-2:], bool), 1)
        scores[..., later] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    return np.einsum("bhts,bshd->bthd", shares, value)


def attend(cap=None, **given):
    # Keras's public function refuses caps where there is no TPU.
    def attention(query, key, value):
        return keras_nn.dot_product_attention(
            query, key, value, attn_logits_soft_cap=cap, **kwargs
        )

    arrays = [given.pop(name) for name in ("query", "key", "value")]
    kwargs = given
    return np.asarray(jax.jit(attention)(*arrays))


@pytest.mark.parametrize(
    ("given", "cap"),
    combine(
        [
            {},
            {"scale": 0.7},
            {"is_causal": True},
            {"mask": MASK},
            {"mask": MASK, "is_causal": True, "scale": 0.3},
            {"mask": MASK, "bias": BIAS},
            {"mask": np.broadcast_to(MASK[:, 0], (BATCH, LENGTH, LENGTH))},
            {"mask": MASK[0, 0]},
            {"key": KEY[:, :, :1], "value": VALUE[:, :, :1]},
            {"flash_attention": True},
        ],
        [None, 0.5],
        every=2,
    ),
    ids=lambda value: (
        "-".join(value) or "plain" if isinstance(value, dict) else None
    ),
)
def test_attention_for_tpus_is_what_its_arguments_say(
    on_tpu, computed_by, given, cap
):
    given = {"query": QUERY, "key": KEY, "value": VALUE} | given
    with kernels_for(TPUS):
        found = attend(cap, **given)
    given.pop("flash_attention", None)
    mask = given.get("mask", np.ones((1, 1, 1, 1), bool))
    given["mask"] = mask[:, None] if mask.ndim == 3 else mask
    wanted = expected(**given, cap=cap or 0)
    np.testing.assert_allclose(found, wanted, atol=2e-5)


@pytest.mark.parametrize("cap", [None, 0.5])
@pytest.mark.parametrize("which", [0, 1, 2, None])
def test_the_dtype_is_a_common_one(on_tpu, cap, which):
    dtypes = ["bfloat16"] * 3
    if which is not None:
        dtypes[which] = "float32"
    arrays = map(jnp.asarray, (QUERY, KEY, VALUE), dtypes)
    with kernels_for(TPUS):
        found = keras_nn.dot_product_attention(
            *arrays, attn_logits_soft_cap=cap
        )
    assert found.dtype == jnp.result_type(*dtypes)
    wanted = expected(QUERY, KEY, VALUE, cap=cap or 0)
    np.testing.assert_allclose(found.astype("float32"), wanted, atol=0.05)


def note_kernels(monkeypatch):
    """Notes the threads that compute attention by the kernel."""
    threads = []
    attend = attention_module.splash.splash_attention

    def seen(*args, **kwargs):
        threads.append(threading.current_thread())
        return attend(*args, **kwargs)

    monkeypatch.setattr(attention_module.splash, "splash_attention", seen)
    return threads


def test_elsewhere_keras_computes_attention(monkeypatch):
    threads = note_kernels(monkeypatch)
    own = keras_nn.dot_product_attention
    given = {"query": QUERY, "key": KEY, "value": VALUE}
    thread = threading.Thread(target=lambda: attend(**given))
    with kernels_for(CPUS):
        attend(**given)
    with kernels_for(TPUS):
        attend(**given)
        thread.start()
        thread.join()
    assert threads == [threading.current_thread()]
    assert keras_nn.dot_product_attention is own


LAYERS = {
    "MultiHeadAttention": lambda: keras.layers.MultiHeadAttention(2, 8),
    "grouped": lambda: keras.layers.GroupQueryAttention(8, 4, 2),
    "window": lambda: keras.layers.MultiHeadAttention(2, 8, sliding_window=20),
    "grouped, window": lambda: keras.layers.GroupQueryAttention(
        8, 4, 2, sliding_window=20
    ),
}
PADDING = RNG.random((BATCH, LENGTH)) > 0.3
PADDING[0, :9] = PADDING[1, 100:] = PADDING[2] = False
SCORES = RNG.random((BATCH, LENGTH, LENGTH)) > 0.4
MASKS = {
    "none": {},
    "causal": {"use_causal_mask": True},
    "padding": {"query_mask": PADDING, "value_mask": PADDING},
    "keys": {"key_mask": PADDING},
    "causal, keys": {"value_mask": PADDING, "use_causal_mask": True},
    "scores": {"attention_mask": SCORES},
    "scores, causal, keys": {
        "attention_mask": SCORES,
        "value_mask": PADDING,
        "use_causal_mask": True,
    },
}


@pytest.mark.parametrize(
    ("name", "mask"),
    few(
        [
            # Interpreted kernels are slow to compile.
            (name, mask) if name == "grouped, window" else slow(name, mask)
            for name in LAYERS
            for mask in MASKS
        ],
        every=3,
    ),
)
def test_layers_compute_the_same_with_the_kernel(monkeypatch, name, mask):
    layer = LAYERS[name]()
    x, gradient = drawn(2, BATCH, LENGTH, 16)
    given = {k: jax.numpy.asarray(v) for k, v in MASKS[mask].items()}
    layer(x, x)
    kernels = []
    attend = attention_module.splash.splash_attention

    def seen(query, key, value, mask, **options):
        kernels.append(mask)
        return attend(query, key, value, mask, **options)

    monkeypatch.setattr(attention_module.splash, "splash_attention", seen)

    def call(x):
        return keras.ops.sum(layer(x, x, **given) * gradient)

    wanted = jax.jit(jax.value_and_grad(call))(x)
    assert not kernels
    with kernels_for(TPUS):
        found = jax.jit(jax.value_and_grad(lambda x: call(x)))(x)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)
    (used,) = kernels
    assert (used.scores is None) == ("attention_mask" not in given)
    is_causal, window = "use_causal_mask" in given, "window" in name
    if used.scores is None:
        assert used.right == (0 if is_causal else 19 if window else None)
        assert used.left == (19 if window else None)
        assert (used.keys is None) == (
            not given or set(given) <= {"use_causal_mask"}
        )


def test_calls_of_layers_reach_the_kernel(monkeypatch):
    made = []
    make = attention_module.splash._make_kernel

    def seen(*arguments):
        made.append(arguments)
        return make(*arguments)

    monkeypatch.setattr(attention_module.splash, "_make_kernel", seen)
    layer = keras.layers.MultiHeadAttention(HEADS, DEPTH)
    embedding = keras.layers.Embedding(9, HEADS * DEPTH, mask_zero=True)
    tokens = RNG.integers(0, 9, (BATCH, LENGTH))

    def call(tokens, **options):
        x = embedding(tokens)
        return layer(x, x, **options)

    for options in ({}, {"use_causal_mask": True}):
        wanted = call(tokens, **options)
        with kernels_for(TPUS):
            found = jax.jit(lambda t, o=options: call(t, **o))(tokens)
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert [arguments[2] for arguments in made] == [(None, None), (None, 0)]


@contextlib.contextmanager
def without_flash():
    """In which `keras.config.disable_flash_attention()` was called."""
    before = keras.config.is_flash_attention_enabled()
    keras.config.disable_flash_attention()
    try:
        yield
    finally:
        global_state.set_global_attribute("flash_attention", before)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"length": 100}, "a length of 100, not"),
        ({"bias": BIAS}, "a bias added"),
        ({"dtype": "float16"}, "the dtype float16"),
        ({"flash_attention": False}, "flash_attention=False"),
        ({"chip": "TPU v3"}, "a TPU v3"),
        ({"cores": 4}, "heads that 4 cores cannot share"),
        ({"mask": np.ones((2, LENGTH, LENGTH), bool)}, "a mask of shape (2,"),
        ({"mask": np.ones((1, 1, LENGTH, LENGTH)), "heads": 512}, "for the ke"),
        ({"within": without_flash()}, "disable_flash_attention"),
        ({"within": without_flash(), "flash_attention": True}, None),
        ({"within": jax.default_matmul_precision("high")}, "sion='high'"),
        ({"within": jax.default_matmul_precision("float32")}, "='float32'"),
        ({"within": jax.default_matmul_precision("bfloat16")}, None),
        ({"within": jax.enable_x64(True)}, "jax_enable_x64"),
        ({"scale": np.ones((2, 1, 1), "float32")}, "a scale of shape (2, 1,"),
        ({"scale": np.float32(0.3)}, None),
        ({"attn_logits_soft_cap": np.ones(3, "float32")}, "a cap of shape"),
        ({}, None),
        ({"mask": np.ones((1, 1, 1, LENGTH)), "heads": 512}, None),
        ({"mask": MASK}, None),
        ({"cores": 2}, None),
    ],
)
def test_reasons_for_the_attention_of_xla(given, reason):
    given = dict(given)
    length, dtype = given.pop("length", LENGTH), given.pop("dtype", "float32")
    chip = types.SimpleNamespace(device_kind=given.pop("chip", "TPU v4"))
    mesh = Mesh(devices=[chip], cores_per_replica=given.pop("cores", 1))
    repeats = given.pop("heads", HEADS) // HEADS
    query, key, value = (
        np.repeat(x[:, :length].astype(dtype), repeats, axis=2)
        for x in (QUERY, KEY, VALUE)
    )
    with given.pop("within", contextlib.nullcontext()):
        found = find_reason_against_kernel(
            mesh, query=query, key=key, value=value, **given
        )
    assert (found is None) if reason is None else (reason in found)


def test_reasons_are_collected():
    x = drawn(BATCH, 100, 16)
    plain = keras.layers.MultiHeadAttention(2, 8)
    dropped = keras.layers.MultiHeadAttention(2, 8, dropout=0.5)
    other = keras.layers.MultiHeadAttention(2, 8, attention_axes=(2,))

    def call(x):
        y = x[:, None]
        return plain(x, x), dropped(x, x, training=False), other(y, y)

    call(x)
    with attention_module.collect_reasons() as reasons:
        jax.jit(call)(x)
        assert not reasons
        with kernels_for(TPUS):
            jax.jit(lambda x: call(x))(x)
    assert list(reasons) == [
        "a length of 100, not a multiple of 128",
        "dropout or returned scores",
        "`attention_axes`",
    ]


def compare(call, *arrays):
    """Attention for TPUs is that of Keras."""
    wanted = call(*arrays)
    with kernels_for(TPUS):
        found = jax.jit(lambda *arrays: call(*arrays))(*arrays)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


class WithPrefix(keras.layers.MultiHeadAttention):
    def _compute_causal_mask(self, query, value=None):
        mask = super()._compute_causal_mask(query, value)
        return mask | (np.arange(mask.shape[-1]) < 32)


class Dilated(keras.layers.GroupQueryAttention):
    def _compute_sliding_window_mask(self, query, value=None):
        places = np.arange(query.shape[1])
        return jax.numpy.asarray((places[:, None] - places) % 4 == 0)[None]


@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (WithPrefix(2, 8), {"value_mask": PADDING, "use_causal_mask": True}),
        (Dilated(8, 2, 1, sliding_window=5), {}),
        (keras.layers.MultiHeadAttention(2, 8), {"value_mask": PADDING[:1]}),
        (
            keras.layers.GroupQueryAttention(8, 2, 1),
            {"query_mask": PADDING[:1], "use_causal_mask": True},
        ),
    ],
    ids=["prefix", "dilated", "mask of one row", "queries of one row"],
)
def test_masks_of_layers(layer, options):
    x = drawn(BATCH, LENGTH, 16)
    options = {
        k: jax.numpy.asarray(v) if k != "use_causal_mask" else v
        for k, v in options.items()
    }
    compare(lambda x: layer(x, x, **options), x)


def test_equal_layers_are_traced_once(monkeypatch):
    calls = note_kernels(monkeypatch)

    def call(query):
        for _ in range(3):
            query = keras.ops.dot_product_attention(query, query, query)
        return query

    with kernels_for(TPUS):
        jax.jit(call)(QUERY)
        jax.jit(lambda query: call(query))(QUERY)
    assert len(calls) == 1


def test_variables_as_arguments():
    query = keras.Variable(QUERY)
    scale, cap = keras.Variable(0.3), jax.numpy.float32(0.5)
    mask = keras.Variable(MASK, dtype="bool", trainable=False)

    def call(key, value, cap=None):
        return keras.ops.dot_product_attention(
            query, key, value, mask=mask, scale=scale, attn_logits_soft_cap=cap
        )

    with attention_module.collect_reasons() as reasons:
        compare(call, KEY, VALUE)
        with kernels_for(TPUS):
            found = call(KEY, VALUE, cap)
            assert not reasons
            # The cap is known only to the running program.
            traced = jax.jit(call)(KEY, VALUE, cap)
    assert list(reasons) == ["a cap of the scores that the step computes"]
    wanted = expected(QUERY, KEY, VALUE, mask=MASK, scale=0.3, cap=0.5)
    for one in (found, traced):
        np.testing.assert_allclose(one, wanted, atol=2e-5)


def test_a_scale_for_each_head():
    # As many heads as positions.
    arrays = drawn(3, 1, LENGTH, LENGTH, 2)
    scale = np.linspace(0.1, 0.5, LENGTH, dtype="float32")[:, None, None]

    def call(*arrays):
        return keras.ops.dot_product_attention(*arrays, scale=scale)

    compare(call, *arrays)


def attention(query, **options):
    return keras.ops.dot_product_attention(query, query, query, **options)


def by_window(size):
    def call(x):
        layer = keras.layers.MultiHeadAttention(2, 8, sliding_window=4)
        layer.build((2, LENGTH, 16), (2, LENGTH, 16))
        layer._sliding_window = size or len(x)
        return layer(x, x)

    return call


def scanned(query):
    def body(query, _):
        return attention(query, is_causal=True), None

    return jax.lax.scan(body, query, length=2)[0]


ROWS = (LENGTH, HEADS, DEPTH)


@pytest.mark.parametrize(
    ("call", "shape", "wanted"),
    [
        (attention, ROWS, Verdict.MEAN),
        (lambda q: attention(q, is_causal=True), ROWS, Verdict.MEAN),
        (lambda q: attention(q, scale=1 / len(q)), ROWS, Verdict.MIXED),
        (lambda q: attention(q, attn_logits_soft_cap=3.5), ROWS, Verdict.MEAN),
        (
            lambda q: attention(q, attn_logits_soft_cap=float(len(q))),
            ROWS,
            Verdict.MIXED,
        ),
        (by_window(9), (LENGTH, 16), Verdict.MEAN),
        (by_window(None), (LENGTH, 16), Verdict.MIXED),
        (scanned, ROWS, Verdict.MEAN),
    ],
    ids=[
        *("plain", "causal", "scale by rows", "cap", "cap by rows"),
        *("window", "window by rows", "scan"),
    ],
)
def test_losses_of_attention(call, shape, wanted):
    with kernels_for(TPUS):
        assert verdict(call, shape) is wanted


@pytest.mark.parametrize("rows", [2, LENGTH])
def test_losses_of_attention_with_trained_weights(rows):
    """A trace of gradients passes tables to the kernel, which have no rows."""

    def loss(weight, query):
        def body(query, _):
            return attention(query, scale=weight, is_causal=True), None

        query = body(jax.lax.scan(body, query, length=2)[0], None)[0]
        return marks.mark(jax.numpy.mean(query), marks.LOSS)

    def trace(rows):
        query = np.zeros((rows, LENGTH, 1, 2), "float32")
        return jax.make_jaxpr(jax.value_and_grad(loss))(0.5, query)

    with kernels_for(TPUS):
        one, two = trace(rows), trace(2 * rows)
    # If a table has as many entries as there are rows, two traces show it.
    found = losses.losses_in(one, [1], rows).verdict
    assert found is not Verdict.MIXED
    assert losses.losses_in(one, [1], rows, two).verdict is Verdict.MEAN


@pytest.fixture
def strategies_for_tpus(monkeypatch):
    """Makes steps of strategies that are traced for TPUs, if switched on."""
    meshes = {}

    class ForTPUs:
        platform, devices = "tpu", [CHIP]

        def __init__(self, mesh):
            self._mesh = mesh

        def __getattr__(self, name):
            return getattr(self._mesh, name)

    def on_tpus(mesh, **options):
        if is_on:
            mesh = meshes.setdefault(mesh, ForTPUs(mesh))
        return kernels_for(mesh, **options)

    is_on: list[bool] = []
    for module in (model_call, model_program, replica_trace):
        monkeypatch.setattr(module, "kernels_for", on_tpus)
    return is_on


class Block(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 8)

    def build(self, shape):
        self.attention.build(shape, shape)
        super().build(shape)

    def call(self, x):
        padding = x[:, :, 1] > -0.8
        mixed = self.attention(x, x, value_mask=padding, use_causal_mask=True)
        return x + mixed


def on_replicas():
    return ks.MirroredStrategy(jax.devices()[:2])


def on_cores():
    return cores_strategy(2, 2)


def share_sequences():
    return cores_strategy(2, 2, context_parallel=True)


@pytest.mark.parametrize(
    ("make", "rows", "options"),
    [
        # The kernel's gradients are slow to compile.
        (on_replicas, 4, {"trains": False}),
        slow(on_replicas, 4, {}),
        slow(lambda: cores_strategy(1, 2), 3, {}),
        slow(on_cores, 5, {}),
        slow(on_cores, 5, {"eagerly": False}),
        (share_sequences, 4, {"trains": False, "eagerly": False}),
        slow(share_sequences, 4, {"eagerly": False}),
        slow(share_sequences, 5, {"eagerly": False}),
    ],
    ids=[
        *("replicas", "trained replicas", "cores", "replicas of cores"),
        *("traced replicas of cores", "sequences of cores"),
        *("trained sequences of cores", "uneven sequences of cores"),
    ],
)
def test_steps_of_strategies(
    strategies_for_tpus, monkeypatch, make, rows, options
):
    calls = []

    def count(*args, **kwargs):
        calls.append(args)
        return map_attention(*args, **kwargs)

    monkeypatch.setattr(attention_module, "map_attention", count)
    x, y = drawn(2, rows, LENGTH, 16)

    def compute(trains=True, eagerly=True):
        keras.utils.set_random_seed(0)
        with make().scope():
            model = keras.Sequential([keras.Input((LENGTH, 16)), Block()])
            sgd = keras.optimizers.SGD(0.5)
            model.compile(sgd, "mse", run_eagerly=eagerly)
        if trains:
            model.fit(x, y, batch_size=rows, verbose=0)
        loss = model.evaluate(x, y, batch_size=rows, verbose=0)
        return [*model.get_weights(), loss]

    wanted = compute(**options)
    with attention_module.collect_reasons() as reasons:
        strategies_for_tpus.append(True)
        found = compute(**options)
    assert calls
    assert not reasons
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


LONG = jax.ShapeDtypeStruct((1, 2**16, 1, DEPTH), "float32")


def attend_by_einsum(query):
    scores = jnp.einsum("bthd,bshd->bhts", query, query)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), query)


def compute_unused_scores(query):
    attend_by_einsum(query)
    return query


def attend_in_blocks(query):
    return jax.checkpoint(jax.jit(attend_by_einsum))(query).sum()


def attend_with_bias(query):
    bias = jnp.ones(query.shape[1])
    return keras.ops.dot_product_attention(query, query, query, bias=bias)


@pytest.mark.parametrize(
    ("attend", "text"),
    [
        (attend_by_einsum, r"shape \(1, 1, 65536, 65536\), 17 GB"),
        (jax.grad(attend_in_blocks), "test_attention.py:[0-9]"),
        (attend_with_bias, r"shape \(1, 1, 65536, 1, 65536\), 17 GB"),
        (attention, None),
        (compute_unused_scores, None),
    ],
)
def test_scores_that_do_not_fit_are_told_before_compiling(attend, text):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with kernels_for(TPUS):
            jaxpr = jax.make_jaxpr(lambda q: attend(q))(LONG)
        warn_of_products(jaxpr, CHIP, 1)
        warn_of_products(jaxpr, jax.devices()[0], 1)
        warn_of_products(jaxpr, CHIP, 2)
    texts = [str(w.message) for w in seen]
    assert len(texts) == (text is not None)
    assert all(re.search(text, each) for each in texts)

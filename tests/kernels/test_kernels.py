"""Kernels are chosen by the mesh's devices: here CPUs of a GPU machine.

tests/gpu/test_kernels.py compiles steps for GPUs.
"""

import functools
import sys
import types
from concurrent import futures

import jax
import keras
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jaxlib import gpu_rnn

import keras_strategies as ks
from keras_strategies.keras_bridge.keras_names import NN as keras_nn
from keras_strategies.kernels import kernels
from keras_strategies.kernels.kernels import kernels_for
from keras_strategies.kernels.mapped_kernels import Trace
from tests.support.combinations import combine, few
from tests.support.plain_keras import mirrored
from tests.support.strategies import cores_strategy

SIZES = "compute_rnn_workspace_reserve_space_sizes"
RNG = np.random.default_rng(0)


def make_mesh(platform, capability=""):
    device = types.SimpleNamespace(
        platform=platform, compute_capability=capability
    )
    return types.SimpleNamespace(
        platform=platform,
        devices=[device],
        num_replicas=1,
        cores_per_replica=1,
    )


def answer_as_with_a_gpu(monkeypatch):
    """Makes JAX and Keras answer as on a machine with an H100."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    for name, compare in (
        ("check_compute_capability", float.__ge__),
        ("is_cuda_compute_capability_equal", float.__eq__),
    ):
        answer = lambda c, compare=compare: compare(9.0, float(c))  # noqa: E731
        monkeypatch.setattr(cudnn, name, answer)
    monkeypatch.setattr(gpu_rnn, SIZES, lambda *_: (64, 64), raising=False)


class Attention(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(2, 8)

    def build(self, shape):
        self.attention.build(shape, shape)

    def call(self, x):
        return self.attention(x, x, use_causal_mask=True)


LAYERS = {
    "LSTM": (lambda: keras.layers.LSTM(8), "float32"),
    "both ways": (
        lambda: keras.layers.Bidirectional(keras.layers.LSTM(8)),
        "float32",
    ),
    "attention": (Attention, "mixed_bfloat16"),
}


@pytest.mark.parametrize(
    ("make", "policy"), few(few(LAYERS.values(), every=2), every=3), ids=LAYERS
)
def test_a_strategy_of_cpus_on_a_gpu_machine(monkeypatch, make, policy):
    x = RNG.normal(size=(6, 4, 16)).astype("float32")

    def compute():
        keras.utils.set_random_seed(0)
        with ks.MirroredStrategy(jax.devices()[:2]).scope():
            keras.config.set_dtype_policy(policy)
            try:
                layers = [keras.Input((4, 16)), make(), keras.layers.Dense(1)]
                model = keras.Sequential(layers)
            finally:
                keras.config.set_dtype_policy("float32")
            model.compile("sgd", "mse")
        y = np.zeros((6, *model.output_shape[1:]), "float32")
        # The second batch is indivisible.
        losses = model.fit(x[:5], y[:5], batch_size=4, verbose=0).history
        return losses["loss"], model.predict(x, verbose=0)

    wanted = compute()
    answer_as_with_a_gpu(monkeypatch)
    for one, other in zip(compute(), wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_layers_of_other_steps_keep_their_kernels(monkeypatch):
    """Plain Keras still takes cuDNN's kernel, and cannot lower it for CPUs."""
    answer_as_with_a_gpu(monkeypatch)
    layer = keras.layers.LSTM(8)
    x = np.ones((2, 4, 16), "float32")
    layer.build(x.shape)
    with kernels_for(make_mesh("cpu")):
        wanted = jax.jit(layer)(x)
    with pytest.raises(NotImplementedError, match="rnn_fwd"):
        jax.jit(lambda x: layer(x))(x)
    assert wanted.shape == (2, 8)


def test_questions_are_answered_for_the_mesh():
    original = cudnn.check_compute_capability
    for mesh, capability, is_same in (
        (make_mesh("gpu", "8.0"), [True, True, False], True),
        (make_mesh("gpu", "10.3"), [True, True, True], False),
        (make_mesh("gpu", "gfx942"), [False, False, False], False),
        (make_mesh("cpu"), [False, False, False], False),
        (make_mesh("tpu"), [False, False, False], False),
    ):
        with kernels_for(mesh):
            found = [
                cudnn.check_compute_capability(wanted)
                for wanted in ("7.5", "8.0", "9.0")
            ]
            assert found == capability
            assert cudnn.is_cuda_compute_capability_equal("8.0") == is_same
            assert keras_nn.jax.devices() == mesh.devices
            if mesh.platform != "gpu":
                with pytest.raises(RuntimeError, match="GPUs.*Received.*Omit"):
                    cudnn.check_cudnn_version()
    assert cudnn.check_compute_capability is original
    assert keras_nn.jax is jax


def test_other_threads_keep_their_answers():
    with kernels_for(make_mesh("gpu", "9.0")):
        assert cudnn.check_compute_capability("9.0")
        with futures.ThreadPoolExecutor(1) as pool:
            ask = pool.submit(cudnn.check_compute_capability, "9.0")
            assert not ask.result()
            assert pool.submit(keras_nn.jax.devices).result() == jax.devices()


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_layers_of_keras_hub_look_at_the_mesh(monkeypatch, platform):
    module = types.ModuleType("keras_hub.src.a_model")
    module.running_on_tpu = module.running_on_gpu = lambda: True
    package = types.ModuleType("keras_hub")
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with kernels_for(make_mesh(platform)):
        assert module.running_on_tpu() == (platform == "tpu")
        assert module.running_on_gpu() == (platform == "gpu")
    assert module.running_on_tpu()
    assert module.running_on_gpu()


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_dropout_by_another_generator_of_jax(replicas):
    """Also in steps over the global batch: 8 rows on 3 replicas."""

    def fit(implementation):
        keras.utils.set_random_seed(0)
        with mirrored(replicas).scope():
            model = keras.Sequential(
                [keras.Input((500,)), keras.layers.Dropout(0.25, seed=1)]
            )
            model.compile(loss=lambda y, kept: keras.ops.mean(kept, axis=-1))
        x = np.ones((8, 500), "float32")
        with jax.default_prng_impl(implementation):
            return model.fit(x, x, epochs=2, verbose=0).history["loss"]

    losses = fit("rbg")
    assert losses == fit("rbg") != fit("threefry2x32")
    assert losses[0] != losses[1]
    np.testing.assert_allclose(losses, 1, atol=0.05)


@keras.saving.register_keras_serializable()
class Noisy(keras.layers.Layer):
    """A layer that passes `training` on, as decoders of keras-hub do."""

    def __init__(self, **options):
        super().__init__(**options)
        self.dense = keras.layers.Dense(4)
        self.dropout = keras.layers.Dropout(0.0)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x, scale=1.0, training=None):
        x = keras.ops.tanh(self.dense(x)) * scale
        return self.dropout(x, training=training) if training else x


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_rematerialized_layers_may_depend_on_training(replicas):
    def train(strategy, mode):
        keras.utils.set_random_seed(0)
        with strategy.scope(), keras.RematScope(mode=mode):
            model = keras.Sequential([Noisy(name="a"), Noisy(name="b")])
            model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")
        model.fit(x, x, batch_size=4, verbose=0, shuffle=False)
        text = strategy.compile_step(model, (x, x)).as_text()
        assert ("checkpoint" in text) == (mode == "full")
        return [*model.get_weights(), model.predict(x, verbose=0)]

    found = train(mirrored(replicas), "full")
    for a, b in zip(found, train(mirrored(1), None), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_lstm_of_other_dtypes_is_a_loop(dtype):
    from jax.experimental import rnn

    x = jax.ShapeDtypeStruct((2, 3, 4), "float32")
    with kernels_for(make_mesh("gpu", "9.0")):
        array = types.SimpleNamespace(dtype=np.dtype(dtype), shape=x.shape)
        with pytest.raises(NotImplementedError, match="called with float32"):
            rnn.lstm(array, x, x, x)


def test_sizes_of_an_lstm_are_estimated_only_without_gpus(monkeypatch):
    asked = []
    monkeypatch.setattr(gpu_rnn, SIZES, asked.append, raising=False)
    arguments = (5, 3, 1, 4, 7, 0.0, True, True)
    absent = make_mesh("gpu", "9.0")
    absent.devices[0].client = types.SimpleNamespace(
        runtime_type="compile_only_runtime"
    )
    with kernels_for(absent):
        # Two directions, rows, steps, units; six float32 numbers of each.
        size = 2 * 4 * 7 * 3 * 6 * 4
        compute_sizes = getattr(gpu_rnn, SIZES)
        assert compute_sizes(*arguments) == (size, size)


HEADS = {"heads": (2, 4, 2), "heads that cores cannot share": (2, 3, 1)}
OF_SCORES = {
    "none": {},
    "a mask of rows": {"mask": (7, 1, 8, 8)},
    "a mask of heads": {"mask": (1, 0, 8, 8)},
    "one mask": {"mask": (8, 8)},
    "a bias and a mask": {"mask": (7, 1, 1, 8), "bias": (1, 0, 8, 8)},
}


@pytest.mark.parametrize(
    "shapes", combine(OF_SCORES.values(), every=3), ids=OF_SCORES
)
@pytest.mark.parametrize(
    ("cores", "heads", "groups"), HEADS.values(), ids=HEADS
)
def test_attention_mapped_over_cores_is_the_same(cores, heads, groups, shapes):
    """CPUs have no kernel: each core computes XLA's operations."""
    query = RNG.normal(size=(7, 8, heads, 8)).astype("float32")
    key, value = RNG.normal(size=(2, 7, 8, groups, 8)).astype("float32")
    draw = {
        "mask": lambda shape: RNG.random(shape) > 0.2,
        "bias": lambda shape: RNG.normal(size=shape).astype("float32"),
    }
    others = [
        draw[name]([size or heads for size in shapes[name]])
        if name in shapes
        else None
        for name in ("bias", "mask")
    ]
    options = {"is_causal": True, "scale": 0.3, "implementation": "xla"}
    plain = functools.partial(jax.nn.dot_product_attention, **options)
    mesh = cores_strategy(2, cores).mesh

    def mapped(*arrays):
        trace = Trace(mesh=mesh, is_global=True)
        return kernels._map_attention(trace, plain, *arrays)

    def of(attend):
        def loss(query, key, value):
            return jax.numpy.sum(attend(query, key, value, *others) ** 2)

        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(query, key, value)

    leaves = jax.tree.leaves
    for one, other in zip(leaves(of(mapped)), leaves(of(plain)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)

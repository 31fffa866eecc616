"""Loops over equal blocks; tests/parity/test_scanned_blocks.py has numbers."""

import gc

import jax
import keras
import numpy as np
import pytest
from keras import layers

import keras_strategies as ks
from keras_strategies.kernels import scanned_blocks
from tests.support.strategies import make_strategy

BLOCKS, WIDTH = 5, 8
X = np.random.default_rng(0).normal(size=(8, WIDTH)).astype("float32")


class Block(layers.Layer):
    """Notes its calls, and whether the garbage collector runs meanwhile."""

    calls: list[tuple[str, bool]] = []

    def __init__(self, **options):
        super().__init__(**options)
        self.dense = layers.Dense(WIDTH, "tanh")

    def call(self, x):
        self.calls.append((self.name, gc.isenabled()))
        return x + self.dense(x)


class Lazy(Block):
    """The layer in it has no variables until it is called."""

    def build(self, input_shape):
        self.scale = self.add_weight(shape=(WIDTH,))

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, x.dtype)


def compiled(block, strategy=None, *, is_scanned=True):
    keras.utils.set_random_seed(1)
    strategy = strategy or make_strategy("mirrored2")
    with strategy.scope():
        x = inputs = keras.Input((WIDTH,))
        for _ in range(BLOCKS):
            x = block()(x)
        model = keras.Model(inputs, layers.Dense(1)(x))
        if is_scanned:
            ks.experimental.scan_blocks(model)
        model.compile("adam", "mse", metrics=["mae"])
    Block.calls.clear()
    return model


def fit(model):
    return model.fit(X, X[:, :1], batch_size=8, verbose=0).history


def test_blocks_without_variables_are_all_built():
    model = compiled(Lazy)
    assert not model.layers[2].dense.built
    found = fit(model)
    assert all(layer.dense.built for layer in model.layers[1 : BLOCKS + 1])
    expected = fit(compiled(Block))
    assert found.keys() == expected.keys()


def test_blocks_are_searched_once_until_one_is_frozen(monkeypatch):
    searched = []
    search = scanned_blocks.find_equal_blocks

    def note(graph):
        searched.append(graph)
        return search(graph)

    monkeypatch.setattr(scanned_blocks, "find_equal_blocks", note)
    model = compiled(Block)
    fit(model)
    assert len(searched) == 1
    frozen = model.layers[3]
    frozen.trainable = False
    model.compile("adam", "mse")
    before = frozen.get_weights()
    with pytest.warns(UserWarning, match="not equal any more"):
        fit(model)
    assert len(searched) == 2
    np.testing.assert_array_equal(before[0], frozen.get_weights()[0])
    frozen.trainable = True
    ks.experimental.scan_blocks(model)
    model.compile("adam", "mse")
    fit(model)
    assert len(searched) == 3


def test_the_garbage_collector_waits_while_a_step_is_traced():
    fit(compiled(Block))
    # The model is built first.
    is_on = [on for _, on in Block.calls]
    assert is_on[0] is True
    assert is_on[-1] is False
    assert gc.isenabled()


class WithLosses(Block):
    """Its blocks cannot be computed in a loop."""

    def call(self, x):
        self.add_loss(keras.ops.mean(x))
        return super().call(x)


def deep(block=Block, count=8, mark=None):
    keras.utils.set_random_seed(1)
    strategy = make_strategy("mirrored2")
    with strategy.scope():
        blocks = [block() for _ in range(count)]
        model = keras.Sequential([keras.Input((WIDTH,)), *blocks])
        if mark is not None:
            ks.experimental.scan_blocks(model, mark)
        model.compile("adam", "mse")
    return model, strategy


def has_loop(*args):
    model, strategy = deep(*args)
    shape = jax.ShapeDtypeStruct(X.shape, "float32")
    return "while(" in strategy.compile_step(model, (shape, shape)).as_text()


@pytest.fixture
def default_on_cpus(monkeypatch):
    """Computes blocks in loops by default, as on TPUs and GPUs."""
    monkeypatch.setattr(scanned_blocks, "_PLATFORMS", ("cpu",))


@pytest.mark.parametrize(
    ("args", "is_expected"),
    [
        ((Block, 8), True),
        ((Block, 7), False),
        ((Block, 7, True), True),
        ((Block, 8, False), False),
        # Without a warning.
        ((WithLosses, 8), False),
    ],
)
def test_eight_equal_blocks_are_in_a_loop_by_default(
    default_on_cpus, args, is_expected
):
    assert has_loop(*args) is is_expected


def test_steps_on_cpus_are_unrolled_by_default():
    assert not has_loop()


def test_models_without_equal_blocks_may_be_unrolled():
    model, _ = deep(count=2)
    assert ks.experimental.scan_blocks(model, False) == []

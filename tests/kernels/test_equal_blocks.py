"""Equal blocks of models."""

import keras
import numpy as np
import pytest
from keras import layers

from keras_strategies.kernels.equal_blocks import find_blocks

ROWS = np.random.default_rng(0).normal(size=(3, 5, 8)).astype("float32")
COUNT = 6


@pytest.fixture(autouse=True)
def _seeded():
    keras.utils.set_random_seed(7)


def residual(x, width=8, **kwargs):
    y = layers.LayerNormalization()(x)
    y = layers.Dense(16, activation="gelu", **kwargs)(y)
    return x + layers.Dense(width)(y)


class Block(layers.Layer):
    """A block as keras-hub's models have it."""

    def build(self, shape):
        self.inner = layers.Dense(shape[-1], activation="tanh")
        self.inner.build(shape)

    def call(self, x):
        return x + self.inner(x)


class Gated(layers.Layer):
    """Takes what all blocks take, too."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner = layers.Dense(8)

    def build(self, x_shape, gate_shape=None):
        self.inner.build(x_shape)

    def call(self, x, gate=None):
        return self.inner(x * gate)


def in_words(count):
    x = inputs = keras.Input((5, 8))
    x = layers.Dense(8)(x)
    for _ in range(count):
        x = residual(x)
    return keras.Model(inputs, layers.Dense(2)(x))


def chained(make, kind=keras.Model, count=COUNT):
    """Makes a chain of what a function makes of 0, 1, 2, and so on."""
    x = inputs = keras.Input((5, 8))
    for number in range(count):
        x = make(number)(x)
    return kind(inputs, x)


def build_layers(count):
    x = inputs = keras.Input((5, 8))
    for _ in range(count):
        x = Block()(x)
    return keras.Model(inputs, layers.Dense(2)(x))


def sequential(count):
    blocks = [Block() for _ in range(count)]
    return keras.Sequential([keras.Input((5, 8)), *blocks, layers.Dense(2)])


def sequential_of_many(count):
    parts = []
    for _ in range(count):
        parts += [layers.Dense(16), layers.ReLU(), layers.Dense(8)]
    return keras.Sequential([keras.Input((5, 8)), *parts, layers.Dense(2)])


def nested(count):
    inputs = keras.Input((5, 8), name="tokens")
    backbone = build_layers(count)
    return keras.Model({"tokens": inputs}, layers.Dense(3)(backbone(inputs)))


def nested_twice(count):
    inner = nested(count)
    inputs = keras.Input((5, 8), name="tokens")
    outputs = inner({"tokens": inputs})
    return keras.Model({"tokens": inputs}, layers.ReLU()(outputs))


def in_sequential(count):
    parts = [build_layers(count), layers.Dense(3)]
    return keras.Sequential([keras.Input((5, 8)), *parts])


def sequential_in_functional(count):
    inputs = keras.Input((5, 8))
    return keras.Model(inputs, layers.Dense(3)(sequential(count)(inputs)))


def with_gates(count):
    x = inputs = keras.Input((5, 8))
    gate = keras.ops.cast(
        keras.ops.sum(inputs, -1, keepdims=True) > 0, "float32"
    )
    for _ in range(count):
        y = layers.LayerNormalization()(x)
        y = Gated()(y, gate=gate)
        x = layers.Add()([x, y])
    return keras.Model(inputs, layers.Dense(2)(x))


def with_side_output(count):
    x = inputs = keras.Input((5, 8))
    x = first = layers.Dense(8)(x)
    for _ in range(count):
        x = residual(x)
    side = layers.Dense(4)(first)
    return keras.Model(inputs, {"main": layers.Dense(2)(x), "side": side})


def build_models(count):
    x = inputs = keras.Input((5, 8))
    for _ in range(count):
        y = keras.Input((5, 8))
        x = keras.Model(y, residual(y))(x)
    return keras.Model(inputs, layers.Dense(2)(x))


def ending_with_blocks(count):
    return chained(lambda _: Block(), count=count)


MODELS = [
    *(in_words, build_layers, sequential, sequential_of_many, nested),
    *(nested_twice, in_sequential, sequential_in_functional, with_gates),
    *(with_side_output, build_models, ending_with_blocks),
]


def list_variables(segment):
    found = {
        id(v): v
        for operation in segment
        for v in getattr(operation, "variables", ())
    }
    return found.values()


@pytest.mark.parametrize("make", MODELS)
def test_blocks_are_all_repetitions(make):
    blocks = find_blocks(make(COUNT))
    assert blocks is not None
    assert len(blocks) == COUNT
    assert len({len(segment) for segment in blocks.segments}) == 1
    sizes = {
        sum(int(np.prod(v.shape)) for v in list_variables(segment))
        for segment in blocks.segments
    }
    assert sizes == {blocks.size / COUNT}


def build_shared_layers():
    block = Block()
    return chained(lambda _: block)


def with_a_shared_part():
    x = inputs = keras.Input((5, 8))
    dense = layers.Dense(8)
    for _ in range(COUNT):
        x = dense(layers.LayerNormalization()(x))
    return keras.Model(inputs, x)


def with_every_output():
    x = inputs = keras.Input((5, 8))
    outputs = []
    for _ in range(COUNT):
        x = Block()(x)
        outputs.append(x)
    return keras.Model(inputs, outputs)


def with_dense_connections():
    x = inputs = keras.Input((5, 8))
    found = [x]
    for _ in range(COUNT):
        x = layers.Dense(8)(layers.Add()([*found, x]))
        found.append(x)
    return keras.Model(inputs, x)


ACTIVATIONS = ("relu", "gelu", "tanh", "silu", "relu", "elu")


def build_growing_layers():
    return chained(lambda number: layers.Dense(8 + number))


def build_different_layers():
    return chained(lambda k: layers.Dense(8, activation=ACTIVATIONS[k]))


def without_variables():
    return chained(lambda _: layers.ReLU())


class Repeated(layers.Layer):
    """A layer whose config does not say what it does."""

    def __init__(self, times, function=None, activation=None):
        super().__init__()
        self.times, self.function = times, function
        self.inner = layers.Dense(8, activation=activation)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        for _ in range(self.times):
            x = self.inner(x)
        return x

    def get_config(self):
        return super(layers.Layer, self).get_config()


class OwnCall(keras.Model):
    def call(self, x, training=False):
        return super().call(x) + keras.ops.sum(x)


class Around(layers.Layer):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def call(self, x):
        return self.model(x)


def build_layers_with_other_attributes():
    return chained(lambda number: Repeated(1 + number))


def build_layers_with_other_inner_layers():
    return chained(lambda k: Repeated(1, activation=ACTIVATIONS[k]))


def build_differing_calls():
    x = inputs = keras.Input((5, 8))
    for number in range(COUNT):
        attention = layers.MultiHeadAttention(2, 4)
        x = attention(x, x, use_causal_mask=number > 2)
    return keras.Model(inputs, x)


def with_a_call_of_its_own():
    return chained(lambda number: Block(), OwnCall)


def in_a_layer():
    return keras.Sequential([keras.Input((5, 8)), Around(build_layers(8))])


def in_python():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = build_layers(8)

        def call(self, x):
            return self.inner(x)

    model = Model()
    model(ROWS)
    return model


@pytest.mark.parametrize(
    "make",
    [
        *(build_differing_calls, build_layers_with_other_attributes),
        *(build_layers_with_other_inner_layers, build_growing_layers),
        *(with_a_call_of_its_own, in_a_layer, in_python),
        *(build_shared_layers, with_a_shared_part, with_every_output),
        *(with_dense_connections, build_different_layers),
        *(without_variables, lambda: build_layers(3), lambda: in_words(3)),
        lambda: keras.Sequential([Block()]),
    ],
)
def test_without_repetitions_there_are_no_blocks(make):
    assert find_blocks(make()) is None


def test_functions_in_layers_tell_no_blocks_apart():
    model = chained(lambda number: Repeated(2, lambda x: x + number, "relu"))
    assert len(find_blocks(model)) == COUNT


def test_numbers_that_operations_compute_with_tell_no_blocks_apart():
    x = inputs = keras.Input((5, 8))
    for number in range(COUNT):
        x = layers.Dense(8)(x) * (0.5 + number)
    assert len(find_blocks(keras.Model(inputs, x))) == COUNT


def test_four_repetitions_are_blocks():
    assert len(find_blocks(build_layers(4))) == 4


def test_blocks_that_are_layers_are_known():
    model = build_layers(COUNT)
    found = find_blocks(model).layers
    assert found == [x for x in model.layers if isinstance(x, Block)]
    assert find_blocks(in_words(COUNT)).layers is None


def test_of_two_kinds_of_blocks_those_with_most_entries_are_taken():
    x = inputs = keras.Input((5, 8))
    for _ in range(9):
        x = Block()(x)
    x = layers.Dense(32)(x)
    for _ in range(4):
        x = Block()(x)
    blocks = find_blocks(keras.Model(inputs, x))
    assert len(blocks) == 4
    assert blocks.size == 4 * (32 * 32 + 32)


@pytest.mark.parametrize("make", [build_layers, sequential, nested])
def test_blocks_that_are_rematerialized_are_found(make):
    with keras.RematScope(mode="full"):
        model = make(COUNT)
    assert len(find_blocks(model)) == COUNT


@pytest.mark.parametrize(
    "mode",
    [
        {"mode": "full"},
        {"mode": "activations"},
        {"mode": "larger_than", "output_size_threshold": 7},
        {"mode": "list_of_layers", "layer_names": ["inner_1", "inner_3"]},
    ],
)
def test_blocks_that_are_computed_again_each_in_its_way_are_none(mode):
    def make(number):
        with keras.RematScope(**(mode if number % 2 else {"mode": None})):
            return layers.Dense(8, name=f"inner_{number}")

    # Pairs of them would be, were there more.
    assert find_blocks(chained(make)) is None

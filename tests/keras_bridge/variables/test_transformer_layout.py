"""`transformer_layout`: which dimension of which variable the cores divide."""

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.keras_bridge.variables.model_variables import (
    all_variables,
)
from keras_strategies.testing import assert_replicated
from tests.support.numbers import assert_all_close
from tests.support.strategies import of_cores

layers = keras.layers
transformer_layout = ks.experimental.transformer_layout


class Block(layers.Layer):
    """Attention and two dense layers, with the names that Keras gives."""

    def __init__(self, attention, width=16, inner=32, **kwargs):
        super().__init__(**kwargs)
        self.attention = attention
        self.norm = layers.LayerNormalization()
        self.dense = keras.Sequential(
            [layers.Dense(inner, activation="gelu"), layers.Dense(width)]
        )

    def build(self, shape):
        self.attention.build(shape, shape)
        self.norm.build(shape)
        self.dense.build(shape)

    def call(self, x):
        x = x + self.attention(x, x)
        return x + self.dense(self.norm(x))


def grouped(heads=4, of_keys=2):
    return layers.GroupQueryAttention(4, heads, of_keys)


def many_headed(heads=4):
    return layers.MultiHeadAttention(heads, 4)


def transformer(attention=many_headed, vocabulary=24, blocks=2):
    x = inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(vocabulary, 16)(x)
    for _ in range(blocks):
        x = Block(attention())(x)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(3)(x))


def axes_in(model, cores):
    """What a layout map says of each variable, by the end of its path."""
    layout_map = transformer_layout(model, cores)
    strategy = of_cores(1, cores, layout_map)
    strategy.attach(model)
    return {
        "/".join(v.path.split("/")[-2:]): tuple(v.value.sharding.spec)
        for v in model.variables
    }


def test_heads_columns_rows_and_tables_are_divided():
    keras.backend.clear_session()
    found = axes_in(transformer(), 4)
    divided = {name: axes for name, axes in found.items() if any(axes)}
    heads = (None, "model", None)
    assert divided == {
        "embedding/embeddings": ("model", None),
        "query/kernel": heads,
        "key/kernel": heads,
        "value/kernel": heads,
        "query/bias": ("model", None),
        "key/bias": ("model", None),
        "value/bias": ("model", None),
        "attention_output/kernel": ("model", None, None),
        "dense/kernel": (None, "model"),
        "dense_1/kernel": ("model", None),
        "dense_2/kernel": (None, "model"),
        "dense_3/kernel": ("model", None),
    }


def test_what_cores_do_not_divide_stays_whole():
    keras.backend.clear_session()
    found = axes_in(transformer(grouped, vocabulary=23), 4)
    assert found["query/kernel"] == (None, "model", None)
    assert found["attention_output/kernel"] == ("model", None, None)
    # Two heads of keys, three of classes, 23 words.
    for name in ("key/kernel", "value/bias", "embedding/embeddings"):
        assert not any(found[name]), name
    assert not any(found["dense_4/kernel"])


def test_names_without_conflict_give_plain_tuples():
    layout_map = transformer_layout(transformer(), 2)
    query = next(key for key in layout_map if "query" in key)
    assert layout_map[query] == (None, "model", None)


def test_lora_weights_follow_their_kernels():
    model = transformer()
    for layer in model._flatten_layers():
        if isinstance(layer, layers.EinsumDense):
            layer.enable_lora(3)
    layout_map = transformer_layout(model, 4)
    found = {
        "/".join(key.replace(r"(_\d+)?", "").split("/")[-2:]): axes
        for key, axes in layout_map.items()
        if "lora" in key
    }
    heads = (None, "model", None)
    assert found == {
        "query/lora_kernel_a": heads,
        "key/lora_kernel_a": heads,
        "value/lora_kernel_a": heads,
        "attention_output/lora_kernel_a": ("model", None, None),
    }


def trained(strategy):
    keras.utils.set_random_seed(2)
    with strategy.scope():
        model = transformer(grouped, blocks=1)
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    random = np.random.default_rng(0)
    x, y = random.integers(0, 24, (20, 6)), random.integers(0, 3, 20)
    history = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history
    return model, history["loss"]


def test_a_model_with_other_names_is_divided_and_trains_as_on_one_device():
    # The layers of what is trained have other numbers in their names.
    layout_map = transformer_layout(transformer(grouped), 2)
    wanted, loss = trained(ks.OneDeviceStrategy("cpu:0"))
    strategy = of_cores(
        2, 2, layout_map, ks.experimental.FullySharded(min_size=1)
    )
    model, found = trained(strategy)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    weights = model.get_weights(), wanted.get_weights()
    assert_all_close(*weights, rtol=2e-5, atol=2e-5)
    assert_replicated(model)
    kernels = [
        v for v in all_variables(model) if len(v.shape) > 1 and v.shape[-1] != 3
    ]
    # Weights and momenta: of a table, and of a block.
    assert len(kernels) == 2 * (1 + 9)
    for variable in kernels:
        axes = set(variable.value.sharding.spec)
        assert {"model", "replica"} <= axes or "bias" in variable.path
        assert "model" in axes


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("model", 2), TypeError, "of type str"),
        ((None, 0), ValueError, "cores must be >= 1"),
        ((None, "2"), TypeError, "cores must be an integer"),
        ((None, 7), ValueError, "cores=7, which divides none"),
    ],
)
def test_wrong_arguments_are_named(arguments, error, text):
    model, cores = arguments
    with pytest.raises(error, match=text):
        transformer_layout(model or transformer(), cores)


def test_a_model_without_attention_is_refused():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(8)])
    with pytest.raises(ValueError, match="queries and values") as caught:
        transformer_layout(model, 2)
    assert "'attention_output'" in str(caught.value)
    with pytest.raises(ValueError, match="without variables"):
        transformer_layout(keras.Sequential([layers.Dense(8)]), 2)

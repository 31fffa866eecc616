"""`transformer_layout`: which dimension of which variable the cores divide."""

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from keras_strategies.variables.model_variables import (
    all_variables,
)
from tests.support.combinations import few
from tests.support.numbers import assert_all_close
from tests.support.strategies import cores_strategy

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


def grouped(heads=4, num_key_heads=2):
    return layers.GroupQueryAttention(4, heads, num_key_heads)


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
    strategy = cores_strategy(1, cores, layout_map)
    strategy.attach(model)
    return {
        "/".join(v.path.split("/")[-2:]): tuple(v.value.sharding.spec)
        for v in model.variables
    }


def test_heads_columns_rows_and_tables_are_divided():
    keras.backend.clear_session(free_memory=False)
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
    keras.backend.clear_session(free_memory=False)
    found = axes_in(transformer(grouped, vocabulary=23), 4)
    assert found["query/kernel"] == (None, "model", None)
    assert found["attention_output/kernel"] == ("model", None, None)
    # Two heads of keys, three classes.
    for name in ("key/kernel", "value/bias"):
        assert not any(found[name]), name
    assert not any(found["dense_4/kernel"])


def test_a_table_of_indivisible_rows_is_divided_by_its_width():
    keras.backend.clear_session(free_memory=False)
    found = axes_in(transformer(vocabulary=23), 4)
    assert found["embedding/embeddings"] == (None, "model")
    # Neither 23 words nor a width of 16.
    keras.backend.clear_session(free_memory=False)
    found = axes_in(transformer(lambda: grouped(6, 6), vocabulary=23), 3)
    assert not any(found["embedding/embeddings"])


class DenseAttention(layers.Layer):
    """Attention of matrices: attributes alone tell their roles and heads."""

    def __init__(self, width, heads, key_heads=None, **kwargs):
        super().__init__(**kwargs)
        self.num_heads = heads
        self.num_key_value_heads = key_heads or heads
        self.size = width // heads
        num_key_heads = self.size * self.num_key_value_heads
        self.q = layers.Dense(width)
        self.k = layers.Dense(num_key_heads)
        self.v = layers.Dense(num_key_heads)
        self.last = layers.Dense(width, name="last")

    def build(self, shape):
        for layer in (self.q, self.k, self.v, self.last):
            layer.build(shape)

    def call(self, x):
        def split(y, heads):
            return keras.ops.reshape(
                y, (-1, x.shape[1], heads, y.shape[-1] // heads)
            )

        repeats = self.num_heads // self.num_key_value_heads
        key, value = (
            keras.ops.repeat(
                split(layer(x), self.num_key_value_heads), repeats, axis=2
            )
            for layer in (self.k, self.v)
        )
        y = keras.ops.dot_product_attention(
            split(self.q(x), self.num_heads), key, value
        )
        return self.last(keras.ops.reshape(y, (-1, *x.shape[1:])))


def kernels_in(model, cores):
    """Of each kernel, by its layer: the divided dimension, or None."""
    layout_map = transformer_layout(model, cores)
    strategy = cores_strategy(1, cores, layout_map)
    strategy.attach(model)
    return {
        v.path.split("/")[-2]: next(
            (d for d, a in enumerate(v.value.sharding.spec) if a), None
        )
        for v in model.variables
        if v.name == "kernel"
    }


def build_layers(*made, shape=(6, 24)):
    keras.backend.clear_session(free_memory=False)
    x = inputs = keras.Input(shape)
    for make in made:
        x = make()(x)
    return keras.Model(inputs, x)


@pytest.mark.parametrize(
    ("heads", "key_heads", "cores", "expected"),
    few(
        [
            (4, None, 4, [1, 1, 1, 0]),
            # 24 columns are divisible, 6 heads are not.
            (6, None, 4, [None] * 4),
            (4, 2, 4, [1, None, None, 0]),
            (12, 4, 4, [1, 1, 1, 0]),
        ],
        every=2,
    ),
)
def test_matrices_are_divided_only_by_whole_heads(
    heads, key_heads, cores, expected
):
    model = build_layers(
        lambda: DenseAttention(24, heads, key_heads),
        lambda: layers.Dense(96),
        lambda: layers.Dense(24),
    )
    found = kernels_in(model, cores)
    names = ("dense", "dense_1", "dense_2", "last")
    assert [found[name] for name in names] == expected
    assert [found["dense_3"], found["dense_4"]] == [1, 0]


def test_layers_of_one_name_with_other_heads_are_told_apart_by_shape():
    # Stages of an image model: 2 heads of width 24, then 4 of width 48.
    model = build_layers(
        lambda: DenseAttention(24, 2),
        lambda: layers.Dense(48, name="wider"),
        lambda: DenseAttention(48, 4),
    )
    found = kernels_in(model, 4)
    assert [found[f"dense{n}"] for n in ("", "_1", "_2")] == [None] * 3
    assert [found[f"dense_{n}"] for n in (3, 4, 5)] == [1] * 3


def test_square_kernels_of_one_name_are_divided_alike():
    model = build_layers(lambda: FusedAttention(24, 4, is_split=True))
    # Neither names nor shapes tell the last from those before.
    assert set(kernels_in(model, 4).values()) == {1}


class FusedAttention(layers.Layer):
    """One layer makes queries, keys and values, or three do."""

    def __init__(self, width, heads, is_split=False, **kwargs):
        super().__init__(**kwargs)
        self.heads = heads
        if is_split:
            self.q, self.k, self.v = (layers.Dense(width) for _ in range(3))
            self.into = [self.q, self.k, self.v]
        else:
            self.attention_qkv = layers.Dense(3 * width)
            self.into = [self.attention_qkv]
        self.projection = layers.Dense(width)

    def build(self, shape):
        for layer in (*self.into, self.projection):
            layer.build(shape)

    def call(self, x):
        made = keras.ops.concatenate([layer(x) for layer in self.into], -1)
        shape = (-1, x.shape[1], self.heads, x.shape[-1] // self.heads)
        parts = keras.ops.split(made, 3, axis=-1)
        y = keras.ops.dot_product_attention(
            *(keras.ops.reshape(part, shape) for part in parts)
        )
        return self.projection(keras.ops.reshape(y, (-1, *x.shape[1:])))


@pytest.mark.parametrize(("heads", "expected"), [(4, [1, 0]), (6, [None] * 2)])
def test_one_kernel_of_queries_keys_and_values(heads, expected):
    model = build_layers(
        lambda: FusedAttention(24, heads),
        lambda: layers.Dense(96),
        lambda: layers.Dense(24),
    )
    found = kernels_in(model, 4)
    assert [found["dense"], found["dense_1"]] == expected


class Experts(layers.Layer):
    """Gates and values side by side in one kernel, as in keras-hub."""

    def __init__(self, experts, **kwargs):
        super().__init__(**kwargs)
        self.experts = experts

    def build(self, shape):
        width, inner = shape[-1], 10
        shapes = {
            "gate_up": (self.experts, width, 2 * inner),
            "gate_up_bias": (self.experts, 2 * inner),
            "down": (self.experts, inner, width),
        }
        self.all = [
            self.add_weight(shape=s, name=name) for name, s in shapes.items()
        ]

    def call(self, x):
        up = keras.ops.einsum("btd,edi->beti", x, self.all[0])
        up += self.all[1][None, :, None, :]
        gate, value = keras.ops.split(up, 2, axis=-1)
        down = keras.ops.einsum("beti,eid->btd", gate * value, self.all[2])
        return x + down


@pytest.mark.parametrize(
    ("experts", "is_divided"), few([(8, True), (6, False)], every=2)
)
def test_experts_with_fused_gates_are_dealt_out(experts, is_divided):
    model = build_layers(
        lambda: DenseAttention(24, 4), lambda: Experts(experts, name="moe")
    )
    found = axes_in(model, 4)
    rest = "model" if is_divided else None
    assert found["moe/gate_up"] == ((rest, None, None) if rest else ())
    assert found["moe/gate_up_bias"] == ((rest, None) if rest else ())
    assert found["moe/down"] == ((rest, None, None) if rest else ())


@pytest.mark.parametrize(
    ("make", "expected"),
    few(
        [
            # It has no partner: columns if it widens, else rows.
            (lambda: layers.Dense(200, name="alone"), 1),
            (lambda: layers.Dense(20, name="alone"), 0),
            (lambda: layers.Conv1D(64, 3, name="alone"), 2),
            # No heads in sight, and 202 is no multiple of 4: its rows.
            (lambda: layers.Dense(202, name="alone"), 0),
        ],
        every=2,
    ),
)
def test_other_large_kernels_are_divided(make, expected):
    model = build_layers(lambda: DenseAttention(24, 4), make)
    assert kernels_in(model, 4)["alone"] == expected


def test_other_small_kernels_stay_whole():
    model = build_layers(
        lambda: DenseAttention(96, 4),
        lambda: layers.Dense(4, name="alone"),
        shape=(6, 96),
    )
    assert kernels_in(model, 4)["alone"] is None


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


@pytest.mark.slow
def test_a_model_with_other_names_is_divided_and_trains_as_on_one_device():
    # The layers of what is trained have other numbers in their names.
    layout_map = transformer_layout(transformer(grouped), 2)
    wanted, loss = trained(ks.OneDeviceStrategy("cpu:0"))
    strategy = cores_strategy(
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

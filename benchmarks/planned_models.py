"""Models of at least 500 MB whose plans are compared with real steps.

Each has a tiny twin of the same layers: what its process takes is Python's,
the compiler's and the libraries', and no part of a plan.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import keras
from keras import layers

import keras_strategies as ks

TINY_ROWS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A model, how it is trained and on what.

    Attributes:
      make: Makes it, of `sizes`. One of numbers of tokens is a classifier.
      sizes: Its sizes.
      tiny: The same, of its twin.
      rows: Of the global batch.
      optimizer: "SGD", "Adam" or "AdamW".
      devices: Virtual CPU devices.
      is_sharded: Whether they divide its variables.
      policy: Keras's dtype policy.
    """

    make: Callable[..., keras.Model]
    sizes: Mapping[str, Any]
    tiny: Mapping[str, Any]
    rows: int
    optimizer: str = "Adam"
    devices: int = 1
    is_sharded: bool = False
    policy: str = "float32"

    @property
    def layout(self) -> str:
        """The layout, in a plan's words."""
        return "sharded" if self.is_sharded else "replicated"

    def build(self, *, is_tiny: bool = False) -> keras.Model:
        """The compiled model, or its twin."""
        keras.config.set_dtype_policy(self.policy)
        model = self.make(**(self.tiny if is_tiny else self.sizes))
        loss: Any = keras.losses.MeanSquaredError()
        if _is_classifier(model):
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(getattr(keras.optimizers, self.optimizer)(1e-3), loss)
        return model

    def batch(self, *, is_tiny: bool = False) -> tuple[Any, Any]:
        """`(x, y)` of shapes, of a global batch."""
        with ks.abstract():
            model = self.build(is_tiny=is_tiny)
        x, y = model.inputs[0], model.outputs[0]
        y_shape, y_type = y.shape[1:], "float32"
        if _is_classifier(model):
            y_shape, y_type = y.shape[1:-1], "int32"
        rows = TINY_ROWS if is_tiny else self.rows
        return (
            jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype),
            jax.ShapeDtypeStruct((rows, *y_shape), y_type),
        )


def _is_classifier(model: keras.Model) -> bool:
    return model.inputs[0].dtype == "int32"


def mlp(width, depth, features=256):
    """Dense layers of one width."""
    hidden = [layers.Dense(width, activation="relu") for _ in range(depth)]
    last = layers.Dense(16, dtype="float32")
    return keras.Sequential([keras.Input((features,)), *hidden, last])


def cnn(side, filters, depth):
    """Convolutions that keep the image's size: activations, few weights."""
    value = inputs = keras.Input((side, side, 3))
    for _ in range(depth):
        value = layers.Conv2D(filters, 3, padding="same")(value)
        value = layers.ReLU()(value)
    value = layers.GlobalAveragePooling2D()(value)
    outputs = layers.Dense(16, dtype="float32")(value)
    return keras.Model(inputs, outputs)


def resnet(side, filters, blocks):
    """Residual blocks in stages, each of twice the filters."""

    def convolved(value, filters, strides=1):
        value = layers.Conv2D(
            filters, 3, strides=strides, padding="same", use_bias=False
        )(value)
        return layers.BatchNormalization()(value)

    inputs = keras.Input((side, side, 3))
    value = layers.ReLU()(convolved(inputs, filters))
    for stage in range(4):
        for block in range(blocks):
            many, strides = filters * 2**stage, 1
            if stage and not block:
                strides = 2
                value = convolved(value, many, strides)
            hidden = layers.ReLU()(convolved(value, many))
            value = layers.ReLU()(value + convolved(hidden, many))
    value = layers.GlobalAveragePooling2D()(value)
    outputs = layers.Dense(16, dtype="float32")(value)
    return keras.Model(inputs, outputs)


def lstm(steps, units):
    """Two LSTM layers."""
    return keras.Sequential(
        [
            keras.Input((steps, 64)),
            layers.LSTM(units, return_sequences=True),
            layers.LSTM(units),
            layers.Dense(16, dtype="float32"),
        ]
    )


class Block(layers.Layer):
    """A decoder's block: causal attention, and two dense layers."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        heads = max(width // 64, 1)
        self.attention = layers.MultiHeadAttention(heads, width // heads)
        self.norms = [layers.LayerNormalization() for _ in range(2)]
        self.wide = layers.Dense(4 * width, activation="gelu")
        self.narrow = layers.Dense(width)

    def build(self, shape):
        self.attention.build(shape, shape)
        for layer in (*self.norms, self.wide):
            layer.build(shape)
        self.narrow.build((*shape[:-1], self.wide.units))

    def call(self, x):
        normal = self.norms[0](x)
        x = x + self.attention(normal, normal, use_causal_mask=True)
        return x + self.narrow(self.wide(self.norms[1](x)))


def decoder(width, depth, tokens, words, has_remat=False):
    """A decoder, whose blocks may be computed again in the backward pass."""
    names = [f"block{i}" for i in range(depth)]
    inputs = keras.Input((tokens,), dtype="int32")
    value = layers.Embedding(words, width)(inputs)
    mode = "list_of_layers" if has_remat else None
    with keras.RematScope(mode=mode, layer_names=names):
        for name in names:
            value = Block(width, name=name)(value)
    value = layers.LayerNormalization()(value)
    outputs = layers.Dense(words, dtype="float32")(value)
    return keras.Model(inputs, outputs)


def embedding(words, width, tokens):
    """A table of words, most of the model."""
    return keras.Sequential(
        [
            keras.Input((tokens,), dtype="int32"),
            layers.Embedding(words, width),
            layers.GlobalAveragePooling1D(),
            layers.Dense(width, activation="relu"),
            layers.Dense(16, dtype="float32"),
        ]
    )


def autoencoder(side, filters, code):
    """Convolutions down to a code, and up again."""

    def convolved(value, filters, strides=1):
        return layers.Conv2D(
            filters, 3, strides=strides, padding="same", activation="relu"
        )(value)

    value = inputs = keras.Input((side, side, 3))
    for level in range(3):
        value = convolved(value, filters * 2**level, strides=2)
    shape = value.shape[1:]
    value = layers.Dense(code, activation="relu")(layers.Flatten()(value))
    value = layers.Dense(shape[0] * shape[1] * shape[2])(value)
    value = layers.Reshape(shape)(value)
    for level in reversed(range(3)):
        value = convolved(layers.UpSampling2D()(value), filters * 2**level)
    outputs = layers.Conv2D(3, 3, padding="same", dtype="float32")(value)
    return keras.Model(inputs, outputs)


_TINY_MLP = {"width": 8, "depth": 3, "features": 8}
_WIDE = {
    "make": mlp,
    "sizes": {"width": 4096, "depth": 4},
    "tiny": {**_TINY_MLP, "depth": 4},
    "rows": 256,
}
_WIDER = _WIDE | {
    "sizes": {"width": 4096, "depth": 8},
    "tiny": {**_TINY_MLP, "depth": 8},
}
_DEEP = {
    "make": mlp,
    "sizes": {"width": 1024, "depth": 40},
    "tiny": {**_TINY_MLP, "depth": 40},
    "rows": 128,
}
_CNN = {
    "make": cnn,
    "sizes": {"side": 64, "filters": 48, "depth": 6},
    "tiny": {"side": 8, "filters": 8, "depth": 6},
    "rows": 64,
}
_RESNET = {
    "make": resnet,
    "sizes": {"side": 32, "filters": 112, "blocks": 1},
    "tiny": {"side": 8, "filters": 8, "blocks": 1},
    "rows": 64,
}
_LSTM = {
    "make": lstm,
    "sizes": {"steps": 16, "units": 1536},
    "tiny": {"steps": 16, "units": 8},
    "rows": 64,
}
_SMALL_DECODER = {"width": 16, "tokens": 16, "words": 64}
_DECODER = {
    "make": decoder,
    "sizes": {"width": 512, "depth": 6, "tokens": 128, "words": 8192},
    "tiny": {**_SMALL_DECODER, "depth": 6},
    "rows": 16,
}
_REMAT = _DECODER | {
    "sizes": {**_DECODER["sizes"], "depth": 8, "has_remat": True},
    "tiny": {**_DECODER["tiny"], "depth": 8, "has_remat": True},
}
_EMBEDDING = {
    "make": embedding,
    "sizes": {"words": 200_000, "width": 512, "tokens": 64},
    "tiny": {"words": 100, "width": 8, "tokens": 64},
    "rows": 256,
}
_AUTOENCODER = {
    "make": autoencoder,
    "sizes": {"side": 64, "filters": 32, "code": 2048},
    "tiny": {"side": 16, "filters": 8, "code": 8},
    "rows": 32,
}

CASES = {
    "wide_mlp": Case(**_WIDE),
    "wide_mlp_sgd": Case(**_WIDER, optimizer="SGD"),
    "wide_mlp_bf16": Case(**_WIDE, policy="mixed_bfloat16"),
    "wide_mlp_x2": Case(**_WIDE, devices=2),
    "wide_mlp_sharded_x4": Case(**_WIDE, devices=4, is_sharded=True),
    "deep_mlp": Case(**_DEEP, optimizer="AdamW"),
    "deep_mlp_sharded_x2": Case(**_DEEP, devices=2, is_sharded=True),
    "cnn_sgd": Case(**_CNN, optimizer="SGD"),
    "cnn_x2": Case(**_CNN, devices=2),
    "resnet": Case(**_RESNET),
    "resnet_sharded_x4": Case(**_RESNET, devices=4, is_sharded=True),
    "lstm": Case(**_LSTM),
    "lstm_sgd_x2": Case(**_LSTM, optimizer="SGD", devices=2),
    "decoder": Case(**_DECODER, optimizer="AdamW"),
    "decoder_remat": Case(**_REMAT, optimizer="AdamW"),
    "decoder_bf16": Case(
        **_DECODER, optimizer="AdamW", policy="mixed_bfloat16"
    ),
    "decoder_sharded_x4": Case(
        **_DECODER, optimizer="AdamW", devices=4, is_sharded=True
    ),
    "embedding": Case(**_EMBEDDING),
    "embedding_sgd_x2": Case(**_EMBEDDING, optimizer="SGD", devices=2),
    "autoencoder": Case(**_AUTOENCODER),
}

"""Ordinary models keep their steps mapped over the replicas.

A loss that is not shown to be a mean over rows runs over the global batch, so
what cannot be shown of an ordinary model would cost its users speed. Each
model's train and test steps are traced here, and not compiled.
"""

import functools
import warnings

import jax
import keras
import numpy as np
import pytest
from keras import layers, losses, ops

from keras_strategies.fit.binding import find_binding
from keras_strategies.step.lower_step import lower_step
from tests.support.combinations import combine, few
from tests.support.models import chain
from tests.support.plain_keras import mirrored

ROWS = 12
CLASSES = 3
_random = np.random.default_rng(0)


def floats(*shape):
    return _random.random((ROWS, *shape)).astype("float32")


def integers(high, *shape):
    return _random.integers(0, high, (ROWS, *shape)).astype("int32")


LABELS = integers(CLASSES)
ONE_HOT = np.eye(CLASSES, dtype="float32")[LABELS]
VECTORS, SEQUENCES, IMAGES = floats(8), floats(6, 4), floats(8, 8, 2)
VOLUMES, TOKENS = floats(4, 4, 4, 2), integers(9, 6)
WEIGHTS = floats()


def train_step(self, state, data):
    """A step as users write it, whose gradients no hook makes."""
    weights, others, slots, metrics = state
    x, y, weight = keras.utils.unpack_x_y_sample_weight(data)

    def compute(weights):
        outputs, new, added = self.stateless_call(
            weights, others, x, training=True, return_losses=True
        )
        loss = self.compute_loss(x, y, outputs, weight)
        return loss + sum(added), new

    (loss, others), gradients = jax.value_and_grad(compute, has_aux=True)(
        weights
    )
    weights, slots = self.optimizer.stateless_apply(slots, gradients, weights)
    return {"loss": loss}, (weights, others, slots, metrics)


def check_is_mapped(
    model,
    x,
    y,
    *,
    loss="mse",
    weight=None,
    replicas=2,
    kinds=("train",),
    has_own_step=False,
    **compiled,
):
    """Traces steps; no warning of the global batch."""
    strategy = mirrored(replicas)
    with strategy.scope(), warnings.catch_warnings():
        warnings.simplefilter("error")
        # Keras 3.16's nightlies say so of LSTM and GRU, which use the mask.
        warnings.filterwarnings("ignore", ".*does not support masking")
        keras.utils.set_random_seed(0)
        model = model()
        if has_own_step:
            own = {"train_step": train_step}
            model.__class__ = type("Own", (type(model),), own)
        model.compile("adam", loss, **compiled)
        strategy.attach(model)
        build = find_binding(model).build_for_shapes
        batch = (x, y) if weight is None else (x, y, weight)
        for kind in kinds:
            lowered = lower_step(model, strategy.mesh, kind, batch, build)
            assert "whole" not in lowered.as_text()[:200]


def through(*middle, x):
    """A model of layers that ends in one number a row."""
    inputs = keras.Input(x.shape[1:], dtype=str(x.dtype))
    value = inputs
    for layer in middle:
        value = layer(value)
    if len(value.shape) > 2:
        value = layers.Flatten()(value)
    return keras.Model(inputs, layers.Dense(1)(ops.cast(value, "float32")))


OF_VECTORS = {
    "dense": lambda: layers.Dense(4, "relu"),
    "einsum_dense": lambda: layers.EinsumDense("ab,bc->ac", 4),
    "activation": lambda: layers.Activation("gelu"),
    "prelu": lambda: layers.PReLU(),
    "softmax": lambda: layers.Softmax(),
    "dropout": lambda: layers.Dropout(0.3),
    "alpha_dropout": lambda: layers.AlphaDropout(0.3),
    "gaussian_noise": lambda: layers.GaussianNoise(0.3),
    "gaussian_dropout": lambda: layers.GaussianDropout(0.3),
    "batch_norm": lambda: layers.BatchNormalization(),
    "layer_norm": lambda: layers.LayerNormalization(),
    "rms_norm": lambda: layers.RMSNormalization(),
    "unit_norm": lambda: layers.UnitNormalization(),
    "spectral_norm": lambda: layers.SpectralNormalization(layers.Dense(4)),
    "reshape": lambda: layers.Reshape((2, 4)),
    "repeat_vector": lambda: layers.RepeatVector(3),
    "rescaling": lambda: layers.Rescaling(2.0),
    "discretization": lambda: layers.Discretization([0.2, 0.6]),
    "category_encoding": lambda: layers.CategoryEncoding(
        4, output_mode="multi_hot"
    ),
}
OF_SEQUENCES = {
    "lstm": lambda: layers.LSTM(4),
    "gru": lambda: layers.GRU(4, return_sequences=True),
    "gru_unrolled": lambda: layers.GRU(4, unroll=True),
    "rnn_backwards": lambda: layers.SimpleRNN(4, go_backwards=True),
    "bidirectional": lambda: layers.Bidirectional(layers.LSTM(4, dropout=0.2)),
    "masking": lambda: keras.Sequential([layers.Masking(0.5), layers.LSTM(3)]),
    "stacked": lambda: layers.RNN([layers.GRUCell(3), layers.LSTMCell(3)]),
    "time_distributed": lambda: layers.TimeDistributed(layers.Dense(3)),
    "fourier": lambda: layers.Lambda(lambda x: ops.rfft(x)[0]),
    "conv1d": lambda: layers.Conv1D(4, 3, padding="causal"),
    "separable1d": lambda: layers.SeparableConv1D(4, 3),
    "conv1d_transpose": lambda: layers.Conv1DTranspose(4, 3),
    "max_pool1d": lambda: layers.MaxPooling1D(2),
    "average_pool1d": lambda: layers.AveragePooling1D(2, padding="same"),
    "global_average1d": lambda: layers.GlobalAveragePooling1D(),
    "global_max1d": lambda: layers.GlobalMaxPooling1D(),
    "upsampling1d": lambda: layers.UpSampling1D(2),
    "zero_padding1d": lambda: layers.ZeroPadding1D(1),
    "cropping1d": lambda: layers.Cropping1D(1),
    "permute": lambda: layers.Permute((2, 1)),
    "spatial_dropout": lambda: layers.SpatialDropout1D(0.2),
    "group_norm": lambda: layers.GroupNormalization(2),
    "batch_norm_sequences": lambda: layers.BatchNormalization(),
}
OF_IMAGES = {
    "conv2d": lambda: layers.Conv2D(4, 3, strides=2, activation="relu"),
    "conv2d_groups": lambda: layers.Conv2D(4, 3, groups=2),
    "depthwise2d": lambda: layers.DepthwiseConv2D(3, depth_multiplier=2),
    "separable2d": lambda: layers.SeparableConv2D(4, 3),
    "conv2d_transpose": lambda: layers.Conv2DTranspose(4, 3, strides=2),
    "max_pool2d": lambda: layers.MaxPooling2D(),
    "average_pool2d": lambda: layers.AveragePooling2D(2, padding="same"),
    "global_average2d": lambda: layers.GlobalAveragePooling2D(),
    "upsampling2d": lambda: layers.UpSampling2D(2, interpolation="bilinear"),
    "resizing": lambda: layers.Resizing(5, 5),
    "center_crop": lambda: layers.CenterCrop(6, 6),
    "random_flip": lambda: layers.RandomFlip(),
    "random_rotation": lambda: layers.RandomRotation(0.2),
    "random_zoom": lambda: layers.RandomZoom(0.2),
    "random_translation": lambda: layers.RandomTranslation(0.2, 0.2),
    "random_contrast": lambda: layers.RandomContrast(0.2),
    "random_brightness": lambda: layers.RandomBrightness(0.2),
    "random_erasing": lambda: layers.RandomErasing(),
    "conv_lstm": lambda: keras.Sequential(
        [layers.Reshape((2, 4, 8, 2)), layers.ConvLSTM2D(3, 3)]
    ),
    "batch_norm_images": lambda: layers.BatchNormalization(),
    "spatial_dropout2d": lambda: layers.SpatialDropout2D(0.2),
}
OF_VOLUMES = {
    "conv3d": lambda: layers.Conv3D(3, 2),
    "max_pool3d": lambda: layers.MaxPooling3D(2),
    "conv3d_transpose": lambda: layers.Conv3DTranspose(3, 2),
}
OF_TOKENS = {
    "embedding": lambda: layers.Embedding(9, 4),
    "embedding_masked": lambda: keras.Sequential(
        [layers.Embedding(9, 4, mask_zero=True), layers.GRU(4)]
    ),
}
LAYERS = [
    pytest.param(make, x, id=name)
    for table, x in (
        (OF_VECTORS, VECTORS),
        (OF_SEQUENCES, SEQUENCES),
        (OF_IMAGES, IMAGES),
        (OF_VOLUMES, VOLUMES),
        (OF_TOKENS, TOKENS),
    )
    for name, make in table.items()
]


@pytest.mark.parametrize(("make", "x"), few(LAYERS, every=6))
def test_each_layer_is_mapped(make, x):
    build = functools.partial(through, x=x)
    check_is_mapped(lambda: build(make()), x, floats(1))


@pytest.mark.parametrize(
    ("make", "x"),
    [
        pytest.param(OF_TOKENS["embedding_masked"], TOKENS, id="masked"),
        *few(LAYERS, every=12),
    ],
)
def test_each_layer_is_mapped_in_a_step_of_ones_own(make, x):
    build = functools.partial(through, x=x)
    check_is_mapped(lambda: build(make()), x, floats(1), has_own_step=True)


def classifier(activation=None):
    return chain((8,), layers.Dense(CLASSES, activation=activation))


LOSSES = {
    "mse": (lambda: "mse", ONE_HOT),
    "mae": (lambda: "mae", ONE_HOT),
    "mape": (lambda: "mape", ONE_HOT),
    "msle": (lambda: "msle", ONE_HOT),
    "huber": (lambda: losses.Huber(), ONE_HOT),
    "log_cosh": (lambda: losses.LogCosh(), ONE_HOT),
    "kl": (lambda: losses.KLDivergence(), ONE_HOT),
    "poisson": (lambda: losses.Poisson(), ONE_HOT),
    "cosine": (lambda: losses.CosineSimilarity(), ONE_HOT),
    "binary": (lambda: losses.BinaryCrossentropy(), ONE_HOT),
    "binary_focal": (lambda: losses.BinaryFocalCrossentropy(), ONE_HOT),
    "categorical": (lambda: losses.CategoricalCrossentropy(), ONE_HOT),
    "smoothed": (
        lambda: losses.CategoricalCrossentropy(label_smoothing=0.1),
        ONE_HOT,
    ),
    "categorical_focal": (
        lambda: losses.CategoricalFocalCrossentropy(),
        ONE_HOT,
    ),
    "sparse": (
        lambda: losses.SparseCategoricalCrossentropy(from_logits=True),
        LABELS,
    ),
    "sparse_ignored": (
        lambda: losses.SparseCategoricalCrossentropy(ignore_class=0),
        LABELS,
    ),
    "categorical_hinge": (lambda: losses.CategoricalHinge(), ONE_HOT),
    "hinge": (lambda: losses.Hinge(), ONE_HOT),
    "dice": (lambda: losses.Dice(), ONE_HOT),
    "tversky": (lambda: losses.Tversky(), ONE_HOT),
    "sum": (lambda: losses.MeanSquaredError(reduction="sum"), ONE_HOT),
    "weighted_mean": (
        lambda: losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        ONE_HOT,
    ),
    # Of one's own, for each row; with square roots and sums within a row.
    "norm_of_rows": (
        lambda: lambda t, p: ops.sqrt(ops.sum(ops.square(t - p), -1) + 1e-6),
        ONE_HOT,
    ),
    "normalized_rows": (
        lambda: lambda t, p: ops.sum(t * p, -1) / (ops.sum(p, -1) + 1.0),
        ONE_HOT,
    ),
    "mean_of_rows": (
        lambda: lambda t, p: ops.mean(ops.sum(ops.square(t - p), axis=-1)),
        ONE_HOT,
    ),
    "quantile": (
        lambda: (
            lambda t, p: ops.mean(ops.maximum(0.9 * (t - p), 0.1 * (p - t)))
        ),
        ONE_HOT,
    ),
    "sum_over_rows": (
        lambda: (
            lambda t, p: (
                ops.sum(ops.abs(t - p)) / ops.cast(ops.shape(t)[0], "float32")
            )
        ),
        ONE_HOT,
    ),
    "picked_by_label": (
        lambda: (
            lambda t, p: (
                -ops.mean(
                    ops.log_softmax(p)[
                        ops.arange(ops.shape(p)[0]), ops.cast(t, int)
                    ]
                )
            )
        ),
        LABELS,
    ),
    "taken_by_label": (
        lambda: (
            lambda t, p: (
                -ops.take_along_axis(
                    ops.log_softmax(p), ops.cast(t, "int32")[:, None], axis=1
                )
            )
        ),
        LABELS,
    ),
    "conditional": (
        lambda: (
            lambda t, p: ops.mean(
                ops.where(ops.abs(t - p) < 1, ops.square(t - p), ops.abs(t - p))
            )
        ),
        ONE_HOT,
    ),
    "of_vectorized_rows": (
        lambda: (
            lambda t, p: ops.mean(
                ops.vectorized_map(lambda a: ops.norm(a[0] - a[1]), (t, p))
            )
        ),
        ONE_HOT,
    ),
}

_OF_SCALARS = (
    *("mean_of_rows", "quantile", "sum_over_rows"),
    *("picked_by_label", "conditional", "of_vectorized_rows"),
)


@pytest.mark.parametrize("name", combine(LOSSES, every=3))
def test_each_loss_of_rows_is_mapped(name):
    make, y = LOSSES[name]
    build = functools.partial(classifier, "sigmoid")
    # A scalar times the weights of rows would be another scalar for each.
    is_scalar = name in _OF_SCALARS
    weight = None if is_scalar else WEIGHTS
    check_is_mapped(build, VECTORS, y, loss=make(), weight=weight)


@pytest.mark.parametrize("name", ["picked_by_label", *combine(LOSSES, every=8)])
def test_each_loss_of_rows_is_mapped_in_a_step_of_ones_own(name):
    make, y = LOSSES[name]
    build = functools.partial(classifier, "sigmoid")
    weight = None if name in _OF_SCALARS else WEIGHTS
    check_is_mapped(
        build, VECTORS, y, loss=make(), weight=weight, has_own_step=True
    )


@pytest.mark.parametrize("rows", combine([1, 2, 4, 8], every=2))
def test_a_few_rows_a_replica_are_mapped(rows):
    """Numbers of rows that are also widths, factors, or one."""

    def build():
        return chain(
            (8,),
            layers.Dense(8, kernel_regularizer=keras.regularizers.L2(0.5)),
            layers.LayerNormalization(),
            layers.Reshape((2, 4)),
            layers.Flatten(),
            layers.Dense(CLASSES),
        )

    check_is_mapped(
        build, VECTORS[: 2 * rows], ONE_HOT[: 2 * rows], loss_weights=0.5
    )


class Variational(keras.Model):
    """A variational autoencoder, with its losses added in `call`."""

    def __init__(self):
        super().__init__()
        self.encoder = layers.Dense(4)
        self.decoder = layers.Dense(8)
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        mean, log_var = ops.split(self.encoder(x), 2, axis=-1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        kl = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
        self.add_loss(ops.mean(ops.sum(kl, axis=1)))
        return self.decoder(mean + ops.exp(0.5 * log_var) * noise)


class Siamese(keras.Model):
    """Two views that are encoded together, and compared row by row."""

    def __init__(self):
        super().__init__()
        self.encoder = layers.Dense(4)

    def call(self, x):
        both = ops.concatenate([x, x + 0.1], axis=0)
        one, two = ops.split(self.encoder(both), 2)
        return ops.sum(one * two, axis=-1, keepdims=True)


def attention(layer=None):
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 8)(inputs)
    x = (layer or layers.MultiHeadAttention(2, 4, dropout=0.1))(
        x, x, use_causal_mask=True
    )
    x = layers.LayerNormalization()(x)
    return keras.Model(inputs, layers.Dense(CLASSES)(x[:, -1]))


def masked_attention():
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 8, mask_zero=True)(inputs)
    x = x + layers.MultiHeadAttention(2, 4)(x, x)
    return keras.Model(inputs, layers.Dense(9)(x))


def unet():
    inputs = keras.Input((8, 8, 2))
    down = layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)
    deep = layers.Conv2D(4, 3, padding="same")(layers.MaxPooling2D()(down))
    deep = layers.BatchNormalization()(deep)
    up = layers.Concatenate()([layers.UpSampling2D()(deep), down])
    return keras.Model(inputs, layers.Conv2D(2, 1)(up))


def residual():
    inputs = keras.Input((8, 8, 2))
    x = layers.Conv2D(4, 3, padding="same")(inputs)
    x = layers.BatchNormalization()(x)
    x = layers.ReLU()(x)
    gate = layers.GlobalAveragePooling2D(keepdims=True)(x)
    x = layers.Add()([x, layers.Multiply()([x, layers.Dense(4)(gate)])])
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))


def gated():
    """A mixture of experts that computes every expert for each row."""
    inputs = keras.Input((8,))
    gate = layers.Dense(3, activation="softmax")(inputs)
    best, place = ops.top_k(gate, 2)
    chosen = ops.sum(ops.one_hot(place, 3) * best[..., None], axis=1)
    experts = ops.stack([layers.Dense(4)(inputs) for _ in range(3)], axis=1)
    mixed = ops.sum(experts * chosen[..., None], axis=1)
    return keras.Model(inputs, layers.Dense(CLASSES)(mixed))


def rematerialized():
    with keras.RematScope(mode="full"):
        return chain(
            (8,),
            layers.Dense(8, "relu"),
            layers.Dense(8, "relu"),
            layers.Dense(CLASSES),
        )


def mixed_precision():
    return chain(
        (8,),
        layers.Dense(8, "relu", dtype="mixed_bfloat16"),
        layers.Dense(CLASSES, dtype="float32"),
    )


class RootOfMean(keras.metrics.Metric):
    """Computes its result from two sums, in user code."""

    def __init__(self):
        super().__init__(name="root")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(ops.sum(ops.square(y_true - y_pred)))
        self.count.assign_add(ops.cast(ops.size(y_pred), "float32"))

    def result(self):
        return ops.sqrt(self.total / self.count) + 0.0


SPARSE = losses.SparseCategoricalCrossentropy(from_logits=True)
MODELS = {
    "variational": (Variational, VECTORS, VECTORS, {}),
    "siamese": (Siamese, VECTORS, floats(1), {}),
    "attention": (attention, TOKENS, LABELS, {"loss": SPARSE}),
    "grouped_attention": (
        lambda: attention(layers.GroupQueryAttention(4, 4, 2)),
        TOKENS,
        LABELS,
        {"loss": SPARSE},
    ),
    "masked_attention": (
        masked_attention,
        TOKENS,
        TOKENS,
        {"loss": SPARSE, "metrics": ["accuracy"]},
    ),
    "unet": (unet, IMAGES, floats(8, 8, 2), {}),
    "residual": (residual, IMAGES, LABELS, {"loss": SPARSE}),
    "gated_experts": (gated, VECTORS, LABELS, {"loss": SPARSE}),
    "rematerialized": (rematerialized, VECTORS, ONE_HOT, {}),
    "mixed_precision": (mixed_precision, VECTORS, ONE_HOT, {}),
    "metrics": (
        lambda: classifier("sigmoid"),
        VECTORS,
        ONE_HOT,
        {"metrics": ["accuracy", keras.metrics.AUC(), "mae"]},
    ),
    "custom_metric": (
        classifier,
        VECTORS,
        ONE_HOT,
        {"metrics": [RootOfMean()]},
    ),
    "auto_scaled": (classifier, VECTORS, ONE_HOT, {"auto_scale_loss": True}),
    "connectionist": (
        lambda: keras.Sequential([keras.Input((6, 4)), layers.Dense(5)]),
        SEQUENCES,
        integers(4, 3) + 1,
        {"loss": losses.CTC()},
    ),
}


@pytest.mark.parametrize("name", combine(MODELS, every=2))
def test_each_model_is_mapped(name):
    build, x, y, compiled = MODELS[name]
    check_is_mapped(build, x, y, kinds=("train", "test"), **compiled)

"""Kinds of layers, compiled for GPUs without one: `./run test -m gpu`.

Bytes are counted by hand, in entries of 4 bytes where nothing else is said.
"""

import dataclasses

import keras
import pytest
from keras import layers, ops

from keras_strategies.experimental import FullySharded, SlotsOnly
from tests.gpu.programs import LOGS, Case, check_step

pytestmark = pytest.mark.gpu

SHARDED = FullySharded(min_size=1)
IMAGES = ((16, 16, 8), "float32")


def stack(shape, *made, dtype="float32"):
    """Returns a function that makes a sequential model of 8 outputs."""

    def make():
        every = [layer() for layer in made]
        return keras.Sequential(
            [keras.Input(shape, dtype=dtype), *every, layers.Dense(8)]
        )

    return make


def around(fn):
    """Returns a function that makes a model with `fn` between its layers."""
    return stack(
        (64,),
        lambda: layers.Dense(64),
        lambda: layers.Lambda(fn),
        layers.Flatten,
    )


def make_bottleneck():
    """A block of ResNet50, with the convolution of its shortcut."""
    images = keras.Input(IMAGES[0])
    x = images
    for filters, size in ((8, 1), (8, 3), (32, 1)):
        x = layers.Conv2D(filters, size, padding="same")(x)
        x = layers.ReLU()(layers.BatchNormalization()(x))
    x += layers.BatchNormalization()(layers.Conv2D(32, 1)(images))
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(x))
    return keras.Model(images, layers.Dense(8, dtype="float32")(x))


def multiply_by_transposed(x):
    x = ops.reshape(x, (-1, 8, 8))
    return ops.matmul(x, ops.transpose(x, (0, 2, 1))) + ops.eye(8)


def one_sum(entries):
    return {"all-reduce": (1, 4 * entries)}


def shards(gathered, scattered, summed=LOGS):
    """Returns the collectives of a sharded step.

    Args:
      gathered: The bytes that are gathered.
      scattered: The entries of gradients.
      summed: The entries of what is replicated.
    """
    return {
        "all-gather": (1, gathered),
        "reduce-scatter": (1, 4 * scattered),
        "all-reduce": (1, 4 * summed),
    }


def of_rows(make, entries):
    """A case of rows of 64 numbers, with a dense layer of 64 in front."""
    return Case(
        model=make,
        x=((64,), "float32"),
        sent=one_sum(64 * 64 + 64 + entries + LOGS),
    )


def build_on_images(*made, entries, **kwargs):
    return Case(
        model=stack(IMAGES[0], *made),
        x=IMAGES,
        sent=one_sum(entries + LOGS),
        **kwargs,
    )


# The convolutions' kernels, biases and normalizations, and the outputs'.
KERNELS = 9 * 8 * 32 + 9 * 32 + 9 * 16 * 32 + 16 * 8
BIASES = 32 + 32 + 16 + 8
NORMS, STATISTICS = 2 * 32 + 2 * 16, 2 * 32
CONVOLUTIONS = (
    lambda: layers.Conv2D(32, 3, strides=2),
    layers.BatchNormalization,
    layers.ReLU,
    lambda: layers.DepthwiseConv2D(3),
    lambda: layers.Conv2DTranspose(16, 3),
    lambda: layers.GroupNormalization(4),
    layers.MaxPooling2D,
    layers.GlobalAveragePooling2D,
)
SYNCHRONIZED = (
    lambda: layers.Conv2D(8, 3),
    lambda: layers.BatchNormalization(synchronized=True),
    layers.Flatten,
)
DENSE = 14 * 14 * 8 * 8 + 8
# Convolutions, normalizations and the outputs; means and variances.
BLOCK_WEIGHTS = (
    (8 * 8 + 8 + 2 * 8)
    + (9 * 8 * 8 + 8 + 2 * 8)
    + 2 * (8 * 32 + 32 + 2 * 32)
    + (32 * 8 + 8)
)
BLOCK_STATISTICS = 2 * (8 + 8 + 32 + 32)
BLOCK = Case(
    model=make_bottleneck,
    x=IMAGES,
    policy="mixed_bfloat16",
    sent=one_sum(BLOCK_WEIGHTS + BLOCK_STATISTICS + LOGS),
)
IMAGE_CASE = build_on_images(
    *CONVOLUTIONS, entries=KERNELS + BIASES + NORMS + STATISTICS
)
EMBEDDING, OUTPUTS = 5000 * 64, 16 * 64 * 8 + 8
# Ids of the global batch. A replica exchanges an eighth of their rows.
TOKENS = 8 * 8 * 16
EMBEDDINGS = Case(
    model=stack(
        (16,),
        lambda: layers.Embedding(5000, 64),
        layers.Flatten,
        dtype="int32",
    ),
    x=((16,), "int32"),
    sent=one_sum(EMBEDDING + OUTPUTS + LOGS),
)
CASES = {
    "convolutions over lines": Case(
        model=stack(
            (32, 4),
            lambda: layers.Conv1D(16, 3),
            lambda: layers.SeparableConv1D(8, 3),
            layers.GlobalAveragePooling1D,
        ),
        x=((32, 4), "float32"),
        sent=one_sum(
            (3 * 4 * 16 + 16) + (3 * 16 + 16 * 8 + 8) + (8 * 8 + 8) + LOGS
        ),
    ),
    "convolutions over images": IMAGE_CASE,
    "convolutions over volumes": Case(
        model=stack(
            (8, 16, 16, 4),
            lambda: layers.Conv3D(8, 3),
            layers.GlobalAveragePooling3D,
        ),
        x=((8, 16, 16, 4), "float32"),
        rows=4,
        sent=one_sum(27 * 4 * 8 + 8 + 8 * 8 + 8 + LOGS),
    ),
    "convolutions over images, in bfloat16 and sharded": dataclasses.replace(
        IMAGE_CASE,
        policy="mixed_bfloat16",
        partitioner=SHARDED,
        sent=shards(
            2 * (KERNELS + BIASES) + 4 * (NORMS + STATISTICS),
            KERNELS + BIASES + NORMS,
            STATISTICS + LOGS,
        ),
    ),
    "synchronized normalization": dataclasses.replace(
        build_on_images(*SYNCHRONIZED, entries=0),
        # The rows' mean and variance, forward and backward, and statistics.
        sent={
            "all-reduce": (
                5,
                4 * (9 * 8 * 8 + 8 + 16 + DENSE + 4 * 8 + 16 + LOGS),
            )
        },
    ),
    # A cast of a 1x1 convolution's kernel must not wait for the kernel's sum.
    "a block of ResNet50": BLOCK,
    "a block of ResNet50, with sharded slots": dataclasses.replace(
        BLOCK,
        partitioner=SlotsOnly(min_size=1),
        sent=shards(4 * BLOCK_WEIGHTS, BLOCK_WEIGHTS, BLOCK_STATISTICS + LOGS),
    ),
    "augmentation and dropout": build_on_images(
        layers.RandomFlip,
        lambda: layers.GaussianNoise(0.1),
        lambda: layers.Conv2D(8, 3),
        layers.Flatten,
        lambda: layers.Dropout(0.5),
        entries=9 * 8 * 8 + 8 + DENSE,
    ),
    "recurrent": Case(
        model=stack(
            (16, 8),
            lambda: layers.Bidirectional(layers.GRU(32, return_sequences=True)),
            lambda: layers.LSTM(16),
        ),
        x=((16, 8), "float32"),
        sent=one_sum(
            2 * 3 * 32 * (8 + 32 + 2)
            + 4 * 16 * (64 + 16 + 1)
            + 16 * 8
            + 8
            + LOGS
        ),
    ),
    "embeddings": EMBEDDINGS,
    "sharded embeddings": dataclasses.replace(
        EMBEDDINGS,
        partitioner=SHARDED,
        sent=shards(4 * (OUTPUTS + TOKENS), OUTPUTS)
        | {"all-to-all": (2, 2 * 4 * 64 * TOKENS // 8)},
    ),
    "sort": of_rows(around(ops.sort), 64 * 8 + 8),
    "top_k": of_rows(around(lambda x: ops.top_k(x, 8)[0]), 8 * 8 + 8),
    "Cholesky": of_rows(
        around(lambda x: ops.cholesky(multiply_by_transposed(x))), 64 * 8 + 8
    ),
    "FFT": of_rows(around(lambda x: ops.fft((x, 0 * x))[0]), 64 * 8 + 8),
    "CTC": Case(
        model=stack((20, 8), lambda: layers.Dense(16)),
        x=((20, 8), "float32"),
        y=((5,), "int32"),
        loss=keras.losses.CTC(),
        sent=one_sum(8 * 16 + 16 + 16 * 8 + 8 + LOGS),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_has_the_collectives_that_it_needs(name):
    case = CASES[name]
    assert check_step(case) == case.sent

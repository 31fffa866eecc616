"""Steps of a decoder in bfloat16, compiled for GPUs without one.

Bytes are counted by hand, in entries of 4 bytes where nothing else is said.
"""

import dataclasses

import keras
import pytest
from keras import layers

from keras_strategies.experimental import FullySharded
from tests.gpu.programs import LOGS, Case, check_step

pytestmark = pytest.mark.gpu

WIDTH, TOKENS, VOCABULARY = 64, 64, 256
SHARDED = FullySharded(min_size=1)


def make_decoder():
    tokens = keras.Input((TOKENS,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    y = layers.LayerNormalization()(x)
    x += layers.MultiHeadAttention(2, WIDTH // 2)(y, y, use_causal_mask=True)
    y = layers.Dense(4 * WIDTH, "gelu")(layers.LayerNormalization()(x))
    x += layers.Dense(WIDTH)(y)
    outputs = layers.Dense(VOCABULARY, dtype="float32")(x)
    return keras.Model(tokens, outputs)


EMBEDDING = HEAD = VOCABULARY * WIDTH
# Queries, keys, values and outputs of attention; two dense layers.
KERNELS = 4 * WIDTH**2 + 8 * WIDTH**2
BIASES = 4 * WIDTH + 4 * WIDTH + WIDTH
NORMS = 2 * 2 * WIDTH
WEIGHTS = EMBEDDING + KERNELS + BIASES + NORMS + HEAD + VOCABULARY
# Over two GPUs, all kernels are sharded, and the biases of queries, keys and
# values, of the first dense layer and of the head.
HALF = WEIGHTS - (EMBEDDING + KERNELS + HEAD + 7 * WIDTH + VOCABULARY) // 2
# XLA updates the biases of the first dense layer and of the head in shards.
WIDE_BIASES = 4 * WIDTH + VOCABULARY

ROWS = 2
ENTRIES = ROWS * TOKENS * WIDTH
# The GPUs of a replica sum activations, in bfloat16: of the embedding, of
# attention and of the dense layers, and backward of the latter two. The loss
# has a maximum and two sums of each token, its own sum, and a gradient.
OF_REPLICA = 2 * 5 * ENTRIES + 4 * (3 * ROWS * TOKENS + 1 + ENTRIES)

# Each replica sends its rows of the table to one other, forward and backward,
# in bfloat16, and gathers the ids of all replicas.
EXCHANGED = 2 * 2 * ENTRIES
IDS = 4 * ROWS * TOKENS

STEP = Case(
    model=make_decoder,
    x=((TOKENS,), "int32"),
    y=((TOKENS,), "int32"),
    rows=ROWS,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    policy="mixed_bfloat16",
    sent={"all-reduce": (1, 4 * (WEIGHTS + LOGS))},
)

CASES = {
    "replicated": STEP,
    "sharded": dataclasses.replace(
        STEP,
        partitioner=SHARDED,
        sent={
            "all-gather": (
                1,
                2 * (KERNELS + BIASES)
                + 4 * (NORMS + HEAD + VOCABULARY)
                + 8 * IDS,
            ),
            "all-to-all": (2, EXCHANGED),
            "reduce-scatter": (1, 4 * (WEIGHTS - EMBEDDING)),
            "all-reduce": (1, 4 * LOGS),
        },
    ),
    "two GPUs a replica": dataclasses.replace(
        STEP,
        cores=2,
        sent={
            "all-reduce": (9, OF_REPLICA + 4 * (HALF + LOGS)),
            # With both slots.
            "all-gather": (1, 3 * 4 * WIDE_BIASES),
        },
    ),
    "two GPUs a replica, sharded": dataclasses.replace(
        STEP,
        cores=2,
        partitioner=SHARDED,
        sent={
            "all-reduce": (9, OF_REPLICA + 4 * LOGS),
            "all-to-all": (2, EXCHANGED),
            "reduce-scatter": (
                1,
                4 * (HALF - EMBEDDING // 2 + WIDE_BIASES // 2),
            ),
            # From the replicas, and two biases from the GPUs of a replica.
            "all-gather": (
                2,
                4 * IDS
                + 2 * KERNELS // 2
                + 2 * (BIASES - 3 * WIDTH // 2)
                + 4 * (NORMS + HEAD // 2 + VOCABULARY)
                + 2 * 4 * WIDTH
                + 4 * VOCABULARY,
            ),
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_decoder_has_the_collectives_that_it_needs(name):
    case = CASES[name]
    assert check_step(case) == case.sent

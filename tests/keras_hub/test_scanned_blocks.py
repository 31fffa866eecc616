"""Blocks of keras-hub's models in a loop: the numbers of unrolled blocks."""

import keras
import numpy as np
import pytest

import keras_strategies as ks
from tests.support.hub import make_backbone
from tests.support.numbers import assert_leaves_close

pytestmark = [
    pytest.mark.keras_hub,
    # Of its own, and of what it imports.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.filterwarnings("error:The equal blocks"),
]
BLOCKS, WORDS, LENGTH, ROWS = 4, 40, 8, 10
_random = np.random.default_rng(0)
TOKENS = _random.integers(1, WORDS, (ROWS, LENGTH)).astype("int32")
MASK = (np.arange(LENGTH) < _random.integers(3, LENGTH + 1, (ROWS, 1))) * 1
SIZES = {
    "vocabulary_size": WORDS,
    "num_layers": BLOCKS,
    "hidden_dim": 8,
    "intermediate_dim": 16,
}
FEW_HEADS = {"num_query_heads": 2, "num_key_value_heads": 1}
LEARNED = {"num_heads": 2, "max_sequence_length": LENGTH}


MODELS = [
    ("GPT2", LEARNED | {"dropout": 0.1}),
    ("Llama", FEW_HEADS),
    ("Gemma", FEW_HEADS | {"head_dim": 4}),
    # Each block is a layer with a sliding window and one without.
    (
        "Gemma",
        FEW_HEADS
        | {
            "num_layers": 2 * BLOCKS,
            "head_dim": 4,
            "use_sliding_window_attention": True,
            "sliding_window_size": 4,
            "attention_logit_soft_cap": 50.0,
        },
    ),
    ("Bert", LEARNED),
    ("Bart", LEARNED),
]


def data(model):
    given = {}
    for name in model.input:
        is_mask = name.endswith("padding_mask")
        given[name] = MASK if is_mask else TOKENS
        if name == "segment_ids":
            given[name] = TOKENS * 0
    return given


def square(y, outputs):
    return keras.ops.mean(keras.ops.square(outputs), axis=-1)


@pytest.mark.parametrize(("name", "sizes"), MODELS)
def test_blocks_in_a_loop_have_the_numbers_of_unrolled_ones(name, sizes):
    found = []
    for is_scanned in (True, False):
        strategy = ks.MirroredStrategy(
            ["cpu:0", "cpu:1"],
            variable_partitioner=ks.experimental.FullySharded(min_size=1),
        )
        with strategy.scope():
            keras.utils.set_random_seed(0)
            model = make_backbone(name, **SIZES | sizes)
            if is_scanned:
                runs = ks.experimental.scan_blocks(model)
                assert BLOCKS in map(len, runs)
            model.compile("sgd", square)
        x = data(model)
        outputs = model.compute_output_spec(
            {k: keras.KerasTensor(v.shape, "int32") for k, v in x.items()}
        )
        y = keras.tree.map_structure(lambda t: np.zeros(t.shape), outputs)
        fitted = model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
        found.append([fitted.history, *map(np.asarray, model.variables)])
    assert_leaves_close(*found, rtol=3e-5, atol=3e-5)

"""keras-hub's models on replicas whose cores share sequences."""

import functools

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from tests.support.hub import make_bert_classifier, make_causal_lm
from tests.support.strategies import cores_strategy

pytestmark = [
    pytest.mark.keras_hub,
    pytest.mark.filterwarnings("ignore"),
]
WORDS, LENGTH, ROWS = 61, 8, 10
SIZES = {
    "vocabulary_size": WORDS,
    "num_layers": 2,
    "hidden_dim": 16,
    "intermediate_dim": 32,
}
RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(1, WORDS, (ROWS, LENGTH))
X = {
    "token_ids": IDS,
    "padding_mask": np.arange(LENGTH) < RANDOM.integers(2, LENGTH, (ROWS, 1)),
}
Y = RANDOM.integers(0, WORDS, (ROWS, LENGTH))


def llama():
    heads = {"num_query_heads": 4, "num_key_value_heads": 2}
    task = make_causal_lm("Llama3", **SIZES, **heads)
    ks.experimental.blocked_head(task, block_size=128)
    return task, X, Y


def gemma():
    heads = {"num_query_heads": 4, "num_key_value_heads": 1, "head_dim": 8}
    task = make_causal_lm("Gemma", **SIZES, **heads, final_logit_soft_cap=5.0)
    return task, X, Y


def bert():
    task = make_bert_classifier(
        **SIZES, num_heads=4, max_sequence_length=LENGTH
    )
    return task, X | {"segment_ids": IDS % 2}, Y[:, 0] % 3


def train(strategy, make):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        task, x, y = make()
        task.preprocessor = None
        task.compile(
            keras.optimizers.SGD(0.1, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["sparse_categorical_accuracy"],
        )
    options = {"batch_size": 4, "verbose": 0}
    history = task.fit(x, y, shuffle=False, epochs=2, **options).history
    return [history, task.evaluate(x, y, **options), task.get_weights()]


@functools.cache
def on_one_device(make):
    return train(ks.OneDeviceStrategy("cpu:0"), make)


@pytest.mark.parametrize(("replicas", "cores"), [(1, 8), (2, 4)])
@pytest.mark.parametrize("is_sharded", [False, True])
@pytest.mark.parametrize("make", [llama, gemma, bert])
def test_numbers_are_those_of_one_device(make, is_sharded, replicas, cores):
    strategy = cores_strategy(
        replicas,
        cores,
        partitioner=ks.experimental.FullySharded(min_size=1)
        if is_sharded
        else None,
        context_parallel=True,
    )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=3e-5),
        train(strategy, make),
        on_one_device(make),
    )

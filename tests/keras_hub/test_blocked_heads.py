"""CausalLM tasks of keras-hub whose loss is computed over blocks of words."""

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from tests.support.hub import make_causal_lm
from tests.support.strategies import make_strategy

pytestmark = [
    pytest.mark.keras_hub,
    pytest.mark.filterwarnings("ignore"),
]
WORDS, LENGTH = 301, 6
SIZES = {
    "vocabulary_size": WORDS,
    "num_layers": 2,
    "hidden_dim": 16,
    "intermediate_dim": 32,
}
HEADS = {"num_query_heads": 2, "num_key_value_heads": 1}
MODELS = {
    "Llama": HEADS,
    "Gemma": HEADS | {"head_dim": 8, "final_logit_soft_cap": 5.0},
    "GPT2": {"num_heads": 2, "max_sequence_length": LENGTH, "dropout": 0.0},
}
RANDOM = np.random.default_rng(0)
X = {
    "token_ids": RANDOM.integers(0, WORDS, size=(22, LENGTH)),
    "padding_mask": np.arange(LENGTH) < RANDOM.integers(2, LENGTH, (22, 1)),
}
Y = RANDOM.integers(0, WORDS, size=(22, LENGTH))


def train(model, name, path, *, is_blocked):
    """Fits, evaluates, and resumes in another model."""
    keras.utils.set_random_seed(0)
    found = []
    for k in range(2):
        strategy = make_strategy(name)
        with strategy.scope():
            task = make_causal_lm(model, **SIZES, **MODELS[model])
            if is_blocked:
                ks.experimental.blocked_head(task, block_size=128)
            task.compile(keras.optimizers.SGD(0.1, momentum=0.9))
            if k:
                task.load_weights(path)
        options = {
            "sample_weight": X["padding_mask"].astype("float32"),
            "batch_size": 8,
            "verbose": 0,
        }
        history = task.fit(X, Y, shuffle=False, **options).history
        found += [*history.values(), task.evaluate(X, Y, **options)]
        task.save_weights(path)
    assert jax.tree.leaves(found)
    return found, task.get_weights()


@pytest.mark.parametrize("name", ["mirrored2", "sharded3"])
@pytest.mark.parametrize("model", MODELS)
def test_numbers_are_those_of_all_logits(model, name, tmp_path):
    path = tmp_path / "task.weights.h5"
    wanted = train(model, "one", path, is_blocked=False)
    found = train(model, name, path, is_blocked=True)
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)

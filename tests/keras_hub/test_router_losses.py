"""Mixtures of experts of keras-hub, whose routers add losses of the batch."""

import warnings

import keras
import numpy as np
import pytest

import keras_strategies as ks
from tests.support.hub import make_causal_lm
from tests.support.plain_keras import mirrored

pytestmark = [pytest.mark.keras_hub, pytest.mark.filterwarnings("ignore")]
VOCABULARY, LENGTH, ROWS = 24, 8, 24
_random = np.random.default_rng(0)
TOKENS = _random.integers(1, VOCABULARY, (ROWS, LENGTH)).astype("int32")
MASK = np.ones_like(TOKENS, "bool")
MASK[::3, 6:] = False


SIZES = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 2,
    "num_query_heads": 2,
    "num_key_value_heads": 1,
    "hidden_dim": 16,
    "intermediate_dim": 24,
    "num_experts": 4,
}
MODELS = {
    "Mixtral": {},
    "QwenMoe": {
        "moe_intermediate_dim": 16,
        "shared_expert_intermediate_dim": 16,
        "top_k": 2,
        "router_aux_loss_coefficient": 0.1,
    },
}


def trained(strategy, name):
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make_causal_lm(name, **SIZES, **MODELS[name])
        model.compile(
            keras.optimizers.SGD(0.05),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    x = {"token_ids": TOKENS, "padding_mask": MASK}
    y = np.roll(TOKENS, -1, axis=1)
    options = {"batch_size": 12, "epochs": 2, "shuffle": False, "verbose": 0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = model.fit(x, y, **options).history["loss"]
    told = [w for w in caught if "not a mean over" in str(w.message)]
    return history, model.get_weights(), told


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_weights_are_those_of_one_device(name, replicas):
    losses, weights, told = trained(mirrored(replicas), name)
    one = ks.OneDeviceStrategy("CPU:0")
    expected_losses, expected, _ = trained(one, name)
    assert len(told) == 1
    np.testing.assert_allclose(losses, expected_losses, rtol=3e-5)
    for found, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(found, other, rtol=3e-5, atol=3e-5)

"""Attention of keras-hub's models in steps for TPUs: the numbers of Keras."""

import jax
import keras
import numpy as np
import pytest

from keras_strategies.kernels import attention
from keras_strategies.kernels.kernels import kernels_for
from tests.kernels.test_attention import TPUS
from tests.support.splash import interpreted  # noqa: F401

pytestmark = [
    pytest.mark.keras_hub,
    pytest.mark.usefixtures("interpreted"),
    pytest.mark.filterwarnings("ignore"),
]
WORDS, LENGTH, ROWS = 40, 128, 3
_random = np.random.default_rng(0)
TOKENS = _random.integers(1, WORDS, (ROWS, LENGTH)).astype("int32")
LABELS = _random.integers(1, WORDS, (ROWS, LENGTH)).astype("int32")
LENGTHS = np.array([[LENGTH], [70], [1]])
PADDING = {
    "right": np.arange(LENGTH) < LENGTHS,
    "left": np.arange(LENGTH)[::-1] < LENGTHS,
}
SIZES = {
    "vocabulary_size": WORDS,
    "num_layers": 1,
    "hidden_dim": 16,
    "intermediate_dim": 16,
}
FEW_HEADS = {"num_query_heads": 2, "num_key_value_heads": 1}
GEMMA = {**SIZES, **FEW_HEADS, "num_layers": 2, "head_dim": 8}
LEARNED = {"num_heads": 2, "max_sequence_length": LENGTH, "dropout": 0.0}
MODELS = {
    "GPT2": (SIZES | LEARNED, [(None, 0)]),
    "Llama3": (SIZES | FEW_HEADS, [(None, 0)]),
    "Mistral": (SIZES | FEW_HEADS | {"sliding_window": 20}, [(19, 0)]),
    "Gemma": (
        # One layer with a window, and one without.
        GEMMA
        | {
            "use_sliding_window_attention": True,
            "sliding_window_size": 20,
            "attention_logit_soft_cap": 50.0,
        },
        [(19, 0), (None, 0)],
    ),
    "Bert": (SIZES | LEARNED, [(None, None)]),
    "Whisper": (
        # The frames, in encoder and decoder (traced once), and the tokens.
        SIZES
        | {"num_heads": 2, "num_mels": 4, "dropout": 0.0}
        | {"max_encoder_sequence_length": 2 * LENGTH}
        | {"max_decoder_sequence_length": LENGTH},
        [(None, None), (None, 0)],
    ),
}


@pytest.mark.parametrize("side", PADDING)
@pytest.mark.parametrize(
    ("name", "sizes", "limits"),
    [(name, *case) for name, case in MODELS.items()],
    ids=MODELS,
)
def test_models_compute_the_same_with_the_kernel(
    monkeypatch, name, sizes, limits, side
):
    import keras_hub

    model = getattr(keras_hub.models, f"{name}Backbone")(**sizes)
    x = {"token_ids": TOKENS, "padding_mask": PADDING[side].astype("int32")}
    x |= {"segment_ids": np.zeros_like(TOKENS)} if name == "Bert" else {}
    if name == "Whisper":
        x = {f"decoder_{k}": v for k, v in x.items()}
        frames = _random.normal(size=(ROWS, 2 * LENGTH, 4))
        x["encoder_features"] = frames.astype("float32")
    used = []
    attend = attention.splash.splash_attention

    def seen(query, key, value, mask, **options):
        used.append(mask)
        return attend(query, key, value, mask, **options)

    monkeypatch.setattr(attention.splash, "splash_attention", seen)

    def loss(weights, x):
        others = [v.value for v in model.non_trainable_variables]
        result = model.stateless_call(weights, others, x)[0]
        if isinstance(result, dict):
            side = "decoder_" if name == "Whisper" else ""
            result = result[f"{side}sequence_output"]
        scores = keras.ops.sin(result * LABELS[..., None])
        # Padded positions count as well.
        return keras.ops.mean(scores)

    weights = [v.value for v in model.trainable_variables]
    if name == "Gemma":
        # Elsewhere than on TPUs, the model calls another attention, in which
        # queries without keys in the window get other values.
        with monkeypatch.context() as patch, kernels_for(TPUS):
            find = "find_reason_against_kernel"
            patch.setattr(attention, find, lambda *_, **__: "a test")
            wanted = jax.jit(jax.value_and_grad(loss))(weights, x)
    else:
        wanted = jax.jit(jax.value_and_grad(loss))(weights, x)
    assert not used
    with kernels_for(TPUS):
        found = jax.jit(jax.value_and_grad(lambda *a: loss(*a)))(weights, x)
    assert [(mask.left, mask.right) for mask in used] == limits
    assert all(m.scores is None for m in used)
    # Whisper has no mask of its frames.
    padded = [mask.keys is not None for mask in used]
    assert padded == [name != "Whisper" or n == 0 for _, n in limits]
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)

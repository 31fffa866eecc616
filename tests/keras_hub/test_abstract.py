"""Models of keras-hub without values, from their configurations."""

import jax
import keras
import pytest

from tests.support.abstract_pairs import assert_same
from tests.support.hub import make_backbone

pytestmark = [
    pytest.mark.keras_hub,
    # Of its own, and of what it imports.
    pytest.mark.filterwarnings("ignore"),
]
ROWS, LENGTH = 8, 16
BLOCKS = {"num_layers": 2, "hidden_dim": 64}
SIZES = BLOCKS | {"vocabulary_size": 256, "intermediate_dim": 128}
HEADS = SIZES | {"num_heads": 4}
GROUPED = SIZES | {"num_query_heads": 4, "num_key_value_heads": 2}
SHORT = HEADS | {"max_sequence_length": LENGTH}
PATCHES = BLOCKS | {"image_shape": (16, 16, 3), "patch_size": 4, "num_heads": 4}
CASES = {
    "Albert": SHORT | {"embedding_dim": 32},
    "Bart": SHORT,
    "Bert": SHORT,
    "Bloom": HEADS,
    "DebertaV3": SHORT | {"bucket_size": 8},
    "DeiT": PATCHES | {"intermediate_dim": 128},
    "DenseNet": {"stackwise_num_repeats": [2, 2], "image_shape": (32, 32, 3)},
    "DistilBert": SHORT,
    "Falcon": SIZES | {"num_attention_heads": 4},
    "GPT2": SHORT,
    "GPTNeoX": HEADS,
    "Gemma": GROUPED | {"head_dim": 16},
    "Gemma3": GROUPED | {"head_dim": 16, "image_size": 16},
    "Llama": GROUPED,
    "Mistral": GROUPED,
    "Mixtral": GROUPED | {"num_experts": 4, "top_k": 2},
    "OPT": SHORT,
    "Phi3": GROUPED,
    "Qwen": GROUPED,
    "ResNet": {
        "input_conv_filters": [16],
        "input_conv_kernel_sizes": [7],
        "stackwise_num_filters": [64, 32],
        "stackwise_num_blocks": [2, 2],
        "stackwise_num_strides": [1, 2],
        "block_type": "bottleneck_block",
        "image_shape": (32, 32, 3),
    },
    "Roberta": SHORT,
    "T5": HEADS,
    "VGG": {
        "stackwise_num_repeats": [1, 1],
        "stackwise_num_filters": [16, 32],
        "image_shape": (32, 32, 3),
    },
    "ViT": PATCHES | {"mlp_dim": 128},
    "Whisper": HEADS
    | {
        "num_mels": 16,
        "max_encoder_sequence_length": 2 * LENGTH,
        "max_decoder_sequence_length": LENGTH,
    },
}
COMPILED = ("Bert", "GPT2", "Gemma", "ResNet", "ViT", "Whisper")
OUTPUTS = "sequence_output", "decoder_sequence_output"


def build(name):
    backbone = make_backbone(name, **CASES[name])
    output = backbone.output
    if isinstance(output, dict):
        output = next(output[key] for key in OUTPUTS if key in output)
    model = keras.Model(backbone.input, keras.layers.Dense(4)(output))
    model.compile("adam", "mse", metrics=["mae"])
    return model


def make_batch(name):
    """The shapes of what a model is given and gives."""
    model = build(name)
    # A decoder's tokens and, of Whisper, the sound that it hears.
    lengths = {"encoder_features": 2 * LENGTH}

    def spec(tensor):
        length = lengths.get(tensor.name, LENGTH)
        shape = [length if size is None else size for size in tensor.shape[1:]]
        return jax.ShapeDtypeStruct((ROWS, *shape), tensor.dtype)

    return jax.tree.map(spec, (model.input, model.output))


@pytest.mark.parametrize("name", CASES)
def test_divided_backbones_are_those_with_values(name):
    is_compiled = name in COMPILED
    batch = make_batch(name)
    assert_same(lambda: build(name), batch, "divided", is_compiled=is_compiled)


@pytest.mark.parametrize("name", CASES)
def test_replicated_backbones_are_those_with_values(name):
    batch = make_batch(name)
    assert_same(lambda: build(name), batch, "replicated", kinds=["train"])

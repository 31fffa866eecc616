"""Models of keras-hub, divided over cores and replicas, against one device.

Their weights are random: nothing is downloaded.
"""

import functools

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from keras_strategies.variables import model_variables
from tests.support.hub import (
    get_hub,
    make_backbone,
    make_bert_classifier,
    make_causal_lm,
)
from tests.support.numbers import assert_all_close
from tests.support.strategies import cores_strategy

pytestmark = [
    pytest.mark.keras_hub,
    # Of its own, and of what it imports.
    pytest.mark.filterwarnings("ignore"),
]
FullySharded = ks.experimental.FullySharded
VOCABULARY, LENGTH, ROWS = 32, 8, 26
_random = np.random.default_rng(0)
TOKENS = _random.integers(1, VOCABULARY, (ROWS, LENGTH + 1))
MASK = np.arange(LENGTH) < _random.integers(3, LENGTH + 1, (ROWS, 1))
LABELS = _random.integers(0, 3, ROWS)


SHARES = {
    "Albert": 0.993,
    "Bart": 0.987,
    "Bert": 0.989,
    "Bloom": 0.999,
    "DebertaV3": 0.996,
    "DistilBert": 0.993,
    "EdRec": 0.999,
    "Electra": 0.985,
    "ESM": 0.996,
    "FNet": None,
    "Falcon": 0.999,
    "GPT2": 0.992,
    "GPTNeoX": 0.999,
    "Gemma": 0.991,
    "Gemma3": 0.977,
    "Gemma3n": 0.976,
    "Gemma4": 0.989,
    "GptOss": 0.999,
    "Llama": 0.999,
    "Llama3": 0.999,
    "Mistral": 0.999,
    "Mixtral": 0.999,
    "OPT": 0.986,
    "Phi3": 0.999,
    "Qwen": 0.985,
    "Qwen3": 0.999,
    "Qwen3_5": 0.992,
    "Qwen3_5Moe": 0.998,
    "Qwen3Moe": 0.999,
    "QwenMoe": 0.999,
    "RWKV7": None,
    "Roberta": 0.995,
    "RoformerV2": 0.999,
    "SmolLM3": 0.999,
    "T5": 0.999,
    "T5Gemma": 0.999,
    "T5Gemma2": 0.977,
    "XLMRoberta": 0.997,
    "XLNet": 0.998,
    "BLIP2": 0.996,
    "CLIP": 0.978,
    "DINOV2": 0.969,
    "DINOV3": 0.991,
    "DeiT": 0.990,
    "DepthAnything": 0.968,
    "Flux": 0.995,
    "MetaCLIP2": 0.997,
    "MiT": 0.915,
    "Moonshine": 0.996,
    "PARSeq": 0.694,
    "PaliGemma": 0.991,
    "SAM": 0.955,
    "SAM3PromptableConcept": 0.938,
    "SegFormer": 0.918,
    "SigLIP": 0.993,
    "StableDiffusion3": 0.944,
    "SwinTransformer": 0.997,
    "ViT": 0.989,
    "ViTDet": 0.955,
    "VideoPrism": 0.991,
    "Whisper": 0.985,
}
"""Of the bytes of weights, over 4 cores, measured; None: no attention."""
NOT_SURVEYED = {
    *("", "BASNet", "CSPNet", "DFine", "DeepLabV3", "DenseNet"),
    *("EfficientNet", "FeaturePyramid", "HGNetV2", "MobileNet", "MobileNetV5"),
    *("ResNet", "RetinaNet", "VGG", "Xception"),
    # Other names or configs of surveyed classes.
    *("ESM2", "Qwen2", "SmolLM"),
}


SIZES = {
    "vocabulary_size": VOCABULARY,
    "num_layers": 2,
    "hidden_dim": 16,
    "intermediate_dim": 64,
}
GROUPED = SIZES | {"num_query_heads": 4, "num_key_value_heads": 2}


def gemma(rank=None):
    heads = {"num_query_heads": 4, "num_key_value_heads": 1, "head_dim": 4}
    return make_causal_lm("Gemma", rank=rank, **SIZES, **heads)


def llama(rank=None):
    return make_causal_lm("Llama", rank=rank, **GROUPED)


def bert():
    return make_bert_classifier(
        **SIZES, num_heads=4, max_sequence_length=LENGTH
    )


def words():
    x = {"token_ids": TOKENS[:, :-1], "padding_mask": MASK}
    return x, TOKENS[:, 1:], MASK.astype("float32")


def texts():
    x = {"token_ids": TOKENS[:, :-1], "padding_mask": MASK}
    return x | {"segment_ids": np.zeros((ROWS, LENGTH), int)}, LABELS, None


MODELS = {
    "gemma": (gemma, words, 1),
    "llama": (llama, words, 2),
    "bert": (bert, texts, 4),
    "gemma-lora": (functools.partial(gemma, 4), words, 1),
    "llama-lora": (functools.partial(llama, 4), words, 2),
}
"""What makes one, its data, and its heads of keys."""


def sgd():
    return keras.optimizers.SGD(0.1, momentum=0.9)


def fast_sgd():
    return keras.optimizers.SGD(0.5, momentum=0.9)


def adam():
    return keras.optimizers.Adam(0.01, epsilon=0.01)


def trained(strategy, make, data, optimizer=sgd):
    """The model, and the losses of two epochs; batches of 8, 8, 8 and 2."""
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = make()
        model.preprocessor = None
        model.compile(
            optimizer(),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    x, y, weights = data()
    history = model.fit(
        x,
        y,
        sample_weight=weights,
        batch_size=8,
        epochs=2,
        shuffle=False,
        verbose=0,
    ).history
    assert_replicated(model)
    return model, history["loss"]


@functools.cache
def on_one_device(name, optimizer):
    make, data, _ = MODELS[name]
    return trained(ks.OneDeviceStrategy("cpu:0"), make, data, optimizer)


def assert_same(found, expected):
    """Two trained models and their losses."""
    np.testing.assert_allclose(found[1], expected[1], rtol=2e-5)
    weights = found[0].get_weights(), expected[0].get_weights()
    assert_all_close(*weights, rtol=2e-5, atol=2e-5)


def sharded_axes(variable):
    return {axis for axis in variable.value.sharding.spec if axis}


def shard_attention_and_mlp(model, cores, key_heads):
    """The kernels of all blocks that the cores can divide."""
    names = ("query", "attention_output", "feedforward", "ffw")
    if key_heads % cores == 0:
        names += ("key", "value")
    found = [
        v
        for v in model.backbone.variables
        if v.name == "kernel" and any(n in v.path for n in names)
    ]
    assert len(found) >= 2 * SIZES["num_layers"]
    return found


def laid_out(backbone, cores=2):
    """What the layout map of a backbone says of each of its variables."""
    strategy = cores_strategy(
        1, cores, ks.experimental.transformer_layout(backbone, cores)
    )
    strategy.attach(backbone)
    return {v.path: tuple(v.value.sharding.spec) for v in backbone.variables}


def test_gemma_is_divided_as_keras_hub_divides_it():
    backbone = make_backbone("Gemma", **GROUPED, head_dim=4)
    mesh = keras.distribution.DeviceMesh((4, 2), ["batch", "model"])
    theirs = type(backbone).get_layout_map(mesh)
    ours = laid_out(backbone)
    for variable in backbone.variables:
        layout = theirs[variable.path]
        wanted = [] if layout is None else layout.axes
        assert [a == "model" for a in ours[variable.path]] == [
            a == "model" for a in wanted
        ], variable.path


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("name", ["gemma", "llama", "bert"])
def test_heads_and_dense_layers_are_divided_over_cores(name, optimizer):
    make, data, key_heads = MODELS[name]
    layout_map = ks.experimental.transformer_layout(make().backbone, 4)
    expected = on_one_device(name, optimizer)
    found = trained(cores_strategy(2, 4, layout_map), make, data, optimizer)
    assert_same(found, expected)
    kernels = shard_attention_and_mlp(found[0], 4, key_heads)
    for kernel in kernels:
        assert sharded_axes(kernel) == {"model"}, kernel.path
    tables = [v for v in found[0].variables if "embeddings" in v.name]
    assert sharded_axes(tables[0]) == {"model"}


@pytest.mark.parametrize("name", ["gemma", "bert"])
def test_cores_and_replicas_divide_them(name):
    make, data, key_heads = MODELS[name]
    layout_map = ks.experimental.transformer_layout(make().backbone, 2)
    strategy = cores_strategy(4, 2, layout_map, FullySharded(2, min_size=1))
    found = trained(strategy, make, data, adam)
    expected = on_one_device(name, adam)
    assert_same(found, expected)
    for kernel in shard_attention_and_mlp(found[0], 2, key_heads):
        assert sharded_axes(kernel) == {"model", "replica"}, kernel.path
        shard = kernel.value.addressable_shards[0].data
        assert shard.size * 4 == kernel.value.size


def dividing(name):
    """A strategy that divides frozen weights, and the axes they lie on."""
    if name == "replicas":
        partitioner = FullySharded(min_size=1)
        devices = jax.devices()[:4]
        return ks.MirroredStrategy(devices, variable_partitioner=partitioner), {
            "replica"
        }
    layout_map = {
        pattern: layout
        for make in (gemma, llama)
        for pattern, layout in ks.experimental.transformer_layout(
            make(rank=4).backbone, 2
        ).items()
    }
    if name == "cores":
        return cores_strategy(2, 2, layout_map), {"model"}
    both = cores_strategy(2, 2, layout_map, FullySharded(min_size=1))
    return both, {"model", "replica"}


@pytest.mark.parametrize("name", ["gemma", "llama"])
@pytest.mark.parametrize("over", ["replicas", "cores", "both"])
def test_lora_leaves_divided_frozen_weights_as_they_were(over, name):
    with_lora, data, key_heads = MODELS[f"{name}-lora"]
    expected = on_one_device(f"{name}-lora", fast_sgd)
    strategy, axes = dividing(over)
    keras.utils.set_random_seed(7)
    with strategy.scope():
        untrained = with_lora()
    before = {v.path: np.asarray(v) for v in untrained.non_trainable_variables}
    assert before
    found = trained(strategy, with_lora, data, fast_sgd)
    assert_same(found, expected)
    model = found[0]
    after = {v.path: np.asarray(v) for v in model.non_trainable_variables}
    assert after.keys() == before.keys()
    for path, value in after.items():
        np.testing.assert_array_equal(value, before[path], err_msg=path)
    frozen = shard_attention_and_mlp(model, 2, key_heads)
    assert not any(v.trainable for v in frozen)
    for kernel in frozen:
        assert sharded_axes(kernel) == axes, kernel.path
    # What is trained has moved, and its momenta are divided with it.
    assert abs(found[1][0] - found[1][1]) > 1e-3
    lora = [v for v in model_variables.all_variables(model) if "lora" in v.path]
    assert len(lora) == 2 * len(model.trainable_variables)
    assert any(sharded_axes(v) for v in lora)


SHORT = SIZES | {"num_heads": 4, "max_sequence_length": LENGTH, "dropout": 0.0}
VISION = {
    "image_shape": (16, 16, 3),
    "patch_size": 4,
    "num_layers": 2,
    "num_heads": 4,
    "hidden_dim": 16,
    "intermediate_dim": 64,
}
FAMILIES = {
    # 31 words: the table is divided along its width.
    "GPT2": SHORT | {"vocabulary_size": VOCABULARY - 1},
    "GPTNeoX": SIZES | {"num_heads": 4, "rotary_percentage": 0.5},
    "Phi3": GROUPED,
    "Qwen3": GROUPED | {"head_dim": 4},
    "GptOss": GROUPED | {"num_experts": 4, "top_k": 4},
    "QwenMoe": GROUPED
    | {
        "moe_intermediate_dim": 16,
        "shared_expert_intermediate_dim": 32,
        "num_experts": 4,
        "top_k": 4,
    },
    "T5": SIZES | {"num_heads": 4, "dropout": 0.0},
    "Bart": SHORT,
    "ESM": SHORT,
    "XLNet": SIZES | {"num_heads": 4},
    "DeiT": VISION,
    "SwinTransformer": {
        "image_shape": (16, 16, 3),
        "embed_dim": 16,
        "depths": (2, 2),
        "num_heads": (2, 4),
        "window_size": 2,
        "patch_size": 2,
        "drop_path": 0.0,
    },
    "Whisper": SIZES
    | {
        "num_heads": 4,
        "num_mels": 8,
        "max_encoder_sequence_length": 2 * LENGTH,
        "max_decoder_sequence_length": LENGTH,
    },
}
OUTPUTS = "sequence_output", "decoder_sequence_output"


def classifier(family):
    backbone = make_backbone(family, **FAMILIES[family])
    output = backbone.output
    if isinstance(output, dict):
        output = next(output[key] for key in OUTPUTS if key in output)
    return keras.Model(backbone.input, keras.layers.Dense(VOCABULARY)(output))


def made_inputs(model):
    """Random tokens, images and sounds for each of a model's inputs."""
    random = np.random.default_rng(1)

    def make(tensor):
        length = {"encoder_features": 2 * LENGTH}.get(tensor.name, LENGTH)
        shape = [2 * 8, *(n or length for n in tensor.shape[1:])]
        if "mask" in tensor.name:
            return np.ones(shape, "int32")
        if "segment" in tensor.name:
            return np.zeros(shape, "int32")
        if "float" in tensor.dtype:
            return random.normal(size=shape).astype("float32")
        return random.integers(1, VOCABULARY - 1, shape)

    return jax.tree.map(make, model.input)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_train_on_2_cores_as_on_one_device(family):
    def train(strategy):
        keras.utils.set_random_seed(7)
        with strategy.scope():
            model = classifier(family)
            model.compile(sgd(), "mse")
        x = made_inputs(model)
        shape = (2 * 8, *(n or LENGTH for n in model.output.shape[1:]))
        y = np.random.default_rng(2).normal(size=shape)
        history = model.fit(
            x, y, batch_size=8, epochs=2, shuffle=False, verbose=0
        ).history
        return model, history["loss"]

    backbone = make_backbone(family, **FAMILIES[family])
    layout_map = ks.experimental.transformer_layout(backbone, 2)
    expected = train(ks.OneDeviceStrategy("cpu:0"))
    found = train(cores_strategy(2, 2, layout_map))
    assert_replicated(found[0])
    assert abs(found[1][0] - found[1][1]) > 1e-4
    assert_same(found, expected)
    divided, total = (
        sum(v.value.size for v in found[0].variables if is_counted(v))
        for is_counted in (sharded_axes, lambda v: True)
    )
    assert divided > 0.75 * total


@pytest.mark.parametrize("name", [n for n in SHARES if SHARES[n]])
def test_cores_divide_most_of_each_backbone(name):
    get_hub()
    from benchmarks.backbones.survey import survey

    keras.backend.clear_session()
    assert survey(name, 4).divided >= SHARES[name]


def test_every_transformer_of_keras_hub_is_surveyed():
    from benchmarks.backbones.configs import OTHERS, TEXT

    names = {
        name.removesuffix("Backbone")
        for name in dir(get_hub().models)
        if name.endswith("Backbone")
    }
    assert names - NOT_SURVEYED == {*TEXT, *OTHERS}
    assert {*SHARES} == {*TEXT, *OTHERS}


@pytest.mark.parametrize("name", [n for n in SHARES if not SHARES[n]])
def test_backbones_without_attention_are_refused(name):
    get_hub()
    from benchmarks.backbones.survey import survey

    with pytest.raises(ValueError, match="queries and values"):
        survey(name, 4)

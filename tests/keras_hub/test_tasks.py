"""Tasks of keras-hub on four replicas, against one device.

Their weights are random and their vocabularies made here: nothing is
downloaded.
"""

import functools
import io

import jax
import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.support.hub import get_hub, make_backbone
from tests.support.plain_keras import mirrored

pytestmark = [
    pytest.mark.keras_hub,
    # Of its own, and of what it imports.
    pytest.mark.filterwarnings("ignore"),
]
REPLICAS = 4
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
_random = np.random.default_rng(0)
PROMPTS = ["the quick", "a lazy dog", "fox", "brown"]
TEXTS = [
    " ".join(_random.choice(WORDS, size=_random.integers(2, 9)))
    for _ in range(22)
]
LABELS = _random.integers(0, 3, size=22)
IMAGES = _random.random((22, 32, 32, 3)).astype("float32")


SIZES = {"num_layers": 2, "hidden_dim": 16, "intermediate_dim": 32}
LEARNED = SIZES | {"num_heads": 2, "dropout": 0.0}


def bert():
    models = get_hub().models
    backbone = make_backbone(
        "Bert", **LEARNED, vocabulary_size=16, max_sequence_length=12
    )
    tokenizer = models.BertTokenizer(
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS], lowercase=True
    )
    prepare = models.BertTextClassifierPreprocessor(
        tokenizer, sequence_length=12
    )
    task = models.BertTextClassifier(
        backbone, num_classes=3, dropout=0.0, preprocessor=prepare
    )
    return task, prepare


def gpt2():
    models = get_hub().models
    letters = sorted({*"".join(WORDS), "Ġ"})
    merges = ["Ġ t", "h e", "Ġt he", "Ġ f", "o x", "Ġf ox", "q u"]
    pieces = letters + [m.replace(" ", "") for m in merges]
    vocabulary = {p: i for i, p in enumerate([*pieces, "<|endoftext|>"])}
    tokenizer = models.GPT2Tokenizer(vocabulary=vocabulary, merges=merges)
    prepare = models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=16)
    sizes = {"vocabulary_size": len(vocabulary), "max_sequence_length": 16}
    backbone = make_backbone("GPT2", rank=4, **LEARNED, **sizes)
    return models.GPT2CausalLM(backbone, preprocessor=prepare), prepare


def gemma(dtype="float32", *, int8=False, lora=False):
    import sentencepiece

    models = get_hub().models
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=model,
        vocab_size=40,
        model_type="WORD",
        hard_vocab_limit=False,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        bos_piece="<bos>",
        eos_piece="<eos>",
        unk_piece="<unk>",
    )
    tokenizer = models.GemmaTokenizer(proto=model.getvalue())
    prepare = models.GemmaCausalLMPreprocessor(tokenizer, sequence_length=12)
    backbone = make_backbone(
        "Gemma",
        **SIZES,
        vocabulary_size=tokenizer.vocabulary_size(),
        num_query_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        dtype=dtype,
    )
    if int8:
        backbone.quantize("int8")
    if lora:
        backbone.enable_lora(4)
    return models.GemmaCausalLM(backbone, preprocessor=prepare), prepare


def resnet():
    backbone = make_backbone(
        "ResNet",
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 64],
        stackwise_num_blocks=[1, 1],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
        image_shape=(32, 32, 3),
    )
    # As in fine-tuning: on replicas the statistics are of their own rows.
    for layer in backbone._flatten_layers():
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False
    return _build_on_images(backbone, "ResNet")


def vit():
    backbone = make_backbone(
        "ViT",
        image_shape=(32, 32, 3),
        patch_size=(8, 8),
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=32,
        dropout_rate=0.0,
        attention_dropout=0.0,
    )
    return _build_on_images(backbone, "ViT")


def _build_on_images(backbone, name):
    models = get_hub().models
    converter = getattr(get_hub().layers, f"{name}ImageConverter")(
        image_size=(32, 32), scale=1 / 255.0
    )
    prepare = getattr(models, f"{name}ImageClassifierPreprocessor")(converter)
    task = getattr(models, f"{name}ImageClassifier")(
        backbone, num_classes=3, preprocessor=prepare
    )
    return task, prepare


TASKS = {
    "bert": (bert, TEXTS, LABELS),
    "gpt2-lora": (gpt2, TEXTS, None),
    "resnet": (resnet, IMAGES, LABELS),
    "vit": (vit, IMAGES, LABELS),
    "gemma-lora": (functools.partial(gemma, lora=True), TEXTS, None),
    "gemma-bf16": (
        functools.partial(gemma, "bfloat16", lora=True),
        TEXTS,
        None,
    ),
    "gemma-int8": (functools.partial(gemma, int8=True, lora=True), TEXTS, None),
}
TOLERANCE = {"gemma-bf16": 2e-2}
"""Of bfloat16, whose sums depend on the order of their terms in the third
digit; of the largest value. What is quantized to int8 is as of float32."""


@pytest.mark.parametrize("given", ["rows", "tf.data", "prepared"])
@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_as_on_one_device(name, given):
    make, x, y = TASKS[name]
    _, expected = used(make, x, y, given)
    with mirrored(REPLICAS).scope():
        task, found = used(make, x, y, given)
    assert_replicated(task)
    tolerance = TOLERANCE.get(name, 1e-5)
    texts, expected_texts = (f.pop("generate", []) for f in (found, expected))
    if name in TOLERANCE:
        # Two words may be as likely as each other in its three digits.
        assert len(texts) == len(expected_texts)
        assert all(
            t.startswith(p)
            for t, p in zip(texts, PROMPTS + PROMPTS[:3], strict=True)
        )
    else:
        assert texts == expected_texts
    for loop, value in expected.items():
        for ours, plain in zip(
            keras.tree.flatten(found[loop]),
            keras.tree.flatten(value),
            strict=True,
        ):
            plain = np.asarray(plain, "float32")
            np.testing.assert_allclose(
                np.asarray(ours, "float32"),
                plain,
                rtol=tolerance,
                atol=tolerance * max(1.0, np.abs(plain).max()),
                err_msg=loop,
            )
    first, *_, last = expected["fit"]
    assert abs(first - last) > 1e-3


@pytest.mark.parametrize("name", ["bert", "gemma-lora"])
def test_a_task_that_was_made_without_values_trains(name):
    make, x, y = TASKS[name]
    strategy = ks.MirroredStrategy(
        jax.devices()[:REPLICAS],
        variable_partitioner=ks.experimental.FullySharded(min_size=64),
    )
    with strategy.scope(), ks.abstract():
        task, _ = make()
        task.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    strategy.materialize(task)
    first, *_, last = task.fit(x, y, batch_size=8, epochs=3, verbose=0).history[
        "loss"
    ]
    assert last < first
    assert_replicated(task)
    assert any(not v.value.sharding.is_fully_replicated for v in task.weights)


def used(make, x, y, given):
    """A task, and what each of its loops finds."""
    keras.utils.set_random_seed(7)
    task, prepare = make()
    is_exact = y is None and task.compute_dtype == "float32"
    rate = 0.5 if is_exact else 0.05
    task.compile(
        keras.optimizers.SGD(rate, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=[] if y is None else ["accuracy"],
    )
    data = x if y is None else (x, y)
    arguments = {"x": x, "y": y, "batch_size": 8}
    few = (x[:5],) if y is None else (x[:5], y[:5])
    rows = {"x": x, "batch_size": 8}
    if given == "prepared":
        task.preprocessor = None
        prepared = prepare(x) if y is None else prepare(x, y)
        data = keras.tree.map_structure(np.asarray, prepared)
        few = keras.tree.map_structure(lambda a: a[:5], data)
        rows = {"x": of_rows(data[0])}
    if given != "rows":
        arguments = {"x": of_rows(data)}
    found = {
        "fit": task.fit(
            **arguments, epochs=3, verbose=0, validation_data=of_rows(data)
        ).history["loss"],
        "evaluate": task.evaluate(**arguments, verbose=0),
        "train_on_batch": task.train_on_batch(*few),
        "test_on_batch": task.test_on_batch(*few),
    }
    if y is not None or given == "prepared":
        # keras-hub's preprocessors of language models are not made for it.
        found["predict"] = task.predict(**rows, verbose=0)
        found["predict_on_batch"] = task.predict_on_batch(few[0])
    if y is None:
        task.preprocessor = prepare
        # Those that the replicas share evenly, and others.
        found["generate"] = [
            text
            for prompts in (PROMPTS, PROMPTS[:3])
            for text in task.generate(prompts, max_length=10)
        ]
    found["weights"] = task.get_weights()
    return task, found


def of_rows(data):
    return tf.data.Dataset.from_tensor_slices(data).batch(8)

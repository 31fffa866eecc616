"""Planned scripts that create keras-hub's models from presets."""

import shutil

import pytest

from keras_strategies.planning.capture.errors import PlanError
from tests.planning.capture.scripts import HEAD
from tests.planning.capture.test_early_calls import run

pytestmark = pytest.mark.keras_hub
CONFIG = {
    "vocabulary_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 8,
    "intermediate_dim": 16,
    "max_sequence_length": 12,
}
SCRIPT = (
    HEAD
    + """
import keras_hub
strategy = ks.MirroredStrategy()
with strategy.scope():
    model = {}
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
tokens = np.zeros((16, 12), "int32")
x = {{"token_ids": tokens, "padding_mask": tokens, "segment_ids": tokens}}
model.fit(x, np.zeros(16, "int32"), batch_size=16, shuffle=False)
"""
)
CLASSIFIER = (
    "keras_hub.models.TextClassifier.from_preset("
    "{!r}, num_classes=3, preprocessor=None{})"
)


@pytest.fixture
def preset(tmp_path):
    """The directory of a preset without its weights."""
    import keras_hub

    directory = tmp_path / "preset"
    keras_hub.models.BertBackbone(**CONFIG).save_to_preset(str(directory))
    for file in directory.glob("*.h5"):
        file.unlink()
    return directory


@pytest.mark.parametrize(
    ("argument", "is_noted"),
    [("", True), (", load_weights=False", False)],
)
def test_a_local_preset_needs_its_config_alone(
    tmp_path, preset, argument, is_noted
):
    capture = run(
        tmp_path, SCRIPT.format(CLASSIFIER.format(str(preset), argument))
    )
    assert capture.step.rows == 16
    assert ("were not loaded" in capture.patches.note) == is_noted


@pytest.mark.parametrize("version", ["/2", ""])
def test_a_preset_in_kaggles_cache_is_found(
    tmp_path, preset, monkeypatch, version
):
    directory = tmp_path / "cache/models/user/bert/keras/tiny"
    for number in "12":
        shutil.copytree(preset, directory / number)
    (directory / "1/config.json").write_text("{}")
    monkeypatch.setenv("KAGGLEHUB_CACHE", str(tmp_path / "cache"))
    name = f"kaggle://user/bert/keras/tiny{version}"
    capture = run(tmp_path, SCRIPT.format(CLASSIFIER.format(name, "")))
    assert capture.step.rows == 16


@pytest.mark.parametrize(
    "name", ["bert_tiny_en_uncased", "hf://nobody/nothing", "kaggle://a/b/c/d"]
)
def test_a_preset_that_is_not_here_is_not_downloaded(
    tmp_path, monkeypatch, name
):
    for variable in ("KAGGLEHUB_CACHE", "HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / "empty"))

    def connect(*args, **kwargs):
        raise AssertionError("connects to another machine")

    monkeypatch.setattr("socket.socket.connect", connect)
    code = SCRIPT.format(CLASSIFIER.format(name, ""))
    with pytest.raises(PlanError, match="from_preset") as error:
        run(tmp_path, code)
    assert "local preset directory" in str(error.value)
    assert name in str(error.value)
    assert "not on this machine: config.json" in str(error.value)


def test_a_tokenizer_of_a_preset_is_not_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("KAGGLEHUB_CACHE", str(tmp_path / "empty"))
    code = HEAD + (
        "import keras_hub\n"
        "keras_hub.tokenizers.Tokenizer.from_preset('bert_tiny_en_uncased')"
    )
    with pytest.raises(PlanError, match="local preset directory"):
        run(tmp_path, code)

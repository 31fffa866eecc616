"""Planned scripts that create keras-hub's models from presets."""

import pytest

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


@pytest.mark.parametrize("argument", ["", ", load_weights=False"])
def test_a_local_preset_needs_its_config_alone(tmp_path, preset, argument):
    capture = run(
        tmp_path, SCRIPT.format(CLASSIFIER.format(str(preset), argument))
    )
    assert capture.step.rows == 16

"""Scripts that load pretrained weights: models are made without them."""

import jax
import keras
import numpy as np
import pytest

from tests.planning.capture.scripts import HEAD, MIRRORED
from tests.planning.capture.test_early_calls import run
from tests.support.combinations import few

APPLICATION = (
    HEAD
    + """
strategy = ks.MirroredStrategy()
with strategy.scope():
    base = keras.applications.{}(
        weights="imagenet", include_top=False, input_shape=(32, 32, 3)
    )
    model = keras.Sequential([base, keras.layers.Dense(10)])
    model.compile("sgd", "mse")
model.train_on_batch(np.zeros((8, 32, 32, 3)), np.zeros((8, 1, 1, 10)))
"""
)


@pytest.fixture(autouse=True)
def _no_downloads(monkeypatch):
    def fail(url, *args, **kwargs):
        raise AssertionError(f"downloads {url}")

    opener = "keras.src.utils.file_utils.urlretrieve"
    monkeypatch.setattr(opener, fail)


@pytest.mark.parametrize(
    "name", few([("ResNet50",), ("EfficientNetB0",)], every=2)
)
def test_the_weights_of_an_application_are_not_downloaded(tmp_path, name):
    assert run(tmp_path, APPLICATION.format(name)).step.rows == 8


@pytest.mark.parametrize(
    "code",
    [
        "model.load_weights('nowhere/w.weights.h5')",
        "model.load_weights('w.h5', True)",
        "keras.saving.load_weights(model, 'w.weights.h5')",
        "path = keras.utils.get_file("
        "origin='https://example.org/a/b.weights.h5')\n"
        "model.load_weights(path)",
    ],
)
def test_weights_are_not_read(tmp_path, code):
    assert run(tmp_path, f"{MIRRORED}{code}\nmodel.fit(x, y)").step.rows == 32


def test_other_files_are_downloaded_as_before(tmp_path):
    code = "keras.utils.get_file('data.npz', 'https://example.org/data.npz')"
    with pytest.raises(AssertionError, match=r"downloads .*data\.npz"):
        run(tmp_path, f"import keras\n{code}")


def test_a_model_is_loaded_from_its_file(tmp_path):
    path = str(tmp_path / "a.keras")
    keras.Sequential([keras.Input((40,)), keras.layers.Dense(30)]).save(path)
    code = f"""
with strategy.scope():
    model = keras.models.load_model({path!r})
    model.compile("sgd", "mse")
model.fit(x, y)
"""
    step = run(tmp_path, MIRRORED + code).step
    assert step.state_bytes()["weights"] == 4 * 41 * 30


@pytest.mark.parametrize("module", ["models", "saving"])
def test_a_missing_model_has_no_config(tmp_path, module):
    code = f"keras.{module}.load_model('nowhere/a.keras')"
    with pytest.raises(ValueError, match=r"not found: .*nowhere/a\.keras"):
        run(tmp_path, MIRRORED + code)


def test_after_a_plan_weights_are_loaded_again(tmp_path):
    run(tmp_path, f"{MIRRORED}model.fit(x, y)")
    path = str(tmp_path / "a.weights.h5")
    model, other = (
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        for _ in range(2)
    )
    model.save_weights(path)
    other.load_weights(path)
    jax.tree.map(
        np.testing.assert_array_equal, model.get_weights(), other.get_weights()
    )

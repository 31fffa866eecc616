"""Models without values are those with values: all of the parity tests' cases.

Compared are all variables, and the programs of all kinds of steps. The default
run has most cases; `-m slow` all, compiled too, and Keras's applications.
"""

import warnings

import jax
import keras
import pytest

from tests.parity import cases
from tests.parity.cases import BY_DEFAULT, CASES, LAYERS, STEPS
from tests.support.abstract_pairs import LAYOUTS, assert_same, get_shapes
from tests.support.combinations import combine

# Uneven: the programs have a mask of the rows that there are.
ROWS = 15
# So wide that weights, and not their slots alone, are without values.
WIDTHS = {"FEATURES": 24, "HIDDEN": 32, "STEP_FEATURES": 24}
COMPILED = ("transformer", "synchronized_renorm", "float16")
# Whole variables are laid out alike, whatever optimizer, loss or metric.
REPLICATED = [name for name in BY_DEFAULT if name in LAYERS | STEPS]
APPLICATIONS = ("MobileNetV2", "ResNet50V2", "ConvNeXtTiny")


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    for name, width in WIDTHS.items():
        monkeypatch.setattr(cases, name, width)


def check(name, layout, **kwargs):
    case = CASES[name]
    batch = *case.data(ROWS), case.weight(ROWS)
    batch = tuple(part for part in batch if part is not None)
    with warnings.catch_warnings():
        if case.warns is not None:
            warnings.filterwarnings("ignore", f".*{case.warns}")
        assert_same(case.build, get_shapes(batch), layout, **kwargs)


@pytest.mark.parametrize("name", combine(BY_DEFAULT, every=18))
def test_divided_models_are_the_same(name):
    check(name, "divided", is_compiled=name in COMPILED)


@pytest.mark.parametrize("name", combine(REPLICATED, every=8))
def test_replicated_models_are_the_same(name):
    check(name, "replicated", kinds=["train"])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_all_models_are_the_same_when_compiled(name, layout):
    check(name, layout, is_compiled=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", APPLICATIONS)
def test_applications_are_the_same(name):
    def build():
        make = getattr(keras.applications, name)
        model = make(weights=None, input_shape=(32, 32, 3), classes=8)
        model.compile("adam", "sparse_categorical_crossentropy")
        return model

    pictures = jax.ShapeDtypeStruct((8, 32, 32, 3), "float32")
    labels = jax.ShapeDtypeStruct((8,), "int32")
    assert_same(build, (pictures, labels), "divided")

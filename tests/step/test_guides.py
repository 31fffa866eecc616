"""Models of Keras's guides have the numbers of Keras with TensorFlow."""

import functools
import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import warnings

import jax
import numpy as np
import pytest

import keras_strategies as ks
from tests.step import guides

MAPPED = set(guides.GUIDES) - {"contrastive"}


@functools.cache
def train_with_tensorflow():
    importlib.import_module("tensorflow")
    path = pathlib.Path(tempfile.mkdtemp()) / "numbers.json"
    subprocess.run(
        [sys.executable, "-m", "tests.step.guides", str(path)],
        env=os.environ | {"KERAS_BACKEND": "tensorflow"},
        check=True,
        timeout=300,
    )
    found = json.loads(path.read_text())
    shutil.rmtree(path.parent)
    return found


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("name", guides.GUIDES)
def test_equals_tensorflow(name, replicas):
    expected = train_with_tensorflow()[name]
    strategy = ks.MirroredStrategy(devices=jax.devices()[:replicas])
    # 3 replicas cannot share a batch of 16 rows. A loss that compares rows
    # needs all of them.
    with warnings.catch_warnings():
        action = "error" if name in MAPPED else "ignore"
        warnings.filterwarnings(action, message="This step runs over")
        with strategy.scope():
            model = guides.make(name, ks.GradientTape)
        found = guides.train(model, name)
    assert found.keys() == expected.keys()
    for key, numbers in found.items():
        np.testing.assert_allclose(
            numbers, expected[key], rtol=3e-5, err_msg=key
        )
    assert len(set(found["one"])) == guides.EPOCHS

"""Models of Keras's guides have the numbers of Keras with TensorFlow."""

import json
import os
import subprocess
import sys
import warnings

import jax
import numpy as np
import pytest

import keras_strategies as ks
from tests.step import guides

MAPPED = set(guides.GUIDES) - {"contrastive"}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    path = tmp_path_factory.mktemp("guides") / "numbers.json"
    subprocess.run(
        [sys.executable, "-m", "tests.step.guides", str(path)],
        env=os.environ | {"KERAS_BACKEND": "tensorflow"},
        check=True,
        timeout=300,
    )
    return json.loads(path.read_text())


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("name", guides.GUIDES)
def test_equals_tensorflow(name, replicas, expected):
    strategy = ks.MirroredStrategy(devices=jax.devices()[:replicas])
    # 3 replicas cannot share a batch of 16 rows. A loss that compares rows
    # needs all of them.
    with warnings.catch_warnings():
        action = "error" if name in MAPPED else "ignore"
        warnings.filterwarnings(action, message="This step runs over")
        with strategy.scope():
            model = guides.make(name, ks.GradientTape)
        found = guides.train(model, name)
    assert found.keys() == expected[name].keys()
    for key, numbers in found.items():
        np.testing.assert_allclose(
            numbers, expected[name][key], rtol=3e-5, err_msg=key
        )
    assert len(set(found["one"])) == guides.EPOCHS

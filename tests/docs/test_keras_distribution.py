"""The scripts of docs/keras_distribution.md train as one device does."""

import pathlib
import re

import keras
import numpy as np
import pytest

import keras_strategies as ks

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "keras_distribution.md"
SCRIPTS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def run(script):
    names = {}
    try:
        exec(script, names)
    finally:
        ks.experimental_set_strategy(None)
    weights = [np.asarray(w) for w in names["model"].get_weights()]
    return weights, names["history"].history["loss"], names["strategy_of_model"]


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_script_equals_one_device(number):
    assert len(SCRIPTS) == 2
    script = SCRIPTS[number] + "\nstrategy_of_model = ks.get_strategy()\n"
    weights, losses, strategy = run(script)
    assert strategy.num_replicas_in_sync == (8, 4)[number]
    start = script.index("keras.utils.set_random_seed")
    imports = "".join(re.findall(r"import .*\n", script))
    alone, lone_losses, _ = run(imports + script[start:])
    np.testing.assert_allclose(losses, lone_losses, rtol=3e-5)
    for one, other in zip(weights, alone, strict=True):
        np.testing.assert_allclose(one, other, rtol=3e-5, atol=3e-5)


def test_layout_map_shards_the_kernel():
    names = {}
    try:
        exec(SCRIPTS[1], names)
    finally:
        ks.experimental_set_strategy(None)
    kernel = names["model"].get_layer("hidden").kernel
    assert tuple(kernel.value.sharding.spec) == (None, "model")


def test_scope_is_refused_while_keras_has_a_distribution():
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    try:
        with (
            pytest.raises(RuntimeError, match=r"Received: DataParallel\."),
            ks.MirroredStrategy().scope(),
        ):
            pass
    finally:
        keras.distribution.set_distribution(None)
    with ks.MirroredStrategy().scope():
        assert keras.distribution.distribution() is not None
    assert keras.distribution.distribution() is None

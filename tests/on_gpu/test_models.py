"""Models that were reported to give NaN on several GPUs, on one."""

import jax
import numpy as np
import pytest

import keras_strategies as ks
from tests.support.reported_models import MODELS, make_rows

pytestmark = pytest.mark.on_gpu


def fit(name, devices):
    with ks.MirroredStrategy(devices).scope():
        model = MODELS[name]()
    for number, variable in enumerate(model.variables):
        shape, random = variable.shape, np.random.default_rng(number)
        if len(shape) > 1:
            variable.assign(random.normal(size=shape) * 0.3)
    x, y = make_rows(model, 61)
    history = model.fit(
        x, y, batch_size=16, epochs=2, shuffle=False, verbose=0
    ).history
    return history["loss"], model.evaluate(x, y, verbose=0, return_dict=True)


@pytest.mark.parametrize("name", MODELS)
def test_a_reported_model_trains_as_on_two_cpu_devices(name):
    found = fit(name, jax.devices("gpu")[:1])
    expected = fit(name, jax.devices("cpu")[:2])
    assert np.isfinite(found[0]).all()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3),
        *(found, expected),
    )

"""Models that were reported to give NaN on several GPUs, docs/migration.md."""

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.support.combinations import cover
from tests.support.reported_models import MODELS, make_rows


def train(model, rows):
    history = model.fit(
        *make_rows(model, rows), batch_size=24, epochs=2, verbose=0
    ).history
    return history, model.get_weights()


@pytest.mark.parametrize(
    ("name", "replicas", "rows"),
    # Whole batches; a last one with fewer rows than replicas; an odd one.
    cover(MODELS, (1, 2, 3, 8), (96, 97, 79)),
)
def test_a_reported_model_trains_as_on_one_device(name, replicas, rows):
    keras.utils.set_random_seed(0)
    wanted = train(MODELS[name](), rows)
    keras.utils.set_random_seed(0)
    with ks.MirroredStrategy(jax.devices()[:replicas]).scope():
        model = MODELS[name]()
    found = train(model, rows)
    for array in jax.tree.leaves(found):
        assert np.isfinite(array).all()
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4),
        found,
        wanted,
    )
    assert_replicated(model)

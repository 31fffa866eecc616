"""Models that were reported to give NaN on several GPUs, compiled for them."""

import jax
import pytest

import keras_strategies as ks
from tests.support.reported_models import MODELS, make_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rows", [64, 61])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_a_reported_model_are_summed_in_its_step(name, rows):
    strategy = ks.MirroredStrategy.for_topology("h100:2")
    with strategy.scope():
        model = MODELS[name]()
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
        make_rows(model, rows),
    )
    program = strategy.compile_step(model, batch)
    sent = program.collective_bytes["all-reduce"]
    weights = sum(v.value.nbytes for v in model.trainable_variables)
    assert sent >= weights
    assert not program.collectives["all-to-all"]

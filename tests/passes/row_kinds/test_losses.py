"""Whether a traced loss is a mean over the batch's rows: rules by example.

Each loss trains to one device's weights on several replicas, and a warning
says why it runs over the global batch.
"""

import warnings

import jax
import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks
from tests.passes.row_kinds.losses import LOSSES, of_rows
from tests.support.combinations import combine, cover
from tests.support.loss_places import FEATURES, X, Y, check, net
from tests.support.plain_keras import mirrored


@pytest.mark.parametrize("name", combine(LOSSES, every=9))
def test_each_loss_is_that_of_one_device(name):
    # Three replicas have 8 rows each, as the constant of `sum_of_replica`.
    check(LOSSES[name], "function", 3 if name == "sum_of_replica" else 2)


@pytest.mark.parametrize(
    ("kind", "rows"), cover(["spread", "at_least_two"], [1, 2])
)
def test_a_loss_of_more_than_one_row(kind, rows):
    """Two replicas of one row each compute less than one device of two."""

    def loss(t, p):
        if kind == "at_least_two":
            return ops.sum(of_rows(t, p)) / max(p.shape[0], 2)
        spread = ops.mean(ops.var(p, axis=0)) if p.shape[0] > 1 else 0.0
        return of_rows(t, p) + spread

    def train(strategy):
        with strategy.scope():
            model = keras.Sequential([keras.Input((FEATURES,)), *net()])
            model.compile(keras.optimizers.SGD(0.02), loss)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {"batch_size": 2 * rows, "verbose": 0}
            model.fit(X[:4], Y[:4], shuffle=False, **options)
        return model.get_weights()

    expected = train(ks.OneDeviceStrategy("CPU:0"))
    for one, other in zip(train(mirrored(2)), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=3e-5, atol=3e-5)


def test_a_number_of_operands_that_depends_on_the_rows():
    def loss(t, p):
        columns = jax.lax.concatenate([t[:, :1]] * p.shape[0], 1)
        return of_rows(t, p) + 0 * columns[:, 0]

    check(loss, "function", 2)

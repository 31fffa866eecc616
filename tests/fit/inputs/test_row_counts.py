"""Any number of rows, any batch size, any number of replicas."""

import keras
import numpy as np
import pytest

from tests.fit.inputs.sources import one_input
from tests.support.combinations import combine, few
from tests.support.plain_keras import assert_same, check_same, mirrored

REGRESSION = {
    "optimizer": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "loss": "mse",
    "metrics": lambda: ["mae"],
}


ROWS_AND_BATCHES = [(70, 16), (64, 16), (250, 64), (10, 4), (3, 8), (13, 5)]
MANY_X = np.random.default_rng(5).normal(size=(250, 3)).astype("float32")
MANY_Y = np.random.default_rng(6).normal(size=(250, 1)).astype("float32")


@pytest.fixture(scope="module")
def plain_model():
    model = one_input()
    model.compile("sgd", "mse", metrics=["mae", "r2_score"])
    return model


@pytest.fixture(scope="module", params=combine([1, 2, 3, 8], every=2))
def our_model(request):
    with mirrored(request.param).scope():
        model = one_input()
        model.compile("sgd", "mse", metrics=["mae", "r2_score"])
    return model


@pytest.mark.parametrize(("rows", "batch"), few(ROWS_AND_BATCHES, every=15))
def test_evaluate_and_predict_are_exact_for_any_number_of_rows(
    our_model, plain_model, rows, batch
):
    x, y = MANY_X[:rows], MANY_Y[:rows]
    options = {"batch_size": batch, "verbose": 0}
    assert_same(
        (
            plain_model.evaluate(x, y, **options),
            plain_model.predict(x, **options),
        ),
        (our_model.evaluate(x, y, **options), our_model.predict(x, **options)),
    )


@pytest.mark.parametrize(
    ("replicas", "rows", "batch"),
    few(
        [
            (1, 70, 16),
            (2, 13, 5),
            (3, 250, 64),
            (3, 3, 8),
            (8, 10, 4),
            (8, 70, 16),
            (8, 64, 16),
        ],
        every=6,
    ),
)
def test_fit_is_exact_for_any_number_of_rows(replicas, rows, batch):
    def act(model):
        return model.fit(
            MANY_X[:rows], MANY_Y[:rows], batch_size=batch, epochs=2, verbose=0
        ).history

    check_same(one_input, act, replicas=replicas, **REGRESSION)

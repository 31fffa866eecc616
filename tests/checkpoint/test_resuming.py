"""A fit that went on is the one that was not interrupted, bit for bit.

The whole table: python -m pytest tests/checkpoint/test_resuming.py -m "slow or
not slow".
"""

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.variables import model_variables
from tests.parity.test_model_axis import MODELS, data, make_mlp
from tests.support.checkpoint import runs
from tests.support.checkpoint.cases import CASES
from tests.support.plain_keras import mirrored
from tests.support.strategies import cores_strategy

# What differs most between them; of the others some steps are enough.
QUICK = (
    *("usual", "K 2, steps do not divide a pass", "stops early"),
    *("uneven rows, 3 replicas", "own step", "part of the validation data"),
)
QUICKEST = ("usual", "K 2, steps do not divide a pass", "own step")
SELDOM = {"save_every_steps": None, "save_every_epochs": 99}

pytestmark = [
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
    pytest.mark.filterwarnings("ignore:.shuffle=True. was passed"),
]


def saved_steps(directory):
    return sorted(int(p.name) for p in (directory / "kept").glob("[0-9]*"))


def check(case, directory, *, every):
    """Goes on after some of the steps of a run, each time anew."""
    runner = runs.Runner(case)
    whole, told = runner.run(directory / "whole")
    steps = saved_steps(directory / "whole")
    assert len(steps) > 1
    for step in [*steps[::every], steps[-1]]:
        copy = directory / f"{step}-{len(list(directory.iterdir()))}"
        runs.interrupted_at(directory / "whole", step, copy)
        ours, ours_told = runner.run(copy, seed=5, k=case.then, **SELDOM)
        runs.assert_equal(ours, whole, is_exact=case.is_exact)
        if case.then is None:
            # The same numbers of batches, and logs.
            rest = told[len(told) - len(ours_told) :]
            runs.assert_equal(ours_told, rest, is_exact=case.is_exact)
            # Of a length that nobody knew, the last epoch's end is told again.
            assert ours_told or step == steps[-1]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=() if case.name in QUICKEST else pytest.mark.slow
        )
        for case in CASES
        if case.name in QUICK
    ],
    ids=str,
)
def test_a_run_goes_on_after_some_steps(case, tmp_path):
    check(case, tmp_path, every=9)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_goes_on_after_every_step(case, tmp_path):
    check(case, tmp_path, every=1)


# From one strategy to another.


def two_core_replicas():
    return cores_strategy(2, 2, MODELS["mlp"][1])


STRATEGIES = {
    "4 replicas": lambda: mirrored(4),
    "3 replicas": lambda: mirrored(3),
    "1 device": lambda: ks.OneDeviceStrategy("cpu:0"),
    "2 replicas of 2 cores": two_core_replicas,
}


def train(strategy, directory, stop=None):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = make_mlp()
        model.compile(
            keras.optimizers.SGD(0.05, momentum=0.9),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    x, y = data(26)
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=3,
        verbose=0,
        callbacks=[
            runs.Seen(stop),
            ks.callbacks.Checkpoint(directory, save_every_steps=3),
        ],
    )
    values = [np.asarray(v.value) for v in model_variables.all_variables(model)]
    return history.history, values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("2 replicas of 2 cores", "1 device"),
        pytest.param(
            "4 replicas", "2 replicas of 2 cores", marks=pytest.mark.slow
        ),
        pytest.param(
            "2 replicas of 2 cores", "3 replicas", marks=pytest.mark.slow
        ),
        pytest.param("1 device", "4 replicas", marks=pytest.mark.slow),
        pytest.param("3 replicas", "1 device", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_with_another_strategy(first, then, tmp_path):
    expected = train(STRATEGIES[first](), tmp_path / "whole")
    with pytest.raises(runs.Interrupted):
        train(STRATEGIES[first](), tmp_path / "kept", stop=7)
    ours = train(STRATEGIES[then](), tmp_path / "kept")
    runs.assert_equal(ours, expected, is_exact=False)

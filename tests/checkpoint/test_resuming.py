"""A fit that went on is the one that was not interrupted, bit for bit.

The whole table: python -m pytest tests/checkpoint/test_resuming.py -m "slow or
not slow".
"""

import pytest

from tests.checkpoint.cases import CASES
from tests.checkpoint.runs import (
    Runner,
    assert_equal,
    interrupted_at,
)

# What differs most between them; of the others some steps are enough.
QUICK = (
    "usual",
    "K 2, steps do not divide a pass",
    "K 3 then 1",
    "stops early",
    "stops in an epoch",
    "filtered tf.data",
    "uneven rows, 3 replicas",
    "own step",
    "mixed precision",
    "evaluates",
)
SELDOM = {"save_every_steps": None, "save_every_epochs": 99}

pytestmark = [
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),
    pytest.mark.filterwarnings("ignore:.shuffle=True. was passed"),
]


def saved_steps(folder):
    return sorted(int(p.name) for p in (folder / "kept").glob("[0-9]*"))


def check(case, folder, *, every):
    """Goes on after some of the steps of a run, each time anew."""
    runner = Runner(case)
    whole, told = runner.run(folder / "whole")
    steps = saved_steps(folder / "whole")
    assert len(steps) > 1
    for step in [*steps[::every], steps[-1]]:
        copy = folder / f"{step}-{len(list(folder.iterdir()))}"
        interrupted_at(folder / "whole", step, copy)
        ours, ours_told = runner.run(copy, seed=5, k=case.then, **SELDOM)
        assert_equal(ours, whole, is_exact=case.is_exact)
        if case.then is None:
            # The same numbers of batches, and logs.
            rest = told[len(told) - len(ours_told) :]
            assert ours_told == rest
            assert (len(ours_told) == 0) == (step == steps[-1])


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in QUICK], ids=str
)
def test_a_run_goes_on_after_some_steps(case, tmp_path):
    check(case, tmp_path, every=4)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_goes_on_after_every_step(case, tmp_path):
    check(case, tmp_path, every=1)

"""Searches for hyperparameters by keras-tuner and Optuna, on one strategy."""

import gc
import json
import os
import pathlib
import re

import jax
import numpy as np
import pytest

import keras_strategies as ks
from tests.support.commands import python

pytestmark = [
    pytest.mark.integrations,
    pytest.mark.filterwarnings("ignore"),
]
pytest.importorskip("keras_tuner", reason="./run test -m integrations")
searching = pytest.importorskip("tests.integrations.searching")


def make_strategies():
    devices = jax.devices()[:4]
    sharded = ks.MirroredStrategy(
        devices, variable_partitioner=searching.SHARDED
    )
    return (
        ks.OneDeviceStrategy(devices[0]),
        ks.MirroredStrategy(devices),
        sharded,
    )


@pytest.mark.parametrize("kind", [1, 2])
def test_keras_tuner_frees_the_memory_of_earlier_trials(kind):
    one, *_ = strategies = make_strategies()
    expected, _ = searching.tune(one)
    live = []

    def count():
        gc.collect()
        live.append(sum(a.nbytes for a in jax.live_arrays()))

    start = sum(a.nbytes for a in jax.live_arrays())
    found, best = searching.tune(strategies[kind], count)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert len(found) == len(live) == 4
    # Less than the smallest model's kernel.
    assert max(live) - start < 64 * 8 * 4
    assert best.distribute_strategy is strategies[kind]
    score = best.evaluate(searching.X, searching.Y, verbose=0)
    assert score == pytest.approx(min(expected), rel=1e-5)


@pytest.mark.parametrize("kind", [1, 2])
def test_optuna_prunes_the_same_trials(kind):
    one, *_ = strategies = make_strategies()
    expected, states = searching.study(one)
    found, found_states = searching.study(strategies[kind])
    assert found_states == states
    assert {"PRUNED", "COMPLETE"} <= set(states)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)


def test_all_processes_of_a_job_search_alike():
    ended = python(
        *("-m", "keras_strategies.cli", "launch", "--processes", 2),
        *("--devices-per-process", 2, "-m", "tests.integrations.searching"),
        cwd=pathlib.Path(__file__).parents[2],
        env=os.environ | {"XLA_FLAGS": ""},
        timeout=600,
    )
    lines = re.findall(r"found (\[.*\])", ended.stdout)
    assert len(lines) == 2, ended.stdout + ended.stderr
    first, second = map(json.loads, lines)
    assert first == second
    scores, _, states = first
    one, *_ = make_strategies()
    np.testing.assert_allclose(scores, searching.tune(one)[0], rtol=1e-5)
    assert states == searching.study(one)[1]

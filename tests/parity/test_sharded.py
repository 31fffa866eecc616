"""Replicas that divide variables among them give one device's numbers.

The invariant: a step with divided variables is the replicated one, rearranged
(docs/sharding.md). So every case of tests/parity holds, with its tolerance.
"""

import jax
import pytest

from keras_strategies.keras_bridge.variables.model_variables import (
    all_variables,
)
from tests.parity.cases import CASES, LOSSES, METRICS
from tests.parity.one_device import PAIRS, check

STRATEGIES = ("sharded2", "sharded3", "sharded8", "sharded8x2", "sharded8x4")
_QUICK = ((15, 4),)


def assert_divided(model):
    """Some variables are divided, and no device holds all of one of those."""
    divided = [
        v
        for v in all_variables(model)
        if isinstance(v.value, jax.Array)
        and not v.value.sharding.is_fully_replicated
    ]
    assert divided
    for variable in divided:
        shards = variable.value.addressable_shards
        assert all(s.data.size < variable.value.size for s in shards)


@pytest.mark.parametrize("name", CASES)
def test_equals_one_device(name):
    assert_divided(check(name, "sharded4", _QUICK, _seen(name)))


@pytest.mark.parametrize("name", ["adam", "sgd", "clipnorm"])
def test_divided_slots_equal_one_device(name):
    check(name, "slots4", _QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_every_case_equals_one_device_everywhere(name, strategy):
    assert_divided(check(name, strategy, PAIRS, _seen(name)))


def _seen(name):
    return ("evaluate",) if name in LOSSES | METRICS else ()

"""Lookups in sharded tables as the TPU compiler sees them.

The bounds are those of programs of raw JAX that exchange ids and rows.
"""

import functools

import pytest

from benchmarks.large_steps import recommender
from benchmarks.large_steps.tables import CASES

pytestmark = pytest.mark.tpu


@functools.cache
def measure(case, peer):
    return CASES[case].measure(peer)


@pytest.mark.parametrize(
    ("case", "peer"),
    [(name, "ours") for name in CASES] + [("recommender", "ours-half")],
)
def test_a_lookup_is_as_small_and_fast_as_in_jax(case, peer):
    ours = measure(case, peer)
    # It adds rows up in bfloat16; ours adds them up in float32.
    jax_ = measure(case, "columns-half")
    sizes = CASES[case]
    # Weights and slots; ids and factors.
    state = 12 * sizes.words * sizes.width / sizes.shards
    batch = sizes.ids * (2 * sizes.width + 8)
    assert ours.costs.argument_bytes < 1.05 * state + batch
    assert ours.costs.temporary_bytes < 1.2 * jax_.costs.temporary_bytes
    assert ours.milliseconds < 1.3 * jax_.milliseconds
    # Ids, and rows in both directions.
    if case == "recommender":
        assert sum(ours.costs.sent.values()) < 1e6


def test_a_recommender_is_as_small_and_fast_as_in_jax():
    (case,) = recommender.CASES.values()
    ours, jax_ = map(case.measure, case.peers)
    assert ours.costs.argument_bytes < 1.05 * case.state_bytes
    assert ours.costs.temporary_bytes < 1.2 * jax_.costs.temporary_bytes
    assert ours.milliseconds < 1.3 * jax_.milliseconds
    # The table of 1,000 rows is gathered, no other.
    assert sum(ours.costs.sent.values()) < 20e6
    assert ours.costs.counts["all-to-all"] > 0

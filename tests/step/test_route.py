"""The table of `decide`: which program runs a batch, and why."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from keras_strategies.step.analysis import Analysis
from keras_strategies.step.record import Record, TraceKind
from keras_strategies.step.route import Circumstances, Form, decide
from keras_strategies.step.traced import Traced


def add(x):
    return x + 1


def convolve(x):
    return jax.lax.conv(x, jnp.ones((1, 1, 1, 1)), (1, 1), "SAME")


def record(fn=add, **options):
    traced = Traced(fn, jnp.ones((4, 1, 2, 2)))
    return Record(
        kind=TraceKind(sums_later=True),
        rows=4,
        num_row_arrays=1,
        traced=traced,
        **options,
    )


FAILED = Record(
    kind=TraceKind(), rows=4, num_row_arrays=1, error=ValueError("no 4 rows")
)
USES = {"replica_uses": ("replica_id_in_sync_group",)}
EVEN = Circumstances(
    steps=1,
    is_padded=False,
    may_pad=False,
    avoids_loops=True,
    num_replicas=2,
)


def batch(**options):
    return dataclasses.replace(EVEN, **options)


REASON = Analysis(reason="it mixes rows")


@pytest.mark.quick
@pytest.mark.parametrize(
    ("trace", "analysis", "circumstances", "form"),
    [
        (record(), Analysis(), batch(), Form.EVEN),
        (record(), Analysis(), batch(steps=3), Form.STACKED),
        (record(convolve), Analysis(), batch(steps=3), Form.EVEN),
        (
            record(convolve),
            Analysis(),
            batch(steps=3, avoids_loops=False),
            Form.STACKED,
        ),
        (record(), Analysis(), batch(is_padded=True), Form.GLOBAL),
        (record(**USES), Analysis(), batch(is_padded=True), Form.RAGGED),
        (record(**USES), Analysis(), batch(), Form.EVEN),
        (record(), REASON, batch(), Form.GLOBAL),
        (FAILED, Analysis(), batch(), Form.GLOBAL),
        (FAILED, Analysis(), batch(is_padded=True), Form.GLOBAL),
        (
            record(),
            Analysis(),
            batch(is_padded=True, may_pad=True),
            Form.EVEN,
        ),
        (
            record(**USES),
            Analysis(),
            batch(is_padded=True, may_pad=True),
            Form.RAGGED,
        ),
        (
            record(),
            REASON,
            batch(is_padded=True, may_pad=True),
            Form.GLOBAL,
        ),
    ],
)
def test_program_of_a_batch(trace, analysis, circumstances, form):
    route = decide(trace, analysis, circumstances)
    assert (route.form, route.error) == (form, None)
    assert route.is_mapped == (form in (Form.EVEN, Form.STACKED))


@pytest.mark.quick
def test_the_reason_is_that_of_the_hook_or_the_analysis_or_the_error():
    assert decide(record(), REASON, EVEN).reason == "it mixes rows"
    failed = dataclasses.replace(FAILED, reason="a hook's reason")
    assert decide(failed, Analysis(), EVEN).reason == "a hook's reason"
    assert "ValueError: no 4 rows" in decide(FAILED, Analysis(), EVEN).reason
    # The indivisible batch alone gives no reason for later batches.
    assert decide(FAILED, Analysis(), batch(is_padded=True)).reason is None


@pytest.mark.quick
def test_one_replica_raises_the_error_of_its_code():
    route = decide(FAILED, Analysis(), batch(num_replicas=1))
    assert route.error is FAILED.error


@pytest.mark.quick
def test_a_step_that_needs_a_replica_and_the_global_batch_is_refused():
    error = decide(record(**USES), REASON, EVEN).error
    assert isinstance(error, RuntimeError)
    assert "replica_id_in_sync_group" in str(error)
    assert "it mixes rows" in str(error)
    failed = dataclasses.replace(FAILED, error=ValueError("bad"), **USES)
    error = decide(failed, Analysis(), EVEN).error
    assert error is failed.error
    assert "replica_id_in_sync_group" in error.__notes__[0]

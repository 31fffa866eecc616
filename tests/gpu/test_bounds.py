"""Steps on GPUs need no more than plain GSPMD: `./run bench gpu_steps`."""

import functools

import pytest

from benchmarks.gpu_steps import compare, count_sent, decoder, mlp

pytestmark = pytest.mark.gpu

SMALL = functools.partial(decoder, width=256, blocks=1, length=256, words=4096)


@pytest.mark.parametrize(
    ("make", "rows"),
    [(functools.partial(mlp, width=1024), 128), (SMALL, 4)],
    ids=["mlp", "decoder"],
)
def test_a_sharded_step_sends_and_stores_no_more_than_gspmd(make, rows):
    found = compare(make, rows)
    raw, ours = found["raw"], found["ours, sums in bfloat16"]
    assert count_sent(ours) <= 1.05 * count_sent(raw)
    assert ours.temporary_bytes <= 1.05 * raw.temporary_bytes
    assert ours.argument_bytes <= 1.05 * raw.argument_bytes
    for figures in (ours, found["ours"]):
        assert set(figures.counts) <= {
            "all-gather",
            "reduce-scatter",
            "all-reduce",
            # Rows of the table.
            "all-to-all",
        }

"""Collectives counted, with their bytes, in texts of XLA."""

import pytest

from keras_strategies._core.jaxprs.hlo_text import (
    count_collective_bytes,
    count_collectives,
)

PLAIN = """
  %all-reduce.1 = (f32[8,4]{1,0}, f32[3]{0}) all-reduce(%a, %b), \
replica_groups={{0,1,2,3}}, to_apply=%sum
  %all-gather.2 = bf16[16,8]{1,0:T(8,128)(2,1)} all-gather(%c), \
replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %reduce-scatter = f32[2,8]{1,0} reduce-scatter(%d), \
replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%sum
  %pred = pred[7]{0} all-reduce(%e), replica_groups={{0,1}}, to_apply=%or
  %fusion = f32[3] fusion(%all-gather.2), calls=%all-reduce.fusion
"""
STARTED = """
  %start = (f32[4]{0}, f32[16]{0}) all-gather-start(%a), \
replica_groups={{0,1,2,3}}, dimensions={0}
  %done = f32[16]{0} all-gather-done(%start)
"""
# As the TPU compiler writes one that matrix products run beside.
FUSED = """
  %all-gather.7 = bf16[64]{0} all-gather(%p), channel_id=1, \
replica_groups={{0,1}}, frontend_attributes={chain_id="1"}
  ROOT %cc = (bf16[32], bf16[64]) custom-call(%all-gather.7), \
custom_call_target="AsyncCollectiveStart"
  %all-gather.8 = bf16[64]{0} all-gather(%p), channel_id=1, \
replica_groups={{0,1}}, frontend_attributes={chain_id="1"}
  %all-gather.9 = bf16[64]{0} all-gather(%p), channel_id=1, \
replica_groups={{0,1}}, frontend_attributes={chain_id="1"}
"""


@pytest.mark.parametrize(
    ("text", "counts", "sizes"),
    [
        (
            PLAIN,
            {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1},
            {
                "all-reduce": 4 * 32 + 4 * 3 + 7,
                "all-gather": 2 * 128,
                "reduce-scatter": 4 * 16 * 4,
            },
        ),
        (STARTED, {"all-gather": 1}, {"all-gather": 64}),
        (FUSED, {"all-gather": 1}, {"all-gather": 128}),
        ("", {}, {}),
    ],
)
def test_texts(text, counts, sizes):
    assert {k: n for k, n in count_collectives(text).items() if n} == counts
    assert {k: n for k, n in count_collective_bytes(text).items() if n} == sizes

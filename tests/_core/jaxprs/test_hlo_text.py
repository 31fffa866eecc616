"""Collectives counted, with their bytes, in texts of XLA."""

import pytest

from keras_strategies._core.jaxprs.hlo_text import (
    count_collective_bytes,
    count_collectives,
    count_kernel_flops,
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


def test_another_kernel_is_no_kernel_of_attention():
    of_attention = "splash_attention_10/static/splash_mha_fwd/pallas_call"

    def call(name, kind="custom-call", custom_call="tpu_custom_call"):
        return (
            f"  %a = f32[1] {kind}(%b), "
            f'custom_call_target="{custom_call}", '
            f'metadata={{op_name="jit(f)/{name}"}}\n'
        )

    result = call(of_attention, "get-tuple-element", "")
    one = call(of_attention) + result
    assert count_kernel_flops(one) == 2 * 10 * 2
    other = call("mine/pallas_call")
    assert count_kernel_flops(other + result) == 0
    assert count_kernel_flops(other + one + other + one) == 2 * 2 * 10 * 2

"""Collectives counted, with their bytes, in texts of XLA."""

import pytest

from keras_strategies.passes.hlo_text import (
    count_collective_bytes,
    count_collectives,
    parse_groups,
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

# As XLA writes those that it combined for GPUs.
COMBINED = """
  %gather = ((bf16[4,8]{1,0}, f32[2]{0}), (bf16[16,8]{1,0}, \
/*index=1*/f32[8]{0})) all-gather-start(%a, %b), \
replica_groups=mesh['axis_0'=4,'axis_1'=1] {'axis_0'}, dimensions={0}
  %scatter = ((f32[8]{0}, f32[16,8]{1,0}), (f32[2]{0}, f32[4,8]{1,0})) \
reduce-scatter-start(%c, %d), replica_groups={{0,1,2,3}}, dimensions={0}
  %one = (f32[16]{0}, f32[4]{0}) reduce-scatter-start(%e), \
replica_groups=[2,4]<=[8], dimensions={0}
  %sums = (f32[8]{0}, bf16[3,2]{1,0:T(8,128)(2,1)}) all-reduce-start(%f, %g), \
replica_groups={{0,1,2,3}}, to_apply=%sum
  %swap = ((f32[8]{0}, f32[4]{0}), (f32[8]{0}, f32[4]{0}), u32[], u32[]) \
collective-permute-start(%h, %i), source_target_pairs={{0,1},{1,0}}
  %async = ((f32[8]{0}), f32[8]{0}, u32[]) all-to-all-start(%j), \
replica_groups={{0,1,2,3}}, dimensions={0}
  %done = (bf16[16,8]{1,0}, f32[8]{0}) all-gather-done(%gather)
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
        (
            COMBINED,
            {
                "all-reduce": 1,
                "all-gather": 1,
                "reduce-scatter": 2,
                "collective-permute": 1,
                "all-to-all": 1,
            },
            {
                "all-reduce": 4 * 8 + 2 * 6,
                "all-gather": 2 * 128 + 4 * 8,
                "reduce-scatter": 4 * 8 + 4 * 128 + 4 * 16,
                "collective-permute": 4 * 8 + 4 * 4,
                "all-to-all": 4 * 8,
            },
        ),
        ("", {}, {}),
    ],
)
def test_texts(text, counts, sizes):
    assert {k: n for k, n in count_collectives(text).items() if n} == counts
    assert {k: n for k, n in count_collective_bytes(text).items() if n} == sizes


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, x=1", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,3]<=[3,2]T(1,0)", ((0, 2, 4), (1, 3, 5))),
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
        # As libtpu 0.0.42 writes those of programs over the global batch.
        ("replica_groups=mesh['a'=4] {'a'}, x=1", ((0, 1, 2, 3),)),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}", ((0, 1), (2, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        (
            "replica_groups=mesh['a'=2,'b'=3], device_ids=([3,2]T(1,0)) {'b'}",
            ((0, 2, 4), (1, 3, 5)),
        ),
        (
            "replica_groups=mesh['a'=2,'b'=2], device_ids=(3,1,2,0) {'b'}",
            ((3, 1), (2, 0)),
        ),
        # A part of an axis: its size, and that of the part before it.
        ("replica_groups=mesh['a'=4] {'a':(1)2}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=4] {'a':(2)2}", ((0, 1), (2, 3))),
        ("channel_id=1", ()),
    ],
)
def test_groups_in_all_notations(text, groups):
    assert parse_groups(text) == groups


def test_a_scattered_sum_has_the_parts_of_all_devices_along_an_axis():
    text = (
        "  %s = f32[2,8]{1,0} reduce-scatter(%a), replica_groups="
        "mesh['a'=4,'b'=2] {'a'}, dimensions={0}\n"
    )
    assert count_collective_bytes(text)["reduce-scatter"] == 4 * 64

"""Programs' texts, parsed, and their collectives."""

import pytest

from keras_strategies.passes.hlo import (
    COLLECTIVES,
    Array,
    find_collective,
    list_collectives,
    parse,
    parse_groups,
)
from keras_strategies.planning.program.links import find_ends

pytestmark = pytest.mark.quick

PROGRAM = """HloModule jit_f, is_scheduled=true

%fused (param_0: f32[4,200]) -> f32[200] {
  %param_0 = f32[4,200]{1,0:T(8,128)} parameter(0)
  ROOT %slice.1 = f32[1,200]{1,0:T(8,128)} slice(%param_0), slice={[0:1]}
}

ENTRY %main.2 (a.1: f32[4,200], b: pred[3]) -> (f32[], bf16[16,8]) {
  %a.1 = f32[4,200]{1,0:T(8,128)} parameter(0), metadata={op_name="x"}
  %b = pred[3]{0:T(512)} parameter(1)
  %constant.1 = s32[]{:T(128)} constant(-7)
  %fusion = f32[1,200]{1,0:T(8,128)S(1)} fusion(%a.1), kind=kLoop, \
calls=%fused, metadata={op_name="jit(f)/layer/mul"}
  %kernel = (f32[]{:T(128)}, /*index=1*/bf16[16,8]{0,1:T(8,128)(2,1)}) \
custom-call(%fusion, /*index=1*/%b), metadata_of={
"a": "b"
}}, metadata={op_name="jit(f)/kernel"}
  ROOT %tuple = (f32[]{:T(128)}, bf16[16,8]{0,1}) tuple(%kernel)
}
"""


def test_computations_and_their_instructions():
    program = parse(PROGRAM)
    assert list(program.computations) == ["fused", "main.2"]
    names = [x.name for x in program.entry.instructions]
    assert names == ["a.1", "b", "constant.1", "fusion", "kernel", "tuple"]
    assert program.entry.root.opcode == "tuple"
    fusion = program.entry.by_name["fusion"]
    assert (fusion.operands, fusion.get_called()) == (("a.1",), "fused")
    assert fusion.source == "jit(f)/layer/mul"
    assert program.entry.by_name["constant.1"].literal == "-7"
    assert program.entry.parameters[1].name == "b"
    assert [x.name for x in program.entry.users["fusion"]] == ["kernel"]


def test_an_instruction_may_have_several_lines():
    kernel = parse(PROGRAM).entry.by_name["kernel"]
    assert kernel.operands == ("fusion", "b")
    assert kernel.source == "jit(f)/kernel"


def test_arrays_are_padded_to_the_tiles_of_their_layout():
    program = parse(PROGRAM)

    def arrays(name):
        return program.entry.by_name[name].arrays

    assert arrays("a.1") == (Array((4, 200), 3200, 4 * 8 * 256, False),)
    assert arrays("b") == (Array((3,), 3, 512, False),)
    assert arrays("fusion") == (Array((1, 200), 800, 4 * 8 * 256, True),)
    # The first dimension is the minor one, of 128 lanes.
    assert arrays("kernel")[1] == Array((16, 8), 256, 2 * 128 * 8, False)
    assert parse(PROGRAM).computations["fused"].root.arrays[0].dims == (1, 200)


def test_a_text_without_an_entry_is_no_program():
    with pytest.raises(ValueError, match="must contain an entry computation"):
        parse("HloModule f")


PLAIN = """
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[3]{0} parameter(1)
  %c = bf16[4,8]{1,0:T(8,128)(2,1)} parameter(2)
  %d = f32[8,8]{1,0} parameter(3)
  %e = pred[7]{0} parameter(4)
  %all-reduce.1 = (f32[8,4]{1,0}, f32[3]{0}) all-reduce(%a, %b), \
replica_groups={{0,1,2,3}}, to_apply=%sum
  %all-gather.2 = bf16[16,8]{1,0:T(8,128)(2,1)} all-gather(%c), \
replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %reduce-scatter = f32[2,8]{1,0} reduce-scatter(%d), \
replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%sum
  %pred = pred[7]{0} all-reduce(%e), replica_groups={{0,1}}, to_apply=%or
  %fusion = f32[3] fusion(%all-gather.2), calls=%all-reduce.fusion
"""
# As the TPU compiler writes one that matrix products run beside.
FUSED = """
  %p = bf16[32]{0} parameter(0)
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
  %a = bf16[4,8]{1,0} parameter(0)
  %b = f32[2]{0} parameter(1)
  %c = f32[8]{0} parameter(2)
  %d = f32[16,8]{1,0} parameter(3)
  %e = f32[16]{0} parameter(4)
  %f = f32[8]{0} parameter(5)
  %g = bf16[3,2]{1,0:T(8,128)(2,1)} parameter(6)
  %h = f32[8]{0} parameter(7)
  %i = f32[4]{0} parameter(8)
  %j = f32[8]{0} parameter(9)
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
def test_collectives_are_counted_with_their_bytes(text, counts, sizes):
    program = parse(
        f"ENTRY %main (a: f32[]) -> f32[] {{\n{text}  %r = () tuple()\n}}"
    )
    found = list_collectives(program)
    kinds = [collective.kind for collective in found]
    assert {kind: kinds.count(kind) for kind in kinds} == counts
    assert {
        kind: sum(x.size for x in found if x.kind == kind) for kind in kinds
    } == sizes


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


TEXT = """HloModule f

%start (p: bf16[4,8]) -> bf16[16,8] {
  %p = bf16[4,8] parameter(0)
  %gather = bf16[16,8] all-gather(%p), replica_groups={{0,1,2,3}}, \
frontend_attributes={chain_id="5"}
  ROOT %begin = bf16[16,8] custom-call(%gather), \
custom_call_target="AsyncCollectiveStart"
}

%middle (p: bf16[4,8]) -> bf16[16,8] {
  %p.1 = bf16[4,8] parameter(0)
  ROOT %gather.1 = bf16[16,8] all-gather(%p.1), \
replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="5"}
}

%done (p: bf16[4,8]) -> bf16[16,8] {
  %p.2 = bf16[4,8] parameter(0)
  %gather.2 = bf16[16,8] all-gather(%p.2), \
replica_groups={{0,1,2,3}}, frontend_attributes={chain_id="5"}
  ROOT %end = bf16[16,8] custom-call(%gather.2), \
custom_call_target="AsyncCollectiveDone"
}

%wrapped (p: bf16[4,8]) -> bf16[4,8] {
  %p.3 = bf16[4,8] parameter(0)
  ROOT %swap = bf16[4,8] all-to-all(%p.3), replica_groups={{0,1,2,3}}
}

ENTRY %main (a: bf16[4,8]) -> bf16[16,8] {
  %a = bf16[4,8] parameter(0)
  %b = f32[8] parameter(1)
  %c = f32[4] parameter(2)
  %d = f32[16,8] parameter(3)
  %scatter = f32[4,8] reduce-scatter(%d), replica_groups={{0,1,2,3}}
  %one = bf16[16,8] fusion(%a), kind=kCustom, calls=%start
  %two = bf16[16,8] fusion(%a), kind=kCustom, calls=%middle
  %three = bf16[16,8] fusion(%a), kind=kCustom, calls=%done
  %four = ((bf16[4,8]), bf16[4,8]) async-start(%a), calls=%wrapped
  %five = bf16[4,8] async-done(%four), calls=%wrapped
  %sum = (f32[8], f32[4]) all-reduce-start(%b, %c), replica_groups={{0,1,2,3}}
  %total = (f32[8], f32[4]) all-reduce-done(%sum)
  %both = ((f32[8], f32[4]), (f32[2], f32[1])) reduce-scatter-start(%b, %c), \
replica_groups={{0,1,2,3}}
  ROOT %parts = (f32[2], f32[1]) reduce-scatter-done(%both)
}
"""


def test_beginnings_and_ends_of_collectives():
    program = parse(TEXT)
    found = {
        collective.key or instruction.name: collective
        for computation in program.computations.values()
        for instruction in computation.instructions
        for collective in find_collective(computation, instruction)
    }
    kinds = {key: (x.kind, x.size) for key, x in found.items()}
    assert kinds == {
        "5": ("all-gather", 256),
        "swap": ("all-to-all", 64),
        "scatter": ("reduce-scatter", 4 * 4 * 8 * 4),
        "sum": ("all-reduce", 48),
        "both": ("reduce-scatter", 48),
    }
    assert found["scatter"].key is found["swap"].key is None
    assert len(list_collectives(program)) == len(found)
    assert {x.kind for x in found.values()} <= set(COLLECTIVES)
    ends = {x.name: find_ends(program, x) for x in program.entry.instructions}
    assert {k: v for k, v in ends.items() if v} == {
        "three": ["5"],
        "five": ["four"],
        "total": ["sum"],
        "parts": ["both"],
    }


SPARSE_CORE = """\
HloModule jit_f

%sum (a.1: f32[8], token.1: token[]) -> f32[8] {
  %a.1 = f32[8]{0} parameter(0)
  ROOT %all-reduce.3 = f32[8]{0} all-reduce(%a.1), replica_groups=[4,2]<=[8]
}, execution_thread="sparsecore"

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %start = ((f32[8]{0}), f32[8]{0}) call-start(%a), to_apply=%sum
  ROOT %done = f32[8]{0} call-done(%start)
}
"""


def test_collectives_in_sparse_cores_are_listed():
    program = parse(SPARSE_CORE)
    assert [(x.kind, x.size) for x in list_collectives(program)] == [
        ("all-reduce", 32)
    ]
    start, done = program.entry.instructions[1:]
    assert program.find_called(start) is program.computations["sum"]
    assert find_ends(program, done) == ["start"]

"""Programs' texts, parsed."""

import pytest

from keras_strategies.planning.program.hlo import Array, parse

pytestmark = pytest.mark.quick

TEXT = """HloModule jit_f, is_scheduled=true

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
    program = parse(TEXT)
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
    kernel = parse(TEXT).entry.by_name["kernel"]
    assert kernel.operands == ("fusion", "b")
    assert kernel.source == "jit(f)/kernel"


def test_arrays_are_padded_to_the_tiles_of_their_layout():
    program = parse(TEXT)

    def arrays(name):
        return program.entry.by_name[name].arrays

    assert arrays("a.1") == (Array((4, 200), 3200, 4 * 8 * 256, False),)
    assert arrays("b") == (Array((3,), 3, 512, False),)
    assert arrays("fusion") == (Array((1, 200), 800, 4 * 8 * 256, True),)
    # The first dimension is the minor one, of 128 lanes.
    assert arrays("kernel")[1] == Array((16, 8), 256, 2 * 128 * 8, False)
    assert parse(TEXT).computations["fused"].root.arrays[0].dims == (1, 200)


def test_a_text_without_an_entry_is_no_program():
    with pytest.raises(ValueError, match="must contain an entry computation"):
        parse("HloModule f")

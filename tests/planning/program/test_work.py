"""Operations and bytes of instructions, counted by hand."""

import pytest

from keras_strategies.passes.hlo import parse
from keras_strategies.planning.program.work import count_work, locate

pytestmark = pytest.mark.quick

TILE = 4096


def work(line, *before, computations=""):
    """Counts the work of one instruction, after those that it reads."""
    lines = "\n".join(f"  {x}" for x in (*before, f"ROOT {line}"))
    text = f"HloModule f\n\n{computations}\nENTRY %main (a: f32[]) -> f32[] {{"
    program = parse(f"{text}\n{lines}\n}}\n")
    return count_work(program, program.entry, program.entry.root)


def parameter(name, shape, number=0):
    return f"%{name} = {shape} parameter({number})"


A = parameter("a", "f32[1000,16,128]{2,1,0:T(8,128)}")
SLICE = 16 * 128 * 4
ALL = 1000 * SLICE


def test_arrays_that_are_read_and_written_as_a_whole():
    found = work(
        "%y = f32[8,128]{1,0:T(8,128)} add(%x, %x)",
        parameter("x", "f32[8,128]{1,0:T(8,128)}"),
    )
    assert (found.read, found.written) == ({"x": TILE}, {"y": TILE})
    assert found.parts == found.flops == 0


def test_arrays_on_the_chip_are_counted_apart():
    found = work(
        "%y = f32[8,128]{1,0:T(8,128)S(1)} negate(%x)",
        parameter("x", "f32[8,128]{1,0:T(8,128)}"),
    )
    assert (found.read, found.written) == ({"x": TILE}, {})
    assert found.on_chip == TILE


def test_of_a_sliced_array_the_slice_is_read():
    found = work("%y = f32[1,16,128]{2,1,0} dynamic-slice(%a, %i, %i, %i)", A)
    assert found.parts == SLICE
    assert (found.read, found.written) == ({}, {"y": SLICE})
    fused = (
        "%fused (p: f32[]) -> f32[] {\n"
        "  %p = f32[1000,16,128]{2,1,0} parameter(0)\n"
        "  %q = f32[16,128]{1,0} parameter(1)\n"
        "  %c = bf16[1000,16,128]{2,1,0} convert(%p)\n"
        "  %s = bf16[1,16,128]{2,1,0} dynamic-slice(%c, %i, %i, %i)\n"
        "  ROOT %r = bf16[16,128]{1,0} bitcast(%s)\n}\n"
    )
    found = work(
        "%y = bf16[16,128]{1,0} fusion(%a, %b), calls=%fused",
        *(A, parameter("b", "f32[16,128]{1,0}", 1)),
        computations=fused,
    )
    assert found.parts == SLICE / 2
    assert (found.read, found.written) == ({}, {"y": SLICE / 2})


def test_of_an_array_that_is_updated_in_place_the_update_is_written():
    update = parameter("u", "f32[1,16,128]{2,1,0}", 1)
    line = "f32[1000,16,128]{2,1,0} dynamic-update-slice(%a, %u, %i, %i, %i)"
    found = work(f"%y = {line}", A, update)
    assert (found.parts, found.read) == (SLICE, {"u": SLICE})
    assert found.written == {}
    fused = (
        "%fused (p: f32[]) -> f32[] {\n"
        "  %a = f32[1000,16,128]{2,1,0} parameter(0)\n"
        "  %u = f32[1,16,128]{2,1,0} parameter(1)\n"
        f"  %d = {line}\n"
        "  %h = f32[16,128]{1,0} bitcast(%u)\n"
        "  ROOT %r = (f32[1000,16,128]{2,1,0}, f32[16,128]{1,0}) "
        "tuple(%d, %h)\n}\n"
    )
    found = work(
        "%y = (f32[1000,16,128]{2,1,0}, f32[16,128]{1,0}) fusion(%a, %u), "
        "calls=%fused",
        *(A, update),
        computations=fused,
    )
    assert found.parts == SLICE
    assert (found.read, found.written) == ({"u": SLICE}, {"y:1": SLICE})


@pytest.mark.parametrize(
    ("result", "sizes", "tiles"),
    [
        ("f32[64]{0}", "1,1,1", 64),
        ("f32[64,128]{1,0}", "1,1,128", 64),
        ("f32[64,16,128]{2,1,0}", "1,16,128", 2 * 64),
    ],
)
def test_a_gather_reads_tiles(result, sizes, tiles):
    found = work(
        f"%y = {result} gather(%a, %i), slice_sizes={{{sizes}}}",
        *(A, parameter("i", "s32[64,3]{1,0}", 1)),
    )
    assert found.parts == tiles * TILE
    assert "a" not in found.read


def test_a_scatter_reads_and_writes_tiles():
    found = work(
        "%y = f32[1000,16,128]{2,1,0} scatter(%a, %i, %u), "
        "update_window_dims={1}, inserted_window_dims={0,1}",
        *(A, parameter("i", "s32[64,2]{1,0}", 1)),
        parameter("u", "f32[64,128]{1,0}", 2),
    )
    assert found.parts == 2 * 64 * TILE


def test_operations_of_products():
    found = work(
        "%y = f32[16,64]{1,0} dot(%l, %r), lhs_contracting_dims={1}",
        parameter("l", "f32[16,256]{1,0}"),
        parameter("r", "f32[256,64]{1,0}", 1),
    )
    assert found.flops == 2 * 16 * 256 * 64
    # TPU programs have convolutions instead of products.
    found = work(
        "%y = f32[16,64]{1,0} convolution(%l, %r), dim_labels=bf_io->bf",
        parameter("l", "f32[16,256]{1,0}"),
        parameter("r", "f32[256,64]{1,0}", 1),
    )
    assert found.flops == 2 * 16 * 256 * 64
    # A batch of 4 products, in a window that sees one of the batch at a time.
    found = work(
        "%y = f32[16,64,4]{1,0,2} convolution(%l, %r), "
        "window={size=4 stride=3 pad=3_3 lhs_dilate=4 rhs_reversal=1}, "
        "dim_labels=bf0_io0->bf0",
        parameter("l", "f32[16,256,4]{1,0,2}"),
        parameter("r", "f32[256,64,4]{1,0,2}", 1),
    )
    assert found.flops == 2 * 16 * 256 * 64 * 4


def test_operations_of_convolutions_without_their_padding():
    found = work(
        "%y = f32[2,8,8,6]{3,2,1,0} convolution(%l, %r), "
        "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_01io->b01f",
        parameter("l", "f32[2,8,8,5]{3,2,1,0}"),
        parameter("r", "f32[3,3,5,6]{3,2,1,0}", 1),
    )
    # At the two edges, two of three entries of the window are in the image.
    assert found.flops == 2 * 2 * 6 * 5 * (3 * 6 + 2 * 2) ** 2


def test_operations_of_attentions_kernels_and_no_others():
    def call(name, opcode="custom-call"):
        return work(
            f"%y = f32[8,128]{{1,0}} {opcode}(%x), "
            'custom_call_target="tpu_custom_call", '
            f'metadata={{op_name="jit(f)/{name}/pallas_call"}}',
            parameter("x", "f32[8,128]{1,0}"),
        ).kernel_flops

    scope = "splash_attention_10/static"
    assert call(f"{scope}/splash_mha_fwd") == 2 * 10 * 2
    # Outside of layers, the scope of a forward pass is in parentheses.
    assert call("jvp(splash_attention_10)/static/splash_mha_fwd") == 2 * 10 * 2
    assert call(f"{scope}/splash_mqa_dq") == 2 * 10 * 3
    assert call(f"{scope}/splash_mha_dkv_no_residuals") == 2 * 10 * 4
    assert call("mine") == call("splash_mha_fwd") == 0
    assert call(f"{scope}/splash_mha_fwd", "copy") == 0


def test_instructions_that_move_nothing():
    for opcode in ("bitcast", "get-tuple-element", "copy-done"):
        found = work(f"%y = f32[8]{{0}} {opcode}(%x)", parameter("x", "f32[8]"))
        assert found.read == found.written == {}
    found = work(
        '%y = f32[8]{0} custom-call(), custom_call_target="AllocateBuffer"'
    )
    assert found.read == found.written == {}


TUPLES = """HloModule f

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8] parameter(0)
  %early = f32[8] negate(%a)
  %pair = (f32[8], f32[8]) fusion(%a), kind=kLoop, calls=%none
  %second = f32[8] get-tuple-element(%pair), index=1
  %same = f32[8] bitcast(%second)
  ROOT %first = f32[8] get-tuple-element(%pair), index=0
}
"""


def test_elements_of_tuples_have_names():
    entry = parse(TUPLES).entry
    assert locate(entry, "same") == locate(entry, "second") == "pair:1"
    assert locate(entry, "first") == "pair:0"
    assert locate(entry, "early") == "early"
    assert locate(entry, "unknown") == "unknown"

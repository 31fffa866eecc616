"""Operations of the libraries that GPU programs call, by hand."""

import pytest

from keras_strategies.passes.hlo import parse
from keras_strategies.planning.program.products import (
    count_kernel,
    list_products,
)

pytestmark = pytest.mark.quick


def parse_call(result, target, shapes, attributes):
    names = [f"%p{k}" for k in range(len(shapes))]
    lines = [
        f"  {name} = {shape} parameter({k})"
        for k, (name, shape) in enumerate(zip(names, shapes, strict=True))
    ]
    lines.append(
        f"  ROOT %x = {result} custom-call({', '.join(names)}), "
        f'custom_call_target="{target}", {attributes}'
    )
    body = "\n".join(lines)
    program = parse(
        f"HloModule f\n\nENTRY %f (a: f32[]) -> f32[] {{\n{body}\n}}\n"
    )
    return program, program.entry, program.entry.root


def products(*call):
    return list(list_products(*parse_call(*call)))


@pytest.mark.parametrize(
    ("precision", "dtype"), [("DEFAULT", "f32"), ("HIGHEST", "f32 exact")]
)
def test_products_of_cublas(precision, dtype):
    config = (
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{'
        '"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":'
        '["0"]},"precision_config":{"operand_precision":'
        f'["{precision}","{precision}"]}}}}}}'
    )
    found = products(
        "(f32[512,2048]{1,0}, s8[4194304]{0})",
        "__cublas$lt$matmul",
        ["f32[512,1024]{1,0}", "f32[1024,2048]{1,0}"],
        config,
    )
    assert found == [(dtype, 2.0 * 512 * 1024 * 2048)]


IMAGE, KERNEL, RESULT = (
    "bf16[64,33,33,128]{3,2,1,0}",
    "bf16[256,3,3,128]{3,2,1,0}",
    "bf16[64,16,16,256]{3,2,1,0}",
)
WINDOW = "window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f"
POINTS = 64 * 16 * 16


@pytest.mark.parametrize(
    ("name", "operands", "result"),
    [
        ("ConvForward", [IMAGE, KERNEL], RESULT),
        ("ConvBiasActivationForward", [IMAGE, KERNEL, "bf16[256]{0}"], RESULT),
        ("ConvBackwardInput", [RESULT, KERNEL], IMAGE),
        ("ConvBackwardFilter", [IMAGE, RESULT], KERNEL),
    ],
)
def test_convolutions_of_cudnn(name, operands, result):
    target = f"__cudnn$c{name[1:]}"
    found = products(f"({result}, u8[0]{{0}})", target, operands, WINDOW)
    assert found == [("bf16", 2.0 * POINTS * 9 * 128 * 256)]


@pytest.mark.parametrize(("mask", "share"), [("NO_MASK", 1), ("CAUSAL", 0.5)])
@pytest.mark.parametrize(
    ("name", "number"),
    [("fmhaSoftmax", 2), ("fmhaScaleBiasSoftmaxDropoutBackward", 5)],
)
def test_attention_of_cudnn(name, number, mask, share):
    query = "bf16[4,1024,8,128]{3,2,1,0}"
    config = (
        'backend_config={"cudnn_fmha_backend_config": {'
        '"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": '
        f'["4", "8", "1024", "512"]}}, "mask_type": "{mask}"}}}}'
    )
    keys = "bf16[4,512,8,128]{3,2,1,0}"
    call = parse_call(
        f"({query}, u8[0]{{0}})", f"__cudnn${name}", [query, keys, keys], config
    )
    product = 2.0 * 4 * 8 * 1024 * 512 * 128
    assert count_kernel(*call[1:]) == number * share * product
    assert list(list_products(*call)) == []


def test_other_calls_have_no_products():
    call = parse_call(
        "f32[8]{0}", "__cublas$triangularSolve2", ["f32[8]{0}"], ""
    )
    assert count_kernel(*call[1:]) == 0
    call = parse_call("f32[8]{0}", "Sharding", ["f32[8]{0}"], "")
    assert list(list_products(*call)) == []

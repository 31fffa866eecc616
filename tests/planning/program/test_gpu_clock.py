"""Times of instructions of GPU programs, by hand."""

import pytest

from keras_strategies.planning.program.costs import estimate_work
from keras_strategies.tpu.chips import find_chip
from tests.support.gpus import make_hosts

pytestmark = pytest.mark.quick

GPUS = make_hosts(1, 8)
CHIP = find_chip(GPUS[0])
LAUNCH = 2.5e-6
# Of the peak rate, and of the memory's bandwidth.
PRODUCTS, CONVOLUTIONS, BYTES = 0.65, 0.55, 0.75
ROWS = 8192
TIMES = 2 * ROWS**3


def costs(*lines):
    body = "\n".join(f"  {line}" for line in lines)
    text = f"HloModule f\n\nENTRY %main (a: f32[]) -> f32[] {{\n{body}\n}}\n"
    return estimate_work(text, CHIP, GPUS)


def product(dtype, attributes=""):
    return costs(
        f"%a = {dtype}[{ROWS},{ROWS}]{{1,0}} parameter(0)",
        f"ROOT %x = {dtype}[{ROWS},{ROWS}]{{1,0}} dot(%a, %a), "
        f"lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}{attributes}",
    )


@pytest.mark.parametrize(
    ("dtype", "attributes", "tflops"),
    [
        ("bf16", "", 989.5),
        ("f16", "", 989.5),
        ("f32", "", 494.7),
        ("f32", ", operand_precision={high,high}", 494.7),
        ("f32", ", operand_precision={highest,highest}", 67),
    ],
)
def test_a_product_takes_the_time_of_its_dtype(dtype, attributes, tflops):
    found = product(dtype, attributes)
    assert found["flops"] == TIMES
    seconds = TIMES / tflops / 1e12
    assert found["compute_seconds"] == pytest.approx(seconds)
    assert found["busy_seconds"] == pytest.approx(seconds / PRODUCTS)


def test_a_convolution_reaches_less():
    found = costs(
        "%a = bf16[64,56,56,256]{3,2,1,0} parameter(0)",
        "%k = bf16[256,3,3,256]{3,2,1,0} parameter(1)",
        "ROOT %x = (bf16[64,56,56,256]{3,2,1,0}, u8[0]{0}) custom-call("
        "%a, %k), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, "
        'custom_call_target="__cudnn$convForward"',
    )
    assert found["compute_seconds"] > 0
    seconds = found["compute_seconds"] / CONVOLUTIONS
    assert found["busy_seconds"] == pytest.approx(seconds)


def test_other_kernels_take_the_time_of_their_bytes():
    found = costs(
        "%a = f32[1024,1024]{1,0} parameter(0)",
        "%s = f32[1]{0} parameter(1)",
        "%x = f32[1024,1024]{1,0} negate(%a)",
        "ROOT %y = f32[1]{0} negate(%s)",
    )
    moved = 2 * 4 * 2**20
    assert found["moved_bytes"] == moved + 2 * 4
    seconds = moved / CHIP.memory_bandwidth / BYTES
    assert found["busy_seconds"] == pytest.approx(seconds + LAUNCH)
    assert found["latency_seconds"] == pytest.approx(LAUNCH)


def test_single_numbers_are_read_in_sectors():
    def gathered(columns):
        return costs(
            "%a = f32[50000,1024]{1,0} parameter(0)",
            "%i = s32[4096,1]{1,0} parameter(1)",
            f"ROOT %x = f32[4096,{columns}]{{1,0}} gather(%a, %i), "
            f"offset_dims={{1}}, slice_sizes={{1,{columns}}}",
        )["moved_bytes"]

    others = 4096 * 4
    assert gathered(1) == others + 4096 * (4 + 32)
    assert gathered(1024) == others + 4096 * 1024 * (4 + 4)


GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}"
BIG = "f32[16777216]{0}"


def reduced(is_sync):
    config = f'backend_config={{"is_sync":{is_sync}}}'
    return costs(
        f"%a = {BIG} parameter(0)",
        f"%s = {BIG} all-reduce-start(%a), {GROUPS}, {config}",
        f"%x = {BIG} negate(%a)",
        f"ROOT %d = {BIG} all-reduce-done(%s)",
    )


def test_asynchronous_collectives_run_beside_other_instructions():
    beside, waited = reduced("false"), reduced("true")
    size = 4 * 2**24
    busy = 2 * size / CHIP.memory_bandwidth / BYTES
    for found in (beside, waited):
        assert found["busy_seconds"] == pytest.approx(busy)
        minimum = found["link_seconds"]["all-reduce"]
        assert minimum == pytest.approx(2 * size * 7 / 8 / 450e9)
    took = waited["waiting_seconds"]["all-reduce"]
    assert took > waited["link_seconds"]["all-reduce"]
    assert beside["waiting_seconds"]["all-reduce"] == pytest.approx(took - busy)

"""Costs of programs, added up by hand."""

import dataclasses
import time

import jax
import pytest

from keras_strategies.planning.program.costs import Costs, estimate_work
from keras_strategies.tpu.chips import find_chip
from tests.support.slices import make_slice

pytestmark = pytest.mark.quick

DEVICES = make_slice((2, 2, 1))
CHIP = dataclasses.replace(
    find_chip(DEVICES[0]),
    flops=1e12,
    memory_bandwidth=4e9,
    link_bandwidth=1e9,
    on_chip_bytes=10**6,
)
MINIMUM = 1.2e-6
"""The time of an instruction with little work."""
# An array of this shape is 40 MB, and a product of two has 8e10 operations.
BIG = "f32[3200,3200]{1,0:T(8,128)}"
BYTES = 3200**2 * 4
PRODUCT = 2 * 3200**3
REACHED = 0.9 * 4e9
SUM = BYTES * 3 / REACHED


def costs(text):
    return estimate_work("HloModule f\n\n" + text, CHIP, DEVICES)


def entry(*lines):
    body = "\n".join(f"  {line}" for line in lines)
    return f"ENTRY %main (a: f32[]) -> f32[] {{\n{body}\n}}\n"


A = f"%a = {BIG} parameter(0)"
PART = "%p = f32[800,3200]{1,0:T(8,128)} parameter(0)"
B = f"%b = {BIG} parameter(1)"
DOT = f"{BIG} dot(%a, %b), lhs_contracting_dims={{1}}"
SOURCE = 'metadata={op_name="jit(f)/jvp(dense)/dot_general"}'


def test_an_instruction_takes_the_longer_of_its_times():
    found = costs(
        entry(A, B, f"%x = {DOT}, {SOURCE}", f"%y = {BIG} add(%a, %b)")
    )
    assert found["flops"] == PRODUCT
    assert found["moved_bytes"] == 6 * BYTES
    product = max(PRODUCT / 1e12, SUM)
    assert found["busy_seconds"] == pytest.approx(product + SUM)
    assert found["latency_seconds"] == 0
    assert found["top_operations"]["dot_general in dense"] == pytest.approx(
        product
    )


def loop(body, turns="5", size="f32[8,128]"):
    """A program with one loop, whose state is a counter and an array."""
    state = f"(s32[], {size})"
    lines = [
        f"%p = {state} parameter(0)",
        "%i = s32[] get-tuple-element(%p), index=0",
        f"%h = {size} get-tuple-element(%p), index=1",
        "%one = s32[] constant(1)",
        "%next = s32[] add(%i, %one)",
        *body,
        f"ROOT %r = {state} tuple(%next, %g)",
    ]
    inner = "\n".join(f"  {line}" for line in lines)
    return (
        f"%body (p: {state}) -> {state} {{\n{inner}\n}}\n\n"
        f"%cond (q: {state}) -> pred[] {{\n"
        f"  %q = {state} parameter(0)\n"
        "  %j = s32[] get-tuple-element(%q), index=0\n"
        f"  %n = s32[] {turns}\n"
        "  ROOT %less = pred[] compare(%j, %n), direction=LT\n}\n\n"
    ) + entry(
        f"%a = {size} parameter(0)",
        "%zero = s32[] constant(0)",
        f"%t = {state} tuple(%zero, %a)",
        f"%w = {state} while(%t), condition=%cond, body=%body, "
        'metadata={op_name="jit(f)/rnn/while"}',
    )


TANH = "%g = f32[8,128]{1,0} tanh(%h)"


def test_a_body_counts_as_often_as_it_runs():
    found = costs(loop([TANH], "constant(5)"))
    assert found["busy_seconds"] == pytest.approx(5 * MINIMUM)
    assert found["latency_seconds"] == pytest.approx(5 * MINIMUM)
    assert found["unknown_loops"] == {}


def test_loops_in_loops_multiply():
    inner, main = loop([TANH], "constant(5)").split("ENTRY")
    inner = inner.replace("%body", "%body2").replace("%cond", "%cond2")
    nested = loop(
        [
            "%z = s32[] constant(0)",
            "%t2 = (s32[], f32[8,128]) tuple(%z, %h)",
            "%w2 = (s32[], f32[8,128]) while(%t2), condition=%cond2, "
            "body=%body2",
            "%g = f32[8,128]{1,0} get-tuple-element(%w2), index=1",
        ],
        "constant(7)",
    )
    found = costs(inner + nested)
    assert found["busy_seconds"] == pytest.approx(35 * MINIMUM)


def test_of_a_loop_of_unknown_length_one_turn_is_counted_and_named():
    found = costs(loop([TANH], "get-tuple-element(%q), index=0"))
    assert found["busy_seconds"] == pytest.approx(MINIMUM)
    assert found["unknown_loops"] == {"while in rnn": pytest.approx(MINIMUM)}


def test_small_arrays_of_a_loop_stay_on_the_chip():
    size = "f32[128,512]{1,0:T(8,128)}"
    body = [f"%g = {size} tanh(%h)"]
    small = costs(loop(body, "constant(5)", size))
    # Reading and writing 262,144 bytes each, at 6.5 times the bandwidth.
    iteration = 2 * 128 * 512 * 4 / 6.5 / REACHED
    assert small["busy_seconds"] == pytest.approx(5 * iteration)
    assert small["moved_bytes"] == 0
    size = "f32[128,1024]{1,0:T(8,128)}"
    large = costs(loop([f"%g = {size} tanh(%h)"], "constant(5)", size))
    assert large["moved_bytes"] == 5 * 2 * 128 * 1024 * 4


def test_slices_of_a_loop_are_read_from_memory():
    size = "f32[8,128]"
    body = [
        "%all = f32[5000,8,128]{2,1,0} constant({...})",
        "%x = f32[1,8,128]{2,1,0} dynamic-slice(%all, %i, %i, %i)",
        "%g = f32[8,128]{1,0} bitcast(%x)",
    ]
    found = costs(loop(body, "constant(5)", size))
    assert found["moved_bytes"] == 5 * 4096


def test_a_kernel_in_a_loop_is_counted_in_each_iteration():
    def operations(scopes):
        call = (
            "%g = f32[8,128]{1,0} custom-call(%h), "
            'custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/'
            f'{scopes}/splash_mha_fwd/pallas_call"}}'
        )
        return costs(loop([call], "constant(5)"))["kernel_flops"]

    assert operations("while/body/splash_attention_10") == 5 * 2 * 10 * 2


@pytest.mark.parametrize(
    "names",
    [
        "branch_computations={%short, %long}",
        "true_computation=%long, false_computation=%short",
    ],
)
def test_of_branches_the_longest_counts(names):
    branches = "".join(
        f"%{name} (p: f32[]) -> f32[] {{\n  %p = {BIG} parameter(0)\n"
        f"  ROOT %x = {BIG} {opcode}(%p)\n}}\n\n"
        for name, opcode in (("short", "bitcast"), ("long", "negate"))
    )
    found = costs(
        branches
        + entry(
            *(A, "%c = s32[] parameter(1)"),
            f"%x = {BIG} conditional(%c, %a, %a), {names}",
        )
    )
    assert found["moved_bytes"] == 2 * BYTES


GROUPS = "replica_groups={{0,1,2,3}}"
LINKS = 0.75 * BYTES / 0.5e9
"""The time in which an array is sent over the two links of a chip."""


def test_a_synchronous_collective_is_waited_for():
    found = costs(entry(A, f"%x = {BIG} all-reduce(%a), {GROUPS}"))
    assert found["counts"] == {"all-reduce": 1}
    assert found["sent"] == {"all-reduce": BYTES}
    assert found["link_seconds"] == {"all-reduce": pytest.approx(2 * LINKS)}
    busy = 2 * BYTES / REACHED
    assert found["busy_seconds"] == pytest.approx(busy)
    assert found["waiting_seconds"] == {
        "all-reduce": pytest.approx(2 * LINKS - busy)
    }


def test_other_work_hides_an_asynchronous_collective():
    start = f"%s = ({BIG}, {BIG}) all-gather-start(%p), {GROUPS}"
    done = f"%d = {BIG} all-gather-done(%s)"
    add = f"{BIG} add(%a, %a)"
    alone = costs(entry(A, PART, start, done))
    assert alone["waiting_seconds"] == {"all-gather": pytest.approx(LINKS)}
    beside = costs(entry(A, PART, start, f"%x = {add}", done))
    busy = 2 * BYTES / REACHED
    waiting = beside["waiting_seconds"]["all-gather"]
    assert waiting == pytest.approx(LINKS - busy)
    hidden = costs(
        entry(A, PART, start, *(f"%x{k} = {add}" for k in range(3)), done)
    )
    assert hidden["waiting_seconds"] == {}
    assert hidden["link_seconds"] == {"all-gather": pytest.approx(LINKS)}


def test_two_collectives_share_the_links():
    lines = [
        f"%s{k} = ({BIG}, {BIG}) all-gather-start(%p), {GROUPS}"
        for k in range(2)
    ]
    add = f"%x = {BIG} add(%a, %a)"
    ends = [f"%d{k} = {BIG} all-gather-done(%s{k})" for k in range(2)]
    found = costs(entry(A, PART, *lines, add, *ends))
    waiting = found["waiting_seconds"]["all-gather"]
    assert waiting == pytest.approx(2 * LINKS - 2 * BYTES / REACHED)


def test_copies_beside_other_work_take_no_time_of_their_own():
    found = costs(entry(A, f"%c = ({BIG}, {BIG}) copy-start(%a)"))
    assert found["busy_seconds"] == 0
    assert found["moved_bytes"] > 0


def test_results_that_are_soon_used_again_stay_on_the_chip():
    small = "f32[128,512]{1,0:T(8,128)}"
    given = f"%a = {small} parameter(0)"
    found = costs(
        entry(given, f"%x = {small} negate(%a)", f"%y = {small} negate(%x)")
    )
    # The parameter is read, and the result is written.
    assert found["moved_bytes"] == 2 * 128 * 512 * 4
    # Programs compiled at full effort tell what is on the chip.
    marked = small.replace("T(8,128)", "T(8,128)S(1)")
    found = costs(
        entry(
            *(given, f"%x = {small} negate(%a)", f"%z = {marked} negate(%a)"),
            f"%y = {small} add(%x, %z)",
        )
    )
    assert found["moved_bytes"] == 5 * 128 * 512 * 4


class Executable:
    """A compiled program with another text."""

    def __init__(self, text):
        self._compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
        self._text = text

    def memory_analysis(self):
        return self._compiled.memory_analysis()

    def as_text(self):
        return self._text


ITSELF = (
    "%f (a: f32[8]) -> f32[8] {\n  ROOT %x = f32[8] call(), to_apply=%f\n}\n"
)
CALLS = ITSELF + entry("ROOT %y = f32[8] call(), to_apply=%f")


@pytest.mark.parametrize(
    "text",
    [
        *("", "\0" * 9, "ENTRY", entry("%x = "), entry("%x = f32[8]")[:-2]),
        entry("%x = f32[9,9]{7:T(8)} add(%x, %x)"),
        entry("%x = f32[8]{0:T(0)} copy(%x)"),
        entry(f"%x = f32[{'9' * 400}] copy(%x)"),
        entry("%x = f32[8] dot(%gone, %gone)"),
        entry("%x = f32[8] while(%a), condition=%gone, body=%gone"),
        CALLS,
    ],
)
def test_of_a_text_that_cannot_be_parsed_the_memory_is_known(text):
    found = Costs.measure(Executable(text), 1.5, CHIP, DEVICES)
    assert found.unread
    assert len(found.unread) <= 200
    assert found.argument_bytes == 4
    assert found.busy_seconds == 0


def test_computations_that_are_called_often_are_visited_once():
    def call(k):
        return f"f32[8] call(), to_apply=%f{k}"

    inner = "%f0 (a: f32[8]) -> f32[8] {\n  ROOT %z = f32[8] parameter(0)\n}\n"
    for k in range(1, 40):
        inner += (
            f"%f{k} (a: f32[8]) -> f32[8] {{\n  %x{k} = {call(k - 1)}\n"
            f"  ROOT %y{k} = {call(k - 1)}\n}}\n"
        )
    start = time.monotonic()
    costs(inner + entry(f"ROOT %x = {call(39)}"))
    assert time.monotonic() - start < 5


def test_random_bits_take_the_time_of_their_integer_operations():
    bits = "u32[3200,3200]{1,0:T(8,128)}"
    rounds = "".join(
        f"  %x{k + 1} = {bits} xor(%x{k}, %x{k})\n"
        f"  %s{k} = {bits} shift-left(%x{k}, %x{k})\n"
        for k in range(100)
    )
    fused = (
        f"%fused (p: u32[]) -> u32[] {{\n  %x0 = {bits} parameter(0)\n{rounds}"
        f"  ROOT %r = {BIG} convert(%x100)\n}}\n\n"
    )
    found = costs(
        fused
        + entry(
            f"%b = {bits} parameter(0)",
            f"ROOT %y = {BIG} fusion(%b), kind=kLoop, calls=%fused",
        )
    )
    seconds = 200 * 3200**2 / CHIP.integer_ops
    assert found["compute_seconds"] == pytest.approx(seconds)
    assert found["busy_seconds"] >= seconds


def test_random_bits_of_the_generator_of_xla_are_written():
    found = costs(
        entry(
            "%k = u32[4]{0:T(128)} parameter(0)",
            f"ROOT %x = {BIG} rng-bit-generator(%k), algorithm=rng_default",
        )
    )
    assert found["moved_bytes"] == pytest.approx(4 * 3200**2, rel=1e-3)
    seconds = found["moved_bytes"] / CHIP.memory_bandwidth
    assert found["busy_seconds"] >= seconds

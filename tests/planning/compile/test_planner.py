"""Candidates planned, of programs whose bytes are a line in their rows."""

import contextlib
import dataclasses
import math
import types

import jax
import pytest

from keras_strategies.planning.compile.compiler import Compiler
from keras_strategies.planning.compile.planner import Candidate, iter_plans
from tests.planning.made import GIB
from tests.support.slices import make_slice

pytestmark = pytest.mark.quick

DEVICES = make_slice((2, 2, 1))
LIMIT = int(15.75 * GIB)
PRODUCT = """HloModule step

ENTRY %main (a: bf16[32768,32768]) -> bf16[32768,32768] {
  %a = bf16[32768,32768]{1,0} parameter(0)
  ROOT %b = bf16[32768,32768]{1,0} dot(%a, %a), lhs_contracting_dims={1}
}
"""
INFINITE = """HloModule step

%body (p: (f32[8,128])) -> (f32[8,128]) {
  %p = (f32[8,128]) parameter(0)
  %x = f32[8,128]{1,0} get-tuple-element(%p), index=0
  %y = f32[8,128]{1,0} negate(%x)
  ROOT %r = (f32[8,128]) tuple(%y)
}

%cond (q: (f32[8,128])) -> pred[] {
  %q = (f32[8,128]) parameter(0)
  ROOT %c = pred[] custom-call(%q), custom_call_target="mine"
}

ENTRY %main (a: f32[8,128]) -> (f32[8,128]) {
  %a = f32[8,128]{1,0} parameter(0)
  %t = (f32[8,128]) tuple(%a)
  ROOT %w = (f32[8,128]) while(%t), condition=%cond, body=%body, \
metadata={op_name="jit(step)/search/while"}
}
"""
SECONDS = 2 * 32768**3 / 197e12


@dataclasses.dataclass
class Program:
    """A program that is lowered, compiled and measured."""

    needed: float
    state: float
    error: str | None
    efforts: list
    shared: float = 0.0
    text: str = PRODUCT

    def as_text(self):
        return self.text

    def compile(self, compiler_options=None):
        self.efforts.append("low" if compiler_options else "full")
        if self.error is not None:
            raise jax.errors.JaxRuntimeError(self.error)
        if not compiler_options:
            # As it is run, it needs less.
            self.needed = self.state + 0.9 * (self.needed - self.state)
        if self.needed > LIMIT:
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total "
                "memory required for HLO temporaries "
                f"({self.needed / GIB:.2f}G) exceeds available HBM (15.75G)."
            )
        return self

    def memory_analysis(self):
        return types.SimpleNamespace(
            argument_size_in_bytes=self.state,
            output_size_in_bytes=self.state,
            alias_size_in_bytes=self.state,
            temp_size_in_bytes=self.needed + self.shared - self.state,
            generated_code_size_in_bytes=0,
        )


class Step:
    """A step of 3 GiB of state, and of so many GiB for each row a replica."""

    def __init__(self, of_row, rows=4, error=None):
        self.of_row, self.rows, self._error = of_row, rows, error
        self.mesh = types.SimpleNamespace(num_replicas=4, devices=DEVICES)
        self.tokens = 128
        self.efforts, self.remat = [], None
        self.has_remat = False
        self.note, self.steps, self.logit_bytes = "", 1, 0.0
        self.shared, self.max_rows = 0.0, math.inf
        self.text = PRODUCT

    def host_bytes(self):
        return 0.0

    def lower(self, rows):
        if rows > self.max_rows:
            raise AssertionError("It is of so many rows.")
        needed = 3 * GIB + rows / len(DEVICES) * self.of_row * GIB
        return Program(
            *(needed, 3 * GIB, self._error, self.efforts),
            shared=self.shared,
            text=self.text,
        )

    def model_flops(self, rows):
        return 5e12 * rows

    def state_bytes(self):
        sizes = {"weights": 1, "slots": 1.5, "other": 0.25, "gradients": 1}
        return {name: size * GIB for name, size in sizes.items()}

    def with_remat(self):
        return self.remat


def candidate(make):
    return Candidate(
        topology="v5e:2x2", layout="replicated", devices=DEVICES, make=make
    )


def plan(*steps, effort="auto"):
    with contextlib.closing(Compiler(num_threads=2)) as compiler:
        given = [candidate(lambda step=step: step) for step in steps]
        return list(iter_plans(given, compiler, effort))


def test_a_step_that_fits_easily_is_compiled_at_low_effort_alone():
    step = Step(of_row=1)
    (row,) = plan(step)
    assert step.efforts == ["low", "low"]
    assert row.fits
    assert row.error is None
    assert not row.is_full_effort
    assert row.bytes_in_all == 4 * GIB
    assert row.max_rows == 12
    assert row.memory == {
        "weights": 1 * GIB,
        "slots": 1.5 * GIB,
        "other": 0.5 * GIB,
        "gradients": 0,
        "activations": 1 * GIB,
        "temporary": 0,
        "code": 0,
    }
    assert row.estimate.seconds == pytest.approx(SECONDS)
    used = 4 * 5e12 / 197e12 / SECONDS
    assert row.estimate.utilization == pytest.approx(used)
    assert row.tokens_per_second == pytest.approx(4 * 128 / SECONDS)


def test_near_the_limit_it_is_compiled_as_it_is_run():
    step = Step(of_row=10)
    (row,) = plan(step)
    assert sorted(step.efforts) == ["full", "low", "low"]
    assert row.is_full_effort
    assert row.bytes_in_all == 12 * GIB
    assert row.max_rows == 1


@pytest.mark.parametrize(("of_row", "is_full"), [(7, False), (7.5, True)])
def test_from_two_thirds_of_the_limit_on_it_is_near(of_row, is_full):
    (row,) = plan(Step(of_row=of_row))
    assert row.is_full_effort is is_full


def test_a_step_with_a_note_says_it():
    step = Step(of_row=1)
    step.note = "It trains nothing."
    (row,) = plan(step)
    assert row.advice.startswith("It trains nothing.")


@pytest.mark.parametrize(("of_row", "fits"), [(5, True), (30, False)])
def test_a_step_that_cannot_be_rematerialized_keeps_its_figures(of_row, fits):
    step, step.remat = Step(of_row), Step(of_row)
    step.remat.max_rows = 0
    (row,) = plan(step)
    assert row.error is None
    assert row.fits is fits
    assert "RematScope" not in row.advice


def test_what_needs_less_as_it_is_run_may_fit():
    (row,) = plan(Step(of_row=13.5))
    assert row.is_full_effort
    assert row.fits
    assert row.bytes_in_all == pytest.approx(15.15 * GIB)


@pytest.mark.parametrize(
    ("effort", "efforts"),
    [("low", ["low", "low"]), ("full", ["full", "low", "low"])],
)
def test_effort_is_as_asked_for(effort, efforts):
    step = Step(of_row=10)
    (row,) = plan(step, effort=effort)
    assert sorted(step.efforts) == efforts
    assert row.is_full_effort == (effort == "full")


@pytest.mark.parametrize("effort", ["low", "auto"])
def test_of_what_does_not_fit_rows_and_kinds_are_known(effort):
    (row,) = plan(Step(of_row=4, rows=16), effort=effort)
    assert row.fits is False
    assert row.error is None
    size = 19 if effort == "low" else 17.4
    assert row.bytes_in_all == pytest.approx(size * GIB, rel=1e-3)
    assert sum(row.memory.values()) == pytest.approx(row.bytes_in_all)
    assert row.memory["other"] == 0.25 * GIB
    assert row.memory["activations"] == pytest.approx(
        (16 if effort == "low" else 14.65) * GIB, rel=0.02
    )
    assert row.max_rows == 3
    assert row.advice.startswith("At most 3 rows per replica fit. To")


def test_a_program_that_the_compiler_takes_fits():
    step = Step(of_row=12)
    # Of which some lie where others do.
    step.shared = 3 * GIB
    (row,) = plan(step)
    assert row.is_full_effort
    assert row.bytes_in_all > row.limit_bytes
    assert row.fits
    assert row.max_rows == 1
    assert row.advice.startswith("Only 0.00 GB are left")


@pytest.mark.parametrize("effort", ["auto", "low"])
def test_low_effort_alone_takes_no_program_beyond_the_limit(effort):
    step = Step(of_row=12)
    # More than a quarter more than there is.
    step.shared = 8 * GIB
    (row,) = plan(step, effort=effort)
    assert row.is_full_effort is (effort == "auto")
    assert row.fits is (effort == "auto")


def test_a_note_about_an_error_ends_with_a_period():
    class Fixed(Step):
        def lower(self, rows):
            if rows > 8:
                raise ValueError("It wants 8 rows")
            return super().lower(rows)

    (row,) = plan(Fixed(of_row=1))
    assert "more rows raise an error: It wants 8 rows. " in f"{row.advice} "


def test_a_note_about_an_error_of_keras_has_its_cause():
    class Fixed(Step):
        def lower(self, rows):
            if rows > 8:
                raise ValueError(
                    "Exception encountered when calling LSTM.call().\n\n"
                    "\x1b[1mIt has a state for 8 rows.\x1b[0m\n\nArguments:"
                )
            return super().lower(rows)

    (row,) = plan(Fixed(of_row=1))
    cause = "when calling LSTM.call(). It has a state for 8 rows. "
    assert cause in f"{row.advice} "


def test_a_note_is_kept_when_the_step_is_lowered_again():
    class Noted(Step):
        def lower(self, rows):
            self.note = "It trains nothing."
            return super().lower(rows)

    step = Noted(of_row=1)
    step.max_rows = 4
    (row,) = plan(step, effort="full")
    assert row.is_full_effort
    assert row.advice.startswith("It trains nothing. It is unknown how many")


def test_a_step_of_an_execution_is_a_part_of_its_program():
    step = Step(of_row=1)
    step.steps, step.model_flops = 64, lambda rows: None
    (row,) = plan(step)
    assert row.estimate.seconds == pytest.approx(SECONDS / 64)
    moved = 2 * 2 * 32768**2 / 64
    assert row.estimate.memory_seconds == pytest.approx(moved / 819e9)
    assert row.top_operations == {
        "dot in the step": pytest.approx(SECONDS / 64)
    }


def test_loops_of_unknown_length_are_named():
    step = Step(of_row=1)
    step.text = INFINITE
    (row,) = plan(step)
    assert row.advice.startswith(
        "The number of iterations of a loop is unknown (while in search), so "
        "the time of one iteration is counted."
    )
    (row,) = plan(Step(of_row=1))
    assert "turns" not in row.advice


def test_a_problem_of_the_compiler_is_a_row_of_its_own():
    rows = plan(
        Step(of_row=1, error="INTERNAL: a problem\nof many lines"),
        Step(of_row=1, error="RESOURCE_EXHAUSTED: somehow"),
        Step(of_row=1),
    )
    assert [row.fits for row in rows] == [False, False, True]
    assert rows[0].error == "INTERNAL: a problem"
    assert rows[1].error == "RESOURCE_EXHAUSTED: somehow"


def test_a_candidate_that_cannot_be_made_is_a_row_of_its_own():
    def fail():
        raise ValueError("It cannot be.")

    with contextlib.closing(Compiler(num_threads=1)) as compiler:
        given = [candidate(fail), candidate(lambda: Step(of_row=1))]
        rows = list(iter_plans(given, compiler, "auto"))
    assert [row.error for row in rows] == ["It cannot be.", None]
    assert rows[0].num_devices == 4
    assert rows[0].limit_bytes == LIMIT


def test_a_step_that_cannot_have_more_rows_keeps_its_figures():
    step = Step(of_row=1)
    step.max_rows = 4
    (row,) = plan(step)
    assert row.bytes_in_all == 4 * GIB
    assert row.max_rows is None
    assert row.estimate.seconds == pytest.approx(SECONDS)
    assert "more rows raise an error: It is of so many rows." in row.advice


@pytest.mark.parametrize("of_row", [0, 1e-7])
def test_rows_that_need_hardly_any_bytes_have_no_maximum(of_row):
    (row,) = plan(Step(of_row=of_row))
    assert row.max_rows is None
    assert row.error is None

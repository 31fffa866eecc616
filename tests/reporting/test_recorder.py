"""The arithmetic of windows and phases, with a clock that tests set."""

import numpy as np
import pytest

from keras_strategies.names.phases import (
    CALLBACKS,
    DEVICE,
    EVALUATE,
    INPUT,
    PROGRAM,
    READ,
    REPORT,
    SAVE,
)
from keras_strategies.reporting.figures import compute_figures
from keras_strategies.reporting.recorder import StepRecorder
from keras_strategies.spmd.batches import Execution, Segment


class Clock:
    """A clock that stands still between `wait`s."""

    seconds = 0.0

    def __call__(self):
        return self.seconds


class Output:
    """An output of a program that ends at a time."""

    def __init__(self, clock, ends):
        self._clock, self._ends = clock, ends

    def is_deleted(self):
        return False

    def is_ready(self):
        return self._clock.seconds >= self._ends

    def block_until_ready(self):
        self._clock.seconds = max(self._clock.seconds, self._ends)
        return self


class Loop:
    """A training loop that starts programs of two rows."""

    def __init__(self):
        self.clock = Clock()
        self.recorder = StepRecorder(clock=self.clock)
        self._free_at = 0.0

    def spend(self, name, seconds, result=None):
        self.recorder.begin(name)
        self.clock.seconds += seconds
        self.recorder.end(name, result)

    def step(self, *, input_s=0.0, call_s=0.0, device_s=0.0, python_s=0.0):
        data = (np.zeros((2, 3)), np.zeros((2, 1)))
        segment = Segment(data=data, rows=2, steps=1)
        self.spend(INPUT, input_s, Execution(segments=(segment,)))
        self.recorder.begin(PROGRAM)
        self.clock.seconds += call_s
        start = max(self._free_at, self.clock.seconds)
        self._free_at = start + device_s
        outputs = [Output(self.clock, self._free_at)]
        self.recorder.end(PROGRAM, (outputs,))
        self.clock.seconds += python_s

    def finish(self):
        """Waits for the devices, as at an epoch's end."""
        self.recorder.begin(DEVICE)
        self.clock.seconds = max(self.clock.seconds, self._free_at)
        self.recorder.end(DEVICE, None)
        self.recorder.wait()
        figures = compute_figures(self.recorder, self.clock.seconds)
        return figures, figures["shares"]


def test_steps_of_a_loop_that_waits_for_input():
    loop = Loop()
    for _ in range(11):
        loop.step(input_s=0.03, call_s=0.005, device_s=0.004, python_s=0.005)
    speed, shares = loop.finish()
    assert speed["step_ms"]["median"] == pytest.approx(40, rel=0.02)
    assert shares["input"] == pytest.approx(0.75, abs=0.03)
    assert shares["program"] == pytest.approx(0.125, abs=0.03)
    assert shares["python"] == pytest.approx(0.125, abs=0.03)
    assert loop.recorder.ahead == 0


def test_steps_of_a_loop_that_runs_ahead_get_the_mean():
    loop = Loop()
    for _ in range(50):
        loop.step(input_s=0.005, call_s=0.001, device_s=0.02, python_s=0.004)
    speed, shares = loop.finish()
    # The devices were busy while the loop read batches and ran Python.
    assert speed["step_ms"]["median"] == pytest.approx(20, rel=0.02)
    assert speed["step_ms"]["mean"] == pytest.approx(20, rel=0.02)
    assert speed["rows_per_sec"] == pytest.approx(100, rel=0.02)
    assert shares["program"] == pytest.approx(1.0, abs=0.01)
    assert loop.recorder.ahead == 49


def test_a_save_waits_for_steps_that_are_no_part_of_it():
    loop = Loop()
    for _ in range(10):
        loop.step(call_s=0.001, device_s=0.02)
        loop.recorder.begin(CALLBACKS)
        loop.spend(SAVE, 0.01, 7)
        loop.recorder.end(CALLBACKS, None)
    speed, shares = loop.finish()
    assert speed["step_ms"]["median"] == pytest.approx(21, rel=0.03)
    assert shares["save"] == pytest.approx(0.33, abs=0.03)
    assert shares["callbacks"] == pytest.approx(0.0, abs=1e-9)
    assert loop.recorder.saves == 10


def test_evaluations_are_no_part_of_steps():
    loop = Loop()
    for _ in range(6):
        loop.step(call_s=0.01, python_s=0.01)
        loop.recorder.begin(EVALUATE)
        # What an evaluation waits for is its own.
        loop.spend(DEVICE, 0.02)
        loop.recorder.end(EVALUATE, None)
    speed, shares = loop.finish()
    assert speed["step_ms"]["mean"] == pytest.approx(20, rel=0.01)
    assert shares["evaluate"] == pytest.approx(0.5, abs=0.05)


def test_compilations_are_no_part_of_steps_or_phases():
    loop = Loop()
    listener = loop.recorder._hear
    loop.step(call_s=0.01)
    for _ in range(4):
        loop.recorder.begin(CALLBACKS)
        loop.clock.seconds += 3.0
        # The trace of a program that another calls is a part of its trace.
        trace = "/jax/core/compile/jaxpr_trace_duration"
        listener(trace, 1.0, fun_name="inner")
        listener(trace, 3.0, fun_name="outer")
        loop.recorder.end(CALLBACKS, None)
        loop.step(call_s=0.01)
    speed, shares = loop.finish()
    made = compute_figures(loop.recorder, 1.0)["compilations"]
    assert made["seconds"] == pytest.approx(12.0)
    assert shares["callbacks"] == pytest.approx(0.0, abs=1e-9)
    assert speed["step_ms"]["mean"] < 25


def test_the_work_of_the_report_is_no_part_of_callbacks():
    loop = Loop()
    for _ in range(4):
        loop.step(call_s=0.01)
        loop.recorder.begin(CALLBACKS)
        loop.spend(REPORT, 3.0)
        loop.recorder.end(CALLBACKS, None)
    speed, shares = loop.finish()
    assert shares["callbacks"] == pytest.approx(0.0, abs=1e-9)
    assert shares["program"] == pytest.approx(1.0)
    assert speed["step_ms"]["mean"] == pytest.approx(10)


def test_local_time_is_that_outside_of_programs_and_of_own_input():
    loop = Loop()
    recorder = loop.recorder
    assert recorder.measure_local() == {}
    recorder._hear(
        "/jax/core/compile/backend_compile_duration", 7.0, fun_name="step"
    )
    for _ in range(11):
        recorder.begin(READ)
        loop.clock.seconds += 0.005
        recorder.end(READ, None)
        loop.step(input_s=0.02, call_s=0.03, python_s=0.01)
    found = recorder.measure_local()
    assert found["steps"] == pytest.approx(10, abs=1)
    assert found["steps_s"] == pytest.approx(0.65, abs=0.03)
    # The loop waited 20 ms a step, but for its own rows only 5 ms.
    assert found["input_s"] == pytest.approx(0.05, abs=0.01)
    assert found["local_s"] == pytest.approx(0.05 + 0.15, abs=0.03)


def test_quantiles_of_steps_that_take_many_times():
    loop = Loop()
    loop.step()
    for ms in range(1, 101):
        loop.step(python_s=ms / 1e3)
    speed, _ = loop.finish()
    assert speed["step_ms"]["median"] == pytest.approx(50, rel=0.03)
    assert speed["step_ms"]["p95"] == pytest.approx(95, rel=0.01)
    # Times have three digits, so their number is bounded.
    for number in range(5000):
        loop.step(python_s=1 + number / 1e5)
    assert len(loop.recorder.times) < 300

"""Times of steps, computed by hand."""

import dataclasses

import pytest

from keras_strategies.planning.compile.estimates import (
    HOST_SECONDS,
    describe_unknown,
    estimate,
    write_notes,
)
from keras_strategies.tpu.chips import Chip
from tests.planning.made import figures

pytestmark = pytest.mark.quick

CHIP = Chip(
    name="small",
    memory_bytes=1000,
    flops=100.0,
    memory_bandwidth=10.0,
    link_bandwidth=5.0,
    num_links=4,
    on_chip_bytes=10,
)
FIGURES = figures(
    flops=300.0,
    compute_seconds=3.0,
    moved_bytes=20.0,
    busy_seconds=3.5,
    latency_seconds=0.5,
    link_seconds={"all-reduce": 3.0, "all-gather": 1.0},
    waiting_seconds={"all-reduce": 2.0, "all-gather": 1.0},
)


def test_bounds_are_what_is_done_by_what_a_chip_does_in_a_second():
    found = estimate(FIGURES, CHIP, model_flops=150.0)
    assert found.bounds == {
        "compute": 3.0,
        "memory": 2.0,
        "links": 4.0,
        "latency": 0.5,
        "host": HOST_SECONDS,
    }


def test_a_step_is_busy_and_waits_for_sums():
    # Gathers run beside other work in programs for training.
    found = estimate(FIGURES, CHIP, model_flops=150.0)
    assert found.seconds == 3.5 + 2.0
    assert found.utilization == pytest.approx(1.5 / 5.5)


def test_a_schedule_for_training_tells_what_is_waited_for():
    scheduled = dataclasses.replace(
        FIGURES, waiting_seconds={"all-reduce": 1.5, "all-gather": 0.25}
    )
    found = estimate(FIGURES, CHIP, 150.0, scheduled=scheduled)
    assert found.seconds == 3.5 + 1.75


def test_no_step_is_faster_than_its_largest_bound():
    hidden = dataclasses.replace(FIGURES, busy_seconds=0.0, waiting_seconds={})
    assert estimate(hidden, CHIP, None).seconds == 4.0


def test_a_model_whose_operations_are_not_known_has_no_utilization():
    found = estimate(FIGURES, CHIP, model_flops=None)
    assert found.utilization is None


def test_no_step_is_faster_than_the_host_that_starts_it():
    found = estimate(figures(), CHIP, model_flops=1e-3)
    assert found.seconds == found.bounds["host"] == HOST_SECONDS
    # Several steps of a program are started at once.
    found = estimate(figures(), CHIP, 1e-3, steps=4)
    assert found.seconds == HOST_SECONDS / 4


def test_steps_of_a_program_share_its_costs():
    many = {
        field.name: getattr(FIGURES, field.name) * 4
        for field in dataclasses.fields(FIGURES)
        if isinstance(getattr(FIGURES, field.name), float)
    }
    for name in ("link_seconds", "waiting_seconds"):
        many[name] = {k: 4 * n for k, n in getattr(FIGURES, name).items()}
    found = estimate(figures(**many), CHIP, 150.0, steps=4)
    one = estimate(FIGURES, CHIP, 150.0)
    assert found == dataclasses.replace(one, host_seconds=HOST_SECONDS / 4)


def test_operations_of_a_loop_of_unknown_length_are_those_of_the_model():
    found = estimate(figures(flops=10.0), CHIP, model_flops=1000.0)
    assert found.compute_seconds == 10.0


def test_times_of_a_program_that_cannot_be_parsed_are_unknown():
    unread = dataclasses.replace(FIGURES, unread="KeyError: 'x'")
    assert estimate(unread, CHIP, 150.0) is None
    assert "cannot parse (KeyError: 'x')" in describe_unknown(unread)
    assert describe_unknown(FIGURES) == ""
    # Waiting is then taken from the program at low effort.
    found = estimate(FIGURES, CHIP, 150.0, scheduled=unread)
    assert found == estimate(FIGURES, CHIP, 150.0)


def test_of_gpus_a_plan_tells_what_it_assumes():
    (only,) = write_notes(["v5e:4x4"])
    assert write_notes(["h100:8"])[0] == only
    assert "cuDNN" in write_notes(["v5e:4x4", "h100:8"])[1]
    assert "network" in write_notes(["b200:2x8"])[1]


def test_operations_take_the_time_of_their_dtypes():
    slow = dataclasses.replace(FIGURES, compute_seconds=9.0)
    assert estimate(slow, CHIP, model_flops=150.0).compute_seconds == 9.0


def test_slots_on_the_host_are_moved_there_and_back():
    chip = dataclasses.replace(CHIP, host_bandwidth=4.0)
    found = estimate(FIGURES, chip, model_flops=150.0, host_bytes=20.0)
    assert found.transfer_seconds == found.bounds["PCIe"] == 10.0
    assert found.seconds == 3.5 + 2.0 + 10.0

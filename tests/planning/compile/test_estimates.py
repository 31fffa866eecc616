"""Times of steps, computed by hand."""

import dataclasses

import pytest

from keras_strategies.planning.compile.chips import Chip, find_chip, find_memory
from keras_strategies.planning.compile.estimates import estimate
from tests.planning.made import figures
from tests.support.slices import Tpu

pytestmark = pytest.mark.quick

CHIP = Chip(
    name="small",
    memory_bytes=1000,
    flops=100.0,
    memory_bandwidth=10.0,
    link_bandwidth=5.0,
    source="",
)
FIGURES = figures(
    flops=300.0,
    argument_bytes=8.0,
    output_bytes=4.0,
    sent={"all-reduce": 10.0, "all-gather": 5.0},
)


def test_bounds_are_what_is_done_by_what_a_chip_does_in_a_second():
    found = estimate(FIGURES, CHIP, model_flops=150.0)
    # A sum goes round twice; the state is read and written.
    assert found.bounds == {"compute": 3.0, "memory": 2.0, "links": 5.0}
    assert found.seconds == 5.0
    assert found.utilization == found.most_utilization == 0.3


def test_xla_s_own_estimate_is_taken_where_it_is_longer():
    slow = dataclasses.replace(FIGURES, optimal_seconds=6.0)
    found = estimate(slow, CHIP, model_flops=150.0)
    assert found.seconds == 6.0
    assert found.utilization == 0.25
    assert found.most_utilization == 0.3
    fast = dataclasses.replace(FIGURES, optimal_seconds=1.0)
    assert estimate(fast, CHIP, None).seconds == 5.0


def test_a_model_whose_operations_are_not_known_has_no_utilization():
    found = estimate(FIGURES, CHIP, model_flops=None)
    assert found.utilization is None
    assert found.most_utilization is None


def test_no_step_is_faster_than_its_launch():
    found = estimate(figures(), CHIP, model_flops=1e-3)
    assert found.bounds == {"compute": 1e-5, "memory": 0.0, "links": 0.0}
    assert found.seconds == 1e-4
    assert found.utilization == pytest.approx(0.1)


def test_a_step_of_an_execution_does_not_wait_for_the_others_batches():
    # Those have room around them, too, as the chip lays them out.
    many = dataclasses.replace(FIGURES, argument_bytes=8.0 + 63 * 5.0)
    found = estimate(many, CHIP, 150.0, steps=64, step_bytes=8.0)
    assert found == estimate(FIGURES, CHIP, 150.0)
    # They are launched at once.
    found = estimate(figures(), CHIP, 1e-3, steps=4)
    assert found.seconds == 1e-4 / 4


def test_operations_of_a_loop_are_those_of_all_its_turns():
    found = estimate(figures(flops=10.0), CHIP, model_flops=1000.0)
    assert found.compute_seconds == 10.0


@pytest.mark.parametrize(
    ("kind", "name", "gib"),
    [
        ("TPU v4", "v4", 30.75),
        ("TPU v5 lite", "v5e", 15.75),
        ("TPU v5", "v5p", 95.74),
        ("TPU v6 lite", "v6e", 31.25),
        ("TPU7x", "tpu7x", 94.75),
    ],
)
def test_chips_by_their_kind(kind, name, gib):
    device = Tpu(id=0, process_index=0, coords=(0, 0, 0), device_kind=kind)
    chip = find_chip(device)
    assert chip is not None
    assert chip.name == name
    assert find_memory(device) == chip.memory_bytes == int(gib * 2**30)


def test_a_device_that_is_not_known_has_no_figures():
    device = Tpu(id=0, process_index=0, coords=(0, 0, 0), device_kind="TPU v9")
    assert find_chip(device) is None

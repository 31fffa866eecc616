"""Processes that create different variables: all name the first of them."""

import re

import pytest

from tests.multi_process.variables import KINDS
from tests.support.jobs import run_and_list_results, values_of, values_of_each

pytestmark = pytest.mark.multi_process

DIFFER = "multi_process.variables:differ"
HAS_CHIEFS_VALUES = "multi_process.variables:has_chiefs_values"
# What all processes say about processes 0 and 1.
SAID = {
    "optimizer": ("'sgd/iteration'", "'adam/iteration'"),
    "momentum": ("no further", "first_kernel_momentum'"),
    "use_ema": ("_kernel_momentum'", "_kernel_average'"),
    "amsgrad": ("no further", "_kernel_velocity_hat'"),
    "schedule": ("/learning_rate'", "'loss/total'"),
    "frozen": ("/first/kernel'", "/first/kernel'"),
    "variable of the chief": ("'extra'", "/first/kernel'"),
    "built optimizer": ("preparing the data", "kernel_momentum'"),
    "metric": ("_kernel_momentum'", "'mean_absolute_error"),
    "width": ("shape (4, 4)", "shape (4, 8)"),
    "dtype": ("(4, 4), float32", "(4, 4), bfloat16"),
    "initializer": ("HeNormal", "Zeros"),
    "number of layers": ("/last/kernel'", "/more/kernel'"),
    "order of layers": ("/second/kernel'", "/gamma'"),
    "dropout": ("/first/kernel'", "seed_generator_state'"),
}


def assert_named(kind, texts):
    """All processes say the same, with the variables of all."""
    assert len(set(texts)) == 1
    for part in ("must create the same variables", *SAID[kind]):
        assert part in texts[0]
    assert re.search(r"process(es)? 1", texts[0])


def assert_all_named(found):
    for kind, kind_values in zip(KINDS, zip(*found, strict=True), strict=True):
        assert_named(kind, [text for text, _ in kind_values])
        assert all(seconds < 15 for _, seconds in kind_values)


@pytest.fixture(scope="module")
def found():
    """What the calls return in each of two processes."""
    return values_of_each(2, (DIFFER, KINDS), (HAS_CHIEFS_VALUES,))


def test_all_processes_name_the_first_variable_that_differs(found):
    assert_all_named(found[0])


@pytest.mark.slow
def test_three_processes_name_the_first_variable_that_differs():
    assert_all_named(values_of(DIFFER, 3, KINDS, devices=1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_processes_end_with_the_cause(kind):
    call = ("multi_process.variables:fail", kind)
    for result in run_and_list_results(2, call, devices=1, must_succeed=False):
        assert result.returncode in (70, 71), result.output
        assert "must create the same variables" in result.output
        assert "Gloo AllGather failed" not in result.output


def test_equal_variables_have_the_chiefs_values(found):
    first, second = found[1]
    assert first == second
    assert first[2] == [2.5, 2.5]


def test_random_values_are_sent_without_waiting():
    count = "multi_process.variables:count_waits"
    draw = "multi_process.variables:draw_differently"
    *counted, drawn = values_of_each(
        2, (count, 300, 3), (count, 300, 10_000), (draw,), devices=1
    )
    for first, second in counted:
        assert first == second
        # After 256 variables, and at the end of the scope.
        assert first[0] == 2
    # What processes draw from the same seed is compared, too.
    assert len(set(drawn)) == 1
    for part in ("'drawn'", "RandomNormal(mean=0.0"):
        assert part in drawn[0]


@pytest.mark.slow
@pytest.mark.parametrize("alone", [0, 1])
def test_an_optimizer_built_outside_of_scopes_is_named(alone):
    call = ("multi_process.variables:build_outside", alone)
    for result in run_and_list_results(2, call, devices=1, must_succeed=False):
        assert result.returncode == 72, result.output
        assert "assign values in the same order" in result.output
        assert f"process {alone} (at variables.py:" in result.output


@pytest.mark.parametrize("alone", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_variable_created_between_two_steps_is_named(alone):
    call = ("multi_process.variables:create_between_steps", alone)
    for result in run_and_list_results(2, call, devices=1, must_succeed=False):
        assert result.returncode == 72, result.output
        assert "must create the same variables" in result.output
        assert "'extra' of shape (3,)" in result.output

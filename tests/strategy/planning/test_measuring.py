"""Lines through the figures of a few programs."""

import pytest

from keras_strategies.strategy.planning.figures import DoesNotFit
from keras_strategies.strategy.planning.measuring import (
    BLOCK_OVERHEAD,
    Line,
    bytes_needed,
    extrapolated,
    grown,
)
from tests.strategy.planning.made import figures

pytestmark = pytest.mark.quick


def line(first, second, rows=(8, 32)):
    return Line(rows=rows, figures=(first, second), is_full=False, blocks=None)


def sized(size):
    return figures(temporary_bytes=size)


@pytest.mark.parametrize(
    ("first", "second", "most"),
    [
        (sized(100.0), sized(340.0), 18.0),
        (sized(200.0), sized(320.0), 8.0),
        # More than the limit with the rows that were asked for.
        (sized(240.0), sized(480.0), 4.0),
        (sized(100.0), DoesNotFit("", 340.0), 18.0),
        (DoesNotFit("", 240.0), DoesNotFit("", 480.0), 4.0),
        # Nothing says how it grows.
        (sized(100.0), sized(100.0), None),
        (sized(100.0), sized(90.0), None),
        (sized(100.0), DoesNotFit("", None), None),
        (DoesNotFit("", None), DoesNotFit("", 480.0), None),
    ],
)
def test_the_most_rows_by_the_line(first, second, most):
    assert line(first, second).most_rows(200.0) == most


def test_rows_may_be_fewer_than_none():
    assert line(sized(1000.0), sized(1024.0)).most_rows(200.0) == -792


def test_bytes_of_what_does_not_fit_are_as_the_compiler_says():
    assert bytes_needed(sized(7.0)) == 7.0
    assert bytes_needed(DoesNotFit("", 8.0)) == 8.0
    assert bytes_needed(DoesNotFit("", None)) is None


def test_deep_models_are_on_the_line_of_two_short_ones():
    few = figures(argument_bytes=20.0, flops=50.0, counts={"all-gather": 4})
    many = figures(argument_bytes=30.0, flops=90.0, counts={"all-gather": 8})
    found = extrapolated(few, many, (2, 4, 32), (0.0, 0.0), is_all=False)
    assert found.argument_bytes == 20.0 + 30 * 5
    assert found.flops == 50.0 + 30 * 20
    assert found.counts == {"all-gather": 64}


@pytest.mark.parametrize(
    ("of_few", "of_many", "block_bytes", "is_all", "expected"),
    [
        # Each block adds 3, or what it adds at least.
        (10.0, 16.0, 1.0, False, 16.0 + 28 * 3),
        (10.0, 16.0, 5.0, False, 16.0 + 28 * 5),
        # Other layers hide what blocks need.
        (10.0, 10.0, 2.0, False, 10.0 + 28 * 2),
        (10.0, 8.0, 0.0, False, 8.0),
        # It adds between 1 and 2 MB, and room for small arrays.
        (10.0, 26.0, 1.0, True, 26.0 + 28 * (2 + BLOCK_OVERHEAD / 1e6)),
        (10.0, 13.0, 1.0, True, 13.0 + 28 * 1.5),
        (10.0, 8.0, 1.0, True, 10.0 + 28),
    ],
)
def test_blocks_add_what_they_keep(
    of_few, of_many, block_bytes, is_all, expected
):
    """Sizes in MB."""
    few, many = sized(of_few * 1e6), sized(of_many * 1e6)
    each = block_bytes * 1e6, 2 * block_bytes * 1e6
    found = extrapolated(few, many, (2, 4, 32), each, is_all=is_all)
    assert found.temporary_bytes == pytest.approx(expected * 1e6)


def test_outcomes_grow_by_the_bytes_that_are_known():
    found = grown(sized(50.0), sized(60.0), sized(90.0))
    assert bytes_needed(found) == 80.0
    misfit = DoesNotFit("", 55.0)
    for others in (
        (sized(60.0), sized(90.0)),
        (sized(60.0), DoesNotFit("", 90.0)),
        (DoesNotFit("", 60.0), DoesNotFit("", 90.0)),
    ):
        assert bytes_needed(grown(misfit, *others)) == 85.0
    # The compiler did not say.
    assert grown(misfit, sized(60.0), DoesNotFit("", None)) is misfit
    silent = DoesNotFit("", None)
    assert grown(silent, sized(60.0), sized(90.0)) is silent

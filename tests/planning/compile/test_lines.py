"""Lines through the figures of a few programs."""

import pytest

from keras_strategies.planning.compile import lines
from keras_strategies.planning.compile.compiler import DoesNotFit
from tests.planning.made import figures

pytestmark = pytest.mark.quick


def line(first, second, rows=(8, 32)):
    return lines.Line(rows=rows, figures=(first, second), is_full=False)


def sized(size):
    return figures(temporary_bytes=size)


@pytest.mark.parametrize(
    ("first", "second", "maximum"),
    [
        (sized(100.0), sized(340.0), 18.0),
        (sized(200.0), sized(320.0), 8.0),
        # More than the limit with the rows that were asked for.
        (sized(240.0), sized(480.0), 4.0),
        (sized(100.0), DoesNotFit("", 340.0), 18.0),
        (DoesNotFit("", 240.0), DoesNotFit("", 480.0), 4.0),
        # The bytes grow faster than the rows.
        (DoesNotFit("", 800.0), DoesNotFit("", 4000.0), 2.0),
        # Nothing says how it grows.
        (sized(100.0), sized(100.0), None),
        (sized(100.0), sized(90.0), None),
        (sized(100.0), DoesNotFit("", None), None),
        (DoesNotFit("", None), DoesNotFit("", 480.0), None),
    ],
)
def test_the_most_rows_by_the_line(first, second, maximum):
    assert line(first, second).find_rows_at(200.0) == maximum


def test_rows_may_be_fewer_than_none():
    assert line(sized(1000.0), sized(1024.0)).find_rows_at(200.0) == -792


def test_bytes_of_what_does_not_fit_are_as_the_compiler_says():
    assert lines.get_bytes(sized(7.0)) == 7.0
    assert lines.get_bytes(DoesNotFit("", 8.0)) == 8.0
    assert lines.get_bytes(DoesNotFit("", None)) is None


def test_outcomes_grow_by_the_bytes_that_are_known():
    found = lines.add_growth(sized(50.0), sized(60.0), sized(90.0))
    assert lines.get_bytes(found) == 80.0
    misfit = DoesNotFit("", 55.0)
    for others in (
        (sized(60.0), sized(90.0)),
        (sized(60.0), DoesNotFit("", 90.0)),
        (DoesNotFit("", 60.0), DoesNotFit("", 90.0)),
    ):
        assert lines.get_bytes(lines.add_growth(misfit, *others)) == 85.0
    # The compiler did not say.
    assert lines.add_growth(misfit, sized(60.0), DoesNotFit("", None)) is misfit
    silent = DoesNotFit("", None)
    assert lines.add_growth(silent, sized(60.0), sized(90.0)) is silent


FEW = figures(
    argument_bytes=10.0,
    output_bytes=1.0,
    temporary_bytes=5.0,
    flops=100.0,
    counts={"all-reduce": 2},
    sent={"all-reduce": 8.0},
    compile_seconds=1.0,
)
MANY = figures(
    argument_bytes=16.0,
    output_bytes=1.0,
    temporary_bytes=4.0,
    flops=180.0,
    counts={"all-reduce": 2, "all-gather": 4},
    sent={"all-reduce": 8.0, "all-gather": 6.0},
    compile_seconds=2.0,
)


def test_bytes_in_all_are_of_arguments_outputs_and_temporaries():
    assert FEW.bytes_in_all == 16.0


def test_figures_grow_by_the_bytes_of_others_alone():
    found = lines.add_growth(MANY, FEW, figures(argument_bytes=13.0, flops=1.0))
    assert found.argument_bytes == 19.0
    assert found.output_bytes == 0.0
    assert found.temporary_bytes == -1.0
    assert found.flops == MANY.flops
    assert found.counts == MANY.counts


@pytest.mark.parametrize("edge", [0, 1, 2, 7, 14, 100, 11_156, 436_000])
@pytest.mark.parametrize("guess", [0, 1, 13, 100, 9_000, 500_000])
@pytest.mark.parametrize("is_told", [True, False])
def test_the_edge_is_found(edge, guess, is_told):
    tries = []

    def fits(rows):
        tries.append(rows)
        # Steps, as arrays have whole tiles, and what is there without rows.
        needed = 500.0 + 8 * (rows // 8) + 3 * rows
        limit_rows = edge
        return rows <= limit_rows, needed if is_told else None

    limit = 500.0 + 8 * (edge // 8) + 3 * edge
    assert lines.find_max_rows(guess, limit, fits, 60) == (edge, True)
    assert len(set(tries)) == len(tries)
    if is_told and guess and edge:
        assert len(tries) <= 24


def test_it_ends_where_everything_fits():
    rows, is_seen = lines.find_max_rows(5, 1e9, lambda rows: (True, 1.0), 24)
    assert rows == 2**24
    assert not is_seen


def test_it_ends_after_so_many_tries():
    def fits(rows):
        return rows <= 1000, None

    rows, is_seen = lines.find_max_rows(3000, 1.0, fits, 3)
    assert rows <= 1000
    assert not is_seen

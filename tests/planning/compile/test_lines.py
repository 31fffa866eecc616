"""Lines through the figures of a few programs."""

import concurrent.futures
import dataclasses
import math

import pytest

from keras_strategies.planning.compile import lines
from keras_strategies.planning.compile.compiler import DoesNotFit
from tests.planning.made import figures
from tests.support.gpus import make_hosts

pytestmark = pytest.mark.quick


def line(first, second, rows=(8, 32)):
    return lines.Line(
        rows=rows, figures=(first, second), is_full=False, blocks=None
    )


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
        # The bytes grow faster than the rows.
        (DoesNotFit("", 800.0), DoesNotFit("", 4000.0), 2.0),
        # Nothing says how it grows.
        (sized(100.0), sized(100.0), None),
        (sized(100.0), sized(90.0), None),
        (sized(100.0), DoesNotFit("", None), None),
        (DoesNotFit("", None), DoesNotFit("", 480.0), None),
    ],
)
def test_the_most_rows_by_the_line(first, second, most):
    assert line(first, second).find_rows_at(200.0) == most


def test_rows_may_be_fewer_than_none():
    assert line(sized(1000.0), sized(1024.0)).find_rows_at(200.0) == -792


def test_bytes_of_what_does_not_fit_are_as_the_compiler_says():
    assert lines.get_bytes(sized(7.0)) == 7.0
    assert lines.get_bytes(DoesNotFit("", 8.0)) == 8.0
    assert lines.get_bytes(DoesNotFit("", None)) is None


def test_deep_models_are_on_the_line_of_two_short_ones():
    few = figures(argument_bytes=20.0, flops=50.0, counts={"all-gather": 4})
    many = figures(argument_bytes=30.0, flops=90.0, counts={"all-gather": 8})
    found = lines.extrapolate(few, many, (2, 4, 32), (0.0, math.inf))
    assert found.argument_bytes == 20.0 + 30 * 5
    assert found.flops == 50.0 + 30 * 20
    assert found.counts == {"all-gather": 64}


@pytest.mark.parametrize(
    ("of_few", "of_many", "block_bytes", "expected"),
    [
        # Each block adds 3, or what it adds at least.
        (10.0, 16.0, (1.0, math.inf), 16.0 + 28 * 3),
        (10.0, 16.0, (5.0, math.inf), 16.0 + 28 * 5),
        # Other layers hide what blocks need.
        (10.0, 10.0, (2.0, math.inf), 10.0 + 28 * 2),
        (10.0, 8.0, (0.0, math.inf), 8.0),
        # It adds between 1 and 2.
        (10.0, 16.0, (1.0, 2.0), 16.0 + 28 * 2),
        (10.0, 13.0, (1.0, 2.0), 13.0 + 28 * 1.5),
        (10.0, 8.0, (1.0, 2.0), 10.0 + 28),
    ],
)
def test_blocks_add_what_they_keep(of_few, of_many, block_bytes, expected):
    few, many = sized(of_few), sized(of_many)
    found = lines.extrapolate(few, many, (2, 4, 32), block_bytes)
    assert found.temporary_bytes == expected


class Blocks:
    """A step of 32 rematerialized blocks; at once, of what was noted."""

    blocks = range(32)
    keeps_nothing_else = True

    def __init__(self, sizes):
        self.sizes = sizes

    def lower(self, rows, blocks):
        return blocks

    def block_bytes(self, rows):
        return 1e6, 3e6

    def submit(self, blocks, devices, *, is_full):
        return _done(sized(self.sizes[blocks]))


@pytest.mark.parametrize(
    ("limit", "expected", "blocks"),
    [
        # Of 4 to 8 blocks it grew by 20 MB: at most by 5.5 a block.
        (None, 40e6 + 24 * 5e6, (4, 8, 32)),
        (200e6, 40e6 + 24 * 5e6, (4, 8, 32)),
        # It does not fit if blocks add as little as they can.
        (50e6, 40e6 + 24e6, (4, 8, 32)),
        # Between the two the model itself is compiled.
        (100e6, 90e6, None),
    ],
)
def test_the_least_of_short_models_decides_what_does_not_fit(
    limit, expected, blocks
):
    step = Blocks({4: 20e6, 8: 40e6, None: 90e6})
    measuring = lines.Measuring(step, [], step, [4, 16], limit=limit)
    assert lines.get_bytes(measuring.wait()[0]) == expected
    assert measuring.blocks == blocks


@pytest.mark.parametrize(
    ("count", "limit", "expected", "blocks"),
    [
        # From 8 to 16 blocks it grows by 5 MB a block, more than they keep.
        (32, 200e6, 80e6 + 16 * 5e6, (8, 16, 32)),
        (32, 100e6, 90e6, None),
        (32, 90e6, 80e6 + 16e6, (8, 16, 32)),
        (31, 200e6, 90e6, None),
    ],
)
def test_on_gpus_blocks_may_add_more_than_they_keep(
    count, limit, expected, blocks
):
    step = Blocks({8: 40e6, 16: 80e6, None: 90e6})
    step.blocks = range(count)
    measuring = lines.Measuring(
        step, make_hosts(1, 8), step, [4, 16], limit=limit
    )
    assert lines.get_bytes(measuring.wait()[0]) == expected
    assert measuring.blocks == blocks


@pytest.mark.parametrize(
    ("limit", "sizes"),
    [
        # By what blocks add at most both fit.
        (1200e6, (70e6 + 24 * 12.5e6, 140e6 + 24 * 16.5e6)),
        # The first one does not, and blocks are to add the least in both.
        (80e6, (70e6 + 24e6, 140e6 + 4 * 24e6)),
        # Between the two the model itself is compiled, and grows by the least.
        (100e6, (90e6, 90e6 + 70e6 + 3 * 24e6)),
    ],
)
def test_both_numbers_of_rows_are_by_one_rule(limit, sizes):
    step = Blocks({4: 20e6, 8: 70e6, None: 90e6})
    step.lower = lambda rows, blocks: (rows, blocks)
    step.submit = lambda program, devices, is_full: _done(
        # Four times the rows need twice as much, and more of each block.
        sized(step.sizes[program[1]] * (2 if program[0] == 16 else 1))
    )
    step.block_bytes = lambda rows: (rows / 4 * 1e6, 10e6 + rows / 4 * 1e6)
    outcomes = lines.Measuring(step, [], step, [4, 16], limit=limit).wait()
    assert tuple(map(lines.get_bytes, outcomes)) == sizes


def test_a_part_that_does_not_fit_is_extrapolated_too():
    step = Blocks({4: 20e6, 8: 40e6})
    step.submit = lambda blocks, devices, is_full: _done(
        DoesNotFit("", step.sizes[blocks])
    )
    (outcome,) = lines.Measuring(step, [], step, [4], limit=30e6).wait()
    assert outcome.needed == 40e6 + 24 * 5e6
    assert isinstance(outcome, DoesNotFit)


def _done(outcome):
    done = concurrent.futures.Future()
    done.set_result(outcome)
    return done


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


def test_figures_are_combined_one_by_one():
    found = lines.combine(FEW, -1.0, MANY, 2.0)
    assert found.argument_bytes == 22.0
    assert found.output_bytes == 1.0
    assert found.temporary_bytes == 3.0
    assert found.flops == 260.0
    assert found.counts == {"all-reduce": 2.0, "all-gather": 8.0}
    assert found.sent == {"all-reduce": 8.0, "all-gather": 12.0}
    assert found.compile_seconds == 3.0


def test_no_combined_figure_is_negative():
    found = lines.combine(FEW, -9.0, MANY, 10.0)
    assert found.temporary_bytes == 0.0
    assert found.counts["all-reduce"] == 2.0
    assert lines.combine(MANY, -1.0, FEW, 1.0).counts["all-gather"] == 0


def test_the_seconds_of_operations_of_both_models_are_combined():
    few = dataclasses.replace(
        FEW, dearest={"sub in adam": 1.0, "dot in head": 3.0, "dot in d1": 0.5}
    )
    many = dataclasses.replace(
        MANY, dearest={"sub in adam": 2.0, "dot in head": 3.0, "dot in d9": 0.5}
    )
    assert lines.combine(few, -1.0, many, 2.0).dearest == {
        "sub in adam": 3.0,
        "dot in head": 3.0,
        "dot in d9": 0.5,
    }


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

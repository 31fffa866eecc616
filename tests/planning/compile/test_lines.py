"""Lines through the bytes of two programs."""

import pytest

from keras_strategies.planning.compile import lines
from keras_strategies.planning.compile.compiler import DoesNotFit
from tests.planning.made import figures

pytestmark = pytest.mark.quick


def line(outcome, slope, rows=8):
    return lines.Line(
        rows=rows, outcome=outcome, bytes_per_row=slope, is_full=False
    )


def sized(size):
    return figures(temporary_bytes=size)


@pytest.mark.parametrize(
    ("outcome", "slope", "maximum"),
    [
        (sized(100.0), 10.0, 18.0),
        (sized(200.0), 5.0, 8.0),
        # More than the limit with the rows that were asked for.
        (sized(240.0), 10.0, 4.0),
        (DoesNotFit("", 240.0), 10.0, 4.0),
        # The bytes grow faster than the rows.
        (DoesNotFit("", 800.0), 400 / 3, 2.0),
        # Nothing says how it grows.
        (sized(100.0), 0.0, None),
        (sized(100.0), -1.0, None),
        (sized(100.0), None, None),
        (DoesNotFit("", None), 10.0, None),
    ],
)
def test_the_most_rows_by_the_line(outcome, slope, maximum):
    assert line(outcome, slope).find_rows_at(200.0) == maximum


def test_rows_may_be_fewer_than_none():
    assert line(sized(1000.0), 1.0).find_rows_at(200.0) == -792


def test_bytes_in_all_are_of_arguments_outputs_and_temporaries():
    few = figures(argument_bytes=10.0, output_bytes=1.0, temporary_bytes=5.0)
    assert few.bytes_in_all == 16.0


def test_the_batch_itself_is_not_counted_among_activations():
    state = {"weights": 6.0, "slots": 0.0, "other": 0.0, "gradients": 6.0}
    found = figures(argument_bytes=16.0, output_bytes=0.0, temporary_bytes=50.0)
    step = lines.Line(
        rows=8,
        outcome=found,
        bytes_per_row=4.0,
        temporary_per_row=3.0,
        is_full=True,
    )
    bytes_of = lines.memory_breakdown(state, step)
    assert bytes_of["other"] == 10.0
    assert bytes_of["activations"] == 24.0
    assert sum(bytes_of.values()) == found.bytes_in_all

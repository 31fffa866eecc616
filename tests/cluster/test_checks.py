"""The checks of numbers and types that users give."""

import decimal
import fractions
import math

import numpy as np
import pytest

from keras_strategies.cluster.checks import check_number, check_port, check_type

pytestmark = pytest.mark.quick

WHOLE = [0, 3, -1, 10**30, np.int64(3), np.uint8(3)]
NUMBERS = [0.5, np.float32(0.5), np.float64(0.5), fractions.Fraction(1, 2)]
NO_NUMBERS = [True, np.bool_(True), "3", [3], 1j, decimal.Decimal(3), object()]


def check(value, **bounds):
    check_number("`x`", value, "Give another.", **bounds)


@pytest.mark.parametrize("value", WHOLE, ids=repr)
def test_integers_are_whole_and_numbers(value):
    check(value)
    check(value, is_whole=False)


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_fractions_are_numbers_and_not_whole(value):
    check(value, is_whole=False)
    with pytest.raises(TypeError, match="`x` must be an integer. Received"):
        check(value)


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("value", NO_NUMBERS, ids=lambda v: type(v).__name__)
def test_anything_else_is_no_number(value, is_whole):
    with pytest.raises(TypeError, match="must be an? .*Give another.$"):
        check(value, is_whole=is_whole)


def test_none_is_for_options():
    check(None)
    with pytest.raises(TypeError, match="NoneType"):
        check(None, is_optional=False)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_are_finite(value):
    with pytest.raises(ValueError, match="`x` must be finite. Received"):
        check(value, is_whole=False, minimum=0)


@pytest.mark.parametrize(
    ("bounds", "good", "bad", "rule"),
    [
        ({"minimum": 1}, 1, 0, ">= 1"),
        ({"above": 0}, 1, 0, "> 0"),
        ({"maximum": 9}, 9, 10, "<= 9"),
    ],
)
def test_bounds(bounds, good, bad, rule):
    check(good, **bounds)
    with pytest.raises(
        ValueError, match=f"`x` must be {rule}. Received: {bad}"
    ):
        check(bad, **bounds)


@pytest.mark.parametrize("value", ["a", None])
def test_value_of_a_type_is_taken(value):
    check_type("`name`", value, str | None, "a str or None", "Leave it out.")


def test_value_of_another_type_is_refused():
    with pytest.raises(TypeError) as raised:
        check_type("`name`", 3, str, "a str", "Give a name.")
    assert str(raised.value) == (
        "`name` must be a str. Received: 3 of type int. Give a name."
    )


@pytest.mark.parametrize("port", [1, 65535])
def test_port_is_returned(port):
    assert check_port(port, "`port`") == port


@pytest.mark.parametrize("port", [0, 65536])
def test_number_that_is_no_port_is_refused(port):
    with pytest.raises(ValueError, match="`port` must be .*8888"):
        check_port(port, "`port`")

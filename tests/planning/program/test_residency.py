"""Arrays that stay on the chip while they are needed."""

import pytest

from keras_strategies.planning.program.hlo import parse
from keras_strategies.planning.program.residency import (
    choose_resident,
    locate,
)

pytestmark = pytest.mark.quick

TEXT = """HloModule f

ENTRY %main (a: f32[8]) -> (f32[8], f32[8]) {
  %a = f32[8] parameter(0)
  %early = f32[8] negate(%a)
  %pair = (f32[8], f32[8]) fusion(%a), kind=kLoop, calls=%none
  %second = f32[8] get-tuple-element(%pair), index=1
  %same = f32[8] bitcast(%second)
  %next = f32[8] add(%same, %a)
  %last = f32[8] add(%next, %early)
  %first = f32[8] get-tuple-element(%pair), index=0
  ROOT %results = (f32[8], f32[8]) tuple(%last, %first)
}
"""
WRITTEN = {
    "early": {"early": 10.0},
    "pair": {"pair:0": 10.0, "pair:1": 10.0},
    "next": {"next": 10.0},
    "last": {"last": 10.0},
}


def test_elements_of_tuples_have_names():
    entry = parse(TEXT).entry
    assert locate(entry, "same") == locate(entry, "second") == "pair:1"
    assert locate(entry, "first") == "pair:0"
    assert locate(entry, "early") == "early"
    assert locate(entry, "unknown") == "unknown"


@pytest.mark.parametrize(
    ("limit", "chosen"),
    [
        # Those that are needed for the shortest time come first.
        (5.0, set()),
        (10.0, {"next"}),
        (20.0, {"next", "pair:1"}),
        (30.0, {"next", "pair:1", "early"}),
    ],
)
def test_what_is_soon_used_again_stays_on_the_chip(limit, chosen):
    # Parameters and results do not.
    assert choose_resident(parse(TEXT).entry, WRITTEN, limit) == chosen


def test_results_of_an_instruction_that_nobody_uses_are_not_chosen():
    written = WRITTEN | {"a": {"unused": 1.0}}
    assert "unused" not in choose_resident(parse(TEXT).entry, written, 100.0)

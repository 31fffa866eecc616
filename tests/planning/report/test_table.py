"""Plans as tables and as JSON."""

import io
import json

import pytest
from rich.console import Console

from keras_strategies.planning.report.planned_step import PlannedStep, format_gb
from keras_strategies.planning.report.table import Plan
from tests.planning.made import step, times

pytestmark = pytest.mark.quick

PLAN = Plan(
    steps=(
        step(),
        step(
            topology="v5p:8x8x16",
            layout="sharded:1024+model:4",
            num_devices=1024,
            num_replicas=256,
            rows=2048,
            limit_bytes=102_800_000_000,
            is_full_effort=False,
        ),
        step(
            layout="replicated",
            bytes_in_all=30e9,
            estimate=None,
            max_rows=None,
            advice="Use a larger group (`shards`), or a larger slice.",
        ),
        step(
            layout="model:3",
            bytes_in_all=None,
            memory={},
            counts={},
            sent={},
            estimate=None,
            max_rows=None,
            error="The cores of a replica are a box [of the slice].",
        ),
        step(limit_bytes=None, estimate=None, tokens=None, max_rows=0),
    ),
    notes=("Times are estimates.",),
)


def printed(plan, width):
    console = Console(file=io.StringIO(), width=width, record=True)
    console.print(plan)
    return console.export_text()


@pytest.mark.parametrize("width", [80, 120])
def test_a_table_names_every_candidate_and_fits_its_width(width):
    text = printed(PLAN, width)
    assert max(map(len, text.splitlines())) <= width
    if width > 80:
        # A narrower table breaks long names.
        assert all(s.topology in text for s in PLAN.steps)
        assert all(s.layout in text for s in PLAN.steps)
    for cell in ("~10.0/102.8", "40 %", "8.39M"):
        assert cell in text
    words = " ".join(text.split())
    assert "v5e:4x4 model:3: The cores of a replica are a box [of" in words
    assert "a larger slice." in words
    assert "Times are estimates." in words
    assert "…" not in text, "a cell is cut off"


def test_the_cells_of_a_table():
    text = printed(PLAN, 160)
    first = next(line for line in text.splitlines() if "v5e:4x4" in line)
    words = "v5e:4x4 sharded 4 yes 10.0/16.0 7 500 262k 40 % compute full"
    assert " ".join(first.split()) == words
    for cell in ("~10.0/102.8", "8.39M", "low"):
        assert cell in text
    assert repr(PLAN) == str(PLAN)


@pytest.mark.parametrize(
    ("rows", "shown"),
    [(4 * 2**24 + 4, "16,777,217"), (4 * 12345, "12,345"), (10, "2.5")],
)
def test_rows_of_a_replica(rows, shown):
    planned = step(topology="h100:4", rows=rows, num_replicas=4)
    text = printed(Plan(steps=(planned,)), 160)
    first = next(line for line in text.splitlines() if "h100:4" in line)
    assert first.split()[2] == shown


def test_rows_that_replicas_cannot_share_evenly_are_reported_once():
    steps = [step(rows=3686, layout=x) for x in ("replicated", "slots")]
    text = printed(Plan(steps=(*steps, step())), 200)
    told = "3,686 rows are not a multiple of 16 replicas"
    assert text.count(told) == text.count("multiple of") == 1


def test_a_plan_of_nothing_prints_its_notes():
    assert "Nothing." in str(Plan(steps=(), notes=("Nothing.",)))


@pytest.mark.parametrize(
    ("given", "fits"),
    [
        ({}, True),
        ({"bytes_in_all": 16e9}, True),
        ({"bytes_in_all": 16e9 + 1}, False),
        ({"bytes_in_all": None}, None),
        ({"limit_bytes": None}, None),
        ({"error": "It cannot be."}, False),
    ],
)
def test_what_fits(given, fits):
    assert step(**given).fits is fits


def test_rates_are_those_of_the_global_batch():
    assert step().rows_per_second == 128.0
    assert step().tokens_per_second == 128.0 * 2048
    assert step(tokens=None).tokens_per_second is None
    assert step(estimate=None).rows_per_second is None
    assert step(estimate=times(seconds=0.0)).tokens_per_second is None


def test_the_fastest_is_that_of_most_rows_for_each_device():
    few = step(num_devices=4, rows=32)
    many = step(num_devices=16, rows=64)
    larger = step(num_devices=4, rows=64, bytes_in_all=30e9)
    unknown = step(num_devices=4, rows=64, limit_bytes=None)
    assert Plan(steps=(many, larger, few, unknown)).fastest is few
    assert Plan(steps=(larger, step(estimate=None))).fastest is None
    assert Plan(steps=()).fastest is None


def test_json_has_every_attribute_and_no_special_numbers():
    text = json.dumps(PLAN.to_json(), allow_nan=False)
    found = json.loads(text)
    assert found["version"] == 1
    assert found["notes"] == ["Times are estimates."]
    first = found["steps"][0]
    assert first["fits"] is True
    assert first["tokens_per_second"] == 262144.0
    assert first["memory"]["gradients"] == 1.5e9
    assert first["estimate"]["link_seconds"] == 0.2
    assert found["steps"][3]["error"].startswith("The cores")
    assert found["steps"][4]["fits"] is None


def test_a_step_is_read_from_its_json():
    for planned in PLAN.steps:
        found = json.loads(json.dumps(planned.to_json()))
        assert PlannedStep.from_json(found) == planned


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0.00"),
        (12e6, "0.01"),
        (1.234e9, "1.23"),
        (16.91e9, "16.9"),
        (1.5e12, "1500.0"),
    ],
)
def test_bytes_as_gb(size, text):
    assert format_gb(size) == text

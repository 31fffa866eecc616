"""JSON that anybody may have written."""

import json

import pytest

from keras_strategies.cluster.exchange.exit_codes import Cause, ExitCode
from keras_strategies.cluster.untrusted import MAX_DEPTH, load_json
from keras_strategies.watchdog import heartbeat_thread
from keras_strategies.watchdog.failure_detector import Heartbeat

pytestmark = pytest.mark.quick

GOOD = [None, True, 1, -2.5, "a", [], {}, {"a": [1, {"b": "c"}]}]


@pytest.mark.parametrize("value", GOOD, ids=str)
def test_json_is_read(value):
    text = json.dumps(value)
    for said in (text, text.encode()):
        found = load_json(said, max_characters=100)
        assert found == value
        assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "line 1, column 1"),
        ("[1", "delimiter"),
        ("{} {}", "Extra data"),
        (b"\xff\xfe\xfd", "UTF-8"),
        ("[" * 50_000, "too deeply"),
        ("[" * 900 + "]" * 900, "too deeply"),
        ('{"a": 1, "a": 2}', "the key 'a' twice"),
        ("NaN", "not finite"),
        ("[-Infinity]", "not finite"),
        ("1e999", "not finite"),
        ("9" * 5000, "too long"),
        (" " * 100_001, "maximum of 100000"),
    ],
    ids=lambda value: str(value[:20]),
)
def test_what_is_no_json_is_refused(text, problem):
    with pytest.raises(ValueError, match=problem) as caught:
        load_json(text, max_characters=100_000)
    assert len(str(caught.value)) < 200
    assert caught.value.__cause__ is None


def test_the_depth_has_a_limit():
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    load_json(deep, max_characters=1000)
    with pytest.raises(ValueError, match="too deeply"):
        load_json(f"[{deep}]", max_characters=1000)


def test_numbers_of_python_are_read_where_they_may_be():
    found = load_json("[NaN, Infinity]", max_characters=100, has_nan=True)
    assert str(found) == "[nan, inf]"


FOREIGN = [
    "",
    "[" * 60_000,
    "null",
    "3",
    '"x"',
    "{}",
    '{"text": 3, "code": 71}',
    '{"text": "x", "code": 3}',
    '{"text": "x", "code": "71"}',
    '{"text": "x", "code": [71]}',
    '{"text": "x"}',
]


@pytest.mark.parametrize("text", FOREIGN, ids=lambda text: text[:30])
def test_an_unreadable_cause_is_a_cause_still(text):
    cause = Cause.from_json(text)
    assert "unreadable" in cause.text
    assert cause.code == ExitCode.PEER_FAILED


def test_the_text_of_a_cause_gives_a_terminal_no_orders():
    told = Cause(text="process 1: \ud800\x1b[31m" + "x" * 9999).to_json()
    text = Cause.from_json(told).text
    assert text.startswith("process 1: ??[31mxxx")
    assert len(text.encode()) < 5000


def test_a_cause_is_read_as_it_was_told():
    cause = Cause(text="process 1 (é): ValueError\n", code=ExitCode.STALLED)
    assert Cause.from_json(cause.to_json()) == cause


@pytest.mark.parametrize("text", FOREIGN, ids=lambda text: text[:30])
def test_what_is_no_beat_is_none(text):
    assert Heartbeat.from_json(text) is None


def test_beats_are_read_as_they_were_told():
    beats = [
        Heartbeat(),
        Heartbeat(number=3, waiting_s=1, agreeing="data", where='a "é":3'),
        Heartbeat(agreeing_s=float("inf"), is_done=True),
    ]
    for beat in beats:
        assert Heartbeat.from_json(beat.to_json()) == beat
    damaged = json.loads(beats[1].to_json())
    for name, value in damaged.items():
        other = {"a": 1} if value != {"a": 1} else None
        assert Heartbeat.from_json(json.dumps(damaged | {name: other})) is None


def test_foreign_entries_of_the_store_are_left_out():
    text = Heartbeat(number=2).to_json()
    told = [("beats/0", text), ("beats/1", "[" * 9999), ("beats/x", text)]
    told += [("beats/" + "9" * 5000, text), ("beats/\u0663", text)]
    assert heartbeat_thread._parse_heartbeats(told) == {0: Heartbeat(number=2)}
    assert heartbeat_thread._parse_processes("[1, 2]") == [1, 2]
    for foreign in (*FOREIGN, "[true]", '["1"]'):
        assert heartbeat_thread._parse_processes(foreign) == []

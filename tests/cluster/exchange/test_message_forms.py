"""What JSON of files and of other processes must be like."""

import json

import pytest

from keras_strategies.cluster.array_kinds import is_shape, parse_dtype
from keras_strategies.cluster.exchange.message_forms import (
    Either,
    has_form,
    is_count,
    read_messages,
)

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (int, [0, -3], [True, 1.0, "1", None]),
        (float, [0, 1.5], [True, "1", None]),
        (bool, [True], [1, 0]),
        (None, [None], [0, "", []]),
        (object, [None, 1, [{}]], []),
        (int | None, [None, 3], [True, "3"]),
        (is_count, [0, 2**52], [-1, True, 1.0, 2**60]),
        ([str], [[], ["a", "b"]], ["a", {}, ["a", 1]]),
        ((str, int), [["a", 1]], [["a"], ["a", 1, 2], ["a", "b"]]),
        ({"a": int}, [{"a": 1}, {"a": 1, "b": 2}], [{}, {"a": "1"}, [], 3]),
        ({"a?": int}, [{"a": 1}, {}], [{"a": "1"}]),
        (Either((None, {"a": [int]})), [None, {"a": [1]}], [{}, {"a": [""]}]),
        (is_shape, [[], [3, 0]], [[-1], [True], [1.5], [2**40] * 3, [1] * 40]),
        (parse_dtype, ["float32", "bfloat16", "<U5"], ["f4,f4", "(2,)f4", 3]),
        (parse_dtype, ["bool"], ["float", "<U999999999", "x" * 99, "os"]),
    ],
)
def test_only_what_has_the_form_has_no_problem(form, good, bad):
    assert all(has_form(value, form) for value in good)
    assert not any(has_form(value, form) for value in bad)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "line 1, column 1"),
        ('{"rows": "3"}', "it has a wrong structure"),
        ('"' + "x" * 2000 + '"', "characters"),
        ("3", "it has a wrong structure"),
    ],
    ids=lambda text: text[:20],
)
def test_what_a_process_says_otherwise_is_named(text, problem):
    texts = ['{"rows": 2}', text]
    with pytest.raises(RuntimeError) as caught:
        read_messages(
            texts,
            {"rows": int},
            processes=[0, 4],
            about="the data of `fit`",
            max_characters=1000,
        )
    message = str(caught.value)
    assert "about the data of `fit`" in message
    assert "process 4" in message
    assert problem in message
    assert len(message) < 400


def test_messages_are_read_in_order():
    said = [{"rows": 2}, {"rows": None}]
    heard = read_messages(
        list(map(json.dumps, said)),
        {"rows": int | None},
        processes=(0, 1),
        about="it",
    )
    assert heard == said

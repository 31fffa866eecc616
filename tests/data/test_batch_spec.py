"""What batches are made of, as text."""

import collections
import contextlib
import json
import sys

import jax
import ml_dtypes
import numpy as np
import pytest

from keras_strategies.data import batch_spec

pytestmark = pytest.mark.quick

NESTS = [
    np.zeros((3, 2), "float32"),
    (np.zeros((3, 2), "float64"), np.zeros(3, "int64")),
    [np.zeros((3, 1), bool)],
    {"b": np.zeros((3, 1), "uint8"), "a": (np.zeros((3, 4, 5), "int8"), None)},
    (np.zeros((3, 2), ml_dtypes.bfloat16),),
    {1: np.zeros(3, "float16"), 0: []},
    (),
]


@pytest.mark.parametrize("nest", NESTS, ids=str)
def test_an_empty_batch_is_like_its_first(nest):
    empty = batch_spec.make_empty(batch_spec.make_spec(nest))
    assert jax.tree.structure(empty) == jax.tree.structure(nest)
    for leaf, like in zip(
        jax.tree.leaves(empty), jax.tree.leaves(nest), strict=True
    ):
        assert leaf.dtype == like.dtype
        assert leaf.shape == (0, *like.shape[1:])
    assert batch_spec.make_spec(empty) == batch_spec.make_spec(nest)


def test_dicts_of_another_order_are_alike():
    x, y = np.zeros((2, 1)), np.zeros(2)
    assert batch_spec.make_spec({"x": x, "y": y}) == batch_spec.make_spec(
        {"y": y, "x": x}
    )


def test_it_is_shown_as_users_write_it():
    batch = {"x": np.zeros((2, 3), "float32"), "y": np.zeros(2, "int64")}
    assert batch_spec.format_spec(batch_spec.make_spec(batch)) == str(
        {"x": "float32[?, 3]", "y": "int64[?]"}
    )


def test_nests_keep_their_kinds_and_order():
    """Or the leaves of a process without rows would be in another order."""
    arrays = np.ones((2, 3), "float32"), np.ones((2,), "int32")
    for batch in (
        collections.OrderedDict(b=arrays[0], a=arrays[1]),
        {"b": arrays[1], "a": [arrays[0]]},
    ):
        made = batch_spec.make_empty(batch_spec.make_spec(batch))
        assert jax.tree.structure(made) == jax.tree.structure(batch)
        for leaf, other in zip(
            jax.tree.leaves(made), jax.tree.leaves(batch), strict=True
        ):
            assert leaf.shape == (0, *other.shape[1:])
            assert leaf.dtype == other.dtype


def test_what_cannot_be_told_is_refused():
    with pytest.raises(TypeError, match="an object of type set"):
        batch_spec.make_spec((np.ones(2), {1}))
    own = collections.namedtuple("own", "a b")
    with pytest.raises(TypeError, match="an object of type own"):
        batch_spec.make_spec(own(np.ones(2), np.ones(2)))


def spec_with(part):
    return json.dumps({"tuple": [part]})


LEAF = {"dtype": "float32", "shape": [2]}
FOREIGN = [
    "",
    "[" * 100_000,
    "{" * 100_000,
    '{"tuple": [' * 200 + "]}" * 200,
    "1e999",
    "NaN",
    "9" * 5000,
    '"x"',
    "[]",
    '{"a": 1}',
    '{"list": [], "list": []}',
    '{"list": [], "tuple": []}',
    *map(
        spec_with,
        [
            {"list": 3},
            {"dict": {"a": LEAF}},
            {"dict": [["a"]]},
            {"dict": [[["a"], LEAF]]},
            {"dict": [["a", LEAF], ["a", LEAF]]},
            LEAF | {"dtype": 3},
            LEAF | {"dtype": "nonsense"},
            LEAF | {"dtype": "f4,f4"},
            LEAF | {"dtype": "(2,)f4"},
            LEAF | {"dtype": "float32" + " " * 100},
            LEAF | {"shape": 2},
            LEAF | {"shape": [-1]},
            LEAF | {"shape": [True]},
            LEAF | {"shape": [1.5]},
            LEAF | {"shape": [1] * 100},
            LEAF | {"shape": [2**62, 2**62]},
            LEAF | {"more": 1},
            {"named": 3, "items": []},
            {"named": "x" * 5000, "items": []},
            {"named": "os:system", "items": [LEAF]},
        ],
    ),
]


@pytest.mark.parametrize("text", FOREIGN, ids=lambda text: text[:40])
def test_what_is_no_structure_is_refused(text):
    with pytest.raises(ValueError, match="This one is not"):
        batch_spec.make_empty(text)


def test_ten_thousand_damaged_structures_are_refused_or_read():
    random = np.random.default_rng(0)
    good = batch_spec.make_spec(
        {"a": (np.ones((2, 3)), [np.ones(2, "int32")]), "b": (1.0 * X, X)}
    )
    before = set(sys.modules)
    for _ in range(10_000):
        text = mutated(good, random)
        with contextlib.suppress(ValueError):
            batch_spec.make_empty(text)
    assert set(sys.modules) == before


X = np.ones((2, 1))
PIECES = ["[", "]", "{", "}", ",", ":", '"', "-1", "1e999", "null", "named"]
PIECES += ["os:system", "items", "dict", "tuple", "0", "\\u0000", "[" * 999]


def mutated(text, random):
    """The text with some characters left out, repeated, or others put in."""
    for _ in range(random.integers(1, 4)):
        start, stop = sorted(random.integers(0, len(text) + 1, 2))
        piece = [text[start:stop], "", str(random.choice(PIECES))]
        stop = min(stop, start + int(random.integers(0, 12)))
        text = text[:start] + piece[random.integers(3)] + text[stop:]
    return text

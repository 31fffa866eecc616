"""What batches are made of, as text."""

import collections
from typing import NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest

from keras_strategies.data import structure

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
    empty = structure.empty(structure.spec_of(nest))
    assert jax.tree.structure(empty) == jax.tree.structure(nest)
    for leaf, like in zip(
        jax.tree.leaves(empty), jax.tree.leaves(nest), strict=True
    ):
        assert leaf.dtype == like.dtype
        assert leaf.shape == (0, *like.shape[1:])
    assert structure.spec_of(empty) == structure.spec_of(nest)


def test_dicts_of_another_order_are_alike():
    x, y = np.zeros((2, 1)), np.zeros(2)
    assert structure.spec_of({"x": x, "y": y}) == structure.spec_of(
        {"y": y, "x": x}
    )


@pytest.mark.parametrize(
    ("one", "other", "is_like"),
    [
        (np.zeros((2, 3)), np.zeros((4, 3)), True),
        (np.zeros((2, 3)), np.zeros((2, 5)), True),  # Padded to its own length.
        (np.zeros((2, 3)), np.zeros(2), False),
        (np.zeros(2, "float64"), np.zeros(2, "float32"), True),
        (np.zeros(2, "int32"), np.zeros(2, "float32"), False),
        ((np.zeros(2),), [np.zeros(2)], False),
        ((np.zeros(2), None), (np.zeros(2), np.zeros(2)), False),
    ],
)
def test_what_is_like_another(one, other, is_like):
    specs = structure.spec_of(one), structure.spec_of(other)
    assert structure.is_like(*specs) is is_like
    assert structure.is_like(*reversed(specs)) is is_like


def test_it_is_shown_as_users_write_it():
    batch = {"x": np.zeros((2, 3), "float32"), "y": np.zeros(2, "int64")}
    assert structure.shown(structure.spec_of(batch)) == str(
        {"x": "float32[?, 3]", "y": "int64[?]"}
    )


class Named(NamedTuple):
    b: np.ndarray
    a: np.ndarray


def test_nests_keep_their_kinds_and_order():
    """Or the leaves of a process without rows would be in another order."""
    arrays = np.ones((2, 3), "float32"), np.ones((2,), "int32")
    for batch in (
        collections.OrderedDict(b=arrays[0], a=arrays[1]),
        Named(*arrays),
        {"b": Named(*arrays), "a": [arrays[0]]},
    ):
        made = structure.empty(structure.spec_of(batch))
        assert jax.tree.structure(made) == jax.tree.structure(batch)
        for leaf, other in zip(
            jax.tree.leaves(made), jax.tree.leaves(batch), strict=True
        ):
            assert leaf.shape == (0, *other.shape[1:])
            assert leaf.dtype == other.dtype


def test_what_cannot_be_told_is_refused():
    with pytest.raises(TypeError, match="Received: a set"):
        structure.spec_of((np.ones(2), {1}))
    own = collections.namedtuple("own", "a b")
    with pytest.raises(TypeError, match="Received: a named tuple own"):
        structure.spec_of(own(np.ones(2), np.ones(2)))
    spec = structure.spec_of(Named(np.ones(2), np.ones(2)))
    with pytest.raises(TypeError, match="top of a module"):
        structure.empty(spec.replace("Named", "Gone"))

"""Descriptions of variables, which processes compare."""

import dataclasses

import pytest

from keras_strategies.cluster.exchange.same_variables import Note

pytestmark = pytest.mark.quick

KERNEL = Note(
    path="sequential_2/dense_13/kernel",
    shape="(3, 4)",
    dtype="float32",
    trainable="trainable",
    initializer="GlorotUniform",
    where="train.py:3 in main",
)


def changed(**fields):
    return dataclasses.replace(KERNEL, **fields)


@pytest.mark.parametrize(
    ("other", "is_same"),
    [
        (changed(path="sequential/dense/kernel"), True),
        (changed(path="sequential/dense_1/kernel", where=""), True),
        (changed(path="sequential/dense_1/bias"), False),
        (changed(path="sequential/dense_1b/kernel"), False),
        (changed(shape="(4, 3)"), False),
        (changed(trainable="not trainable"), False),
    ],
)
def test_numbers_of_layers_and_lines_are_not_compared(other, is_same):
    assert (KERNEL.get_key() == other.get_key()) == is_same

"""The functions in names.toml exist, with the parameters that it has."""

import functools
import inspect

import keras
import pytest
import tensorflow as tf

from keras_strategies.migrate import tables

# Names of a first parameter that stand for each other.
FIRST = ("input", "input_tensor", "value", "x")


# Defaults that differ in the signatures, and mean the same.
EQUAL = {
    "dtype",
    "keepdims",
    "ord",
    "epsilon",
    "mode",
    "constant_values",
    "step",
    "maxval",
    ("nn.softmax", "axis"),
    ("nn.log_softmax", "axis"),
    ("one_hot", "axis"),
}


def find(root, name):
    """The attribute of a dotted name, or None."""
    return functools.reduce(
        lambda owner, word: getattr(owner, word, None), name.split("."), root
    )


def parameters_of(function):
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize("name", tables.OPERATIONS)
def test_keras_has_the_function_and_its_parameters(name):
    rule = tables.OPERATIONS[name]
    module, _, function = rule.function.partition(".")
    assert module == "keras"
    there = parameters_of(find(keras, function))
    new = [word for word in rule.new if word not in ("-", "!")]
    assert {word.rstrip("*") for word in new} <= set(there)
    in_order = []
    for word in rule.new:
        if word[0] in "-!" or word.endswith("*"):
            break
        in_order.append(word)
    assert there[: len(in_order)] == in_order
    assert not rule.added[0] or rule.added[0] in there


@pytest.mark.parametrize(
    "name", [n for n in tables.OPERATIONS if not n.startswith("keras.")]
)
def test_tensorflow_has_the_parameters_in_their_order(name):
    modules = (tf, tf.math, tf.linalg)
    (function, *_) = filter(None, [find(m, name) for m in modules])
    rule = tables.OPERATIONS[name]
    assert len(rule.new) == len(rule.old)
    there = parameters_of(function)[: len(rule.old)]
    for old, new in zip(rule.old, there, strict=True):
        assert old == new or {old, new} <= set(FIRST) or len(there) == 1


@pytest.mark.parametrize(
    "name", [n for n in tables.OPERATIONS if not n.startswith("keras.")]
)
def test_a_default_that_differs_is_written(name):
    rule = tables.OPERATIONS[name]
    modules = (tf, tf.math, tf.linalg)
    (theirs, *_) = filter(None, [find(m, name) for m in modules])
    ours = find(keras, rule.function.partition(".")[2])
    old, new = (inspect.signature(f).parameters for f in (theirs, ours))
    words = dict(zip(rule.old, rule.new, strict=True))
    pairs = {word: word.rstrip("*") for word in old if word in new}
    pairs |= {a: b.rstrip("*") for a, b in words.items() if b[0] not in "-!"}
    for before, after in pairs.items():
        if before not in old or after in (rule.added[0], "name"):
            continue
        defaults = {old[before].default, new[after].default}
        is_equal = after in EQUAL or (name, after) in EQUAL
        is_needed = inspect.Parameter.empty in defaults
        assert len(defaults) == 1 or is_needed or is_equal, before

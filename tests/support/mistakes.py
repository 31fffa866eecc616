"""What the tests of mistakes share: a model, and what must hold after."""

import re

import keras
import numpy as np
import pytest

from tests.support.plain_keras import assert_same, dense

_random = np.random.default_rng(0)
X = _random.normal(size=(22, 3)).astype("float32")
Y = _random.normal(size=(22, 1)).astype("float32")


def one_input():
    return keras.Sequential([keras.Input((3,)), dense(1)])


def not_built():
    return keras.Sequential([dense(1)])


def compiled(strategy, build=one_input):
    with strategy.scope():
        model = build()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def assert_text(error, *parts):
    """Asserts that an error has all its parts: the rule, and then the fix."""
    text = str(error.value)
    for part in parts:
        assert part in text, text
    _, is_there, rest = text.partition("Received")
    # The fix follows what was received, or the rule.
    assert re.search(r"\.\W+[A-Z]", rest if is_there else text), text


def assert_usable(model, x=X, y=Y):
    """Asserts that weights can be read, and that the model trains on."""
    for weight in model.get_weights():
        assert np.isfinite(weight).all()
    for variable in model.optimizer.variables:
        np.asarray(variable.value)
    before = model.get_weights()
    model.fit(x, y, batch_size=8, verbose=0)
    model.evaluate(x, y, verbose=0)
    model.predict(x, verbose=0)
    after = model.get_weights()
    assert not before or any(
        (a != b).any() for a, b in zip(before, after, strict=True)
    )


def assert_refused(model, act, error, *parts, x=X, y=Y):
    """Asserts that `act` fails before any step, and that no harm is done."""
    before = model.get_weights() if model.built else None
    with pytest.raises(error) as caught:
        act()
    assert_text(caught, *parts)
    if before is not None:
        assert_same(before, model.get_weights(), tolerance=0)
    assert not model.optimizer.built or int(model.optimizer.iterations) == 0
    assert_usable(model, x, y)


def make_iter(*batches):
    """A generator of what is given."""
    yield from batches

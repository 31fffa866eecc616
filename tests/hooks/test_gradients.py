"""`ks.value_and_grad` and `ks.grad`: their variables, and what they refuse."""

import jax
import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks
from tests.support.mistakes import assert_text
from tests.support.plain_keras import mirrored


class Infinite:
    """An object that can be indexed without end, as a Keras variable can."""

    def __getitem__(self, index):
        assert index < 100, "it was read as a sequence"
        return self


@pytest.fixture
def pair():
    with mirrored(2).scope():
        return keras.Variable(2.0, name="a"), keras.Variable([3.0], name="b")


def test_gradients_have_the_structure_of_the_variables(pair):
    a, b = pair

    def loss():
        return a * a + ops.sum(b * a)

    of_a, of_b = np.float32(7.0), np.float32([2.0])
    for variables, expected in [
        ([a, b], [of_a, of_b]),
        ((a,), (of_a,)),
        ({"x": b, "y": [a, (b,)]}, {"x": of_b, "y": [of_a, (of_b,)]}),
        (a, of_a),
        (b, of_b),
    ]:
        value, grads = ks.value_and_grad(loss, variables)()
        assert float(value) == 10.0
        assert jax.tree.structure(grads) == jax.tree.structure(expected)
        assert jax.tree.all(jax.tree.map(np.array_equal, grads, expected))
        again, aux = ks.grad(lambda: (loss(), "x"), variables, has_aux=True)()
        assert jax.tree.all(jax.tree.map(np.array_equal, again, expected))
        assert aux == "x"
    assert ks.grad(loss, iter(pair))() == [of_a, of_b]


def test_one_variable_in_run(pair):
    strategy, (a, _) = mirrored(2), pair
    grads = strategy.run(lambda: ks.grad(lambda: a * a, a)())
    assert float(strategy.reduce("sum", grads, axis=None)) == 8.0


def test_other_objects_are_refused():
    for wrong in (Infinite(), 3.0, [np.ones(2)], np.ones(2)):
        with pytest.raises(TypeError, match="only Keras variables") as caught:
            ks.value_and_grad(lambda: 1.0, wrong)
        assert_text(caught, "jax.grad")


RESULTS = {
    "none": (lambda a: None, False, "`return loss`"),
    "rows": (lambda a: a * np.ones((4, 1), "float32"), False, "(4, 1)"),
    "a pair": (lambda a: (a * a, a), False, "`has_aux=True`"),
    "no pair": (lambda a: a * a, True, "omit `has_aux`"),
    "three": (lambda a: (a * a, a, a), True, "3 entries"),
    "rows in a pair": (lambda a: (ops.ones((2,)), a), True, "keras.ops.mean"),
    "an integer": (lambda a: ops.cast(a, "int32"), False, "floating dtype"),
    "an object": (lambda a: "text", False, "str"),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_that_are_no_loss_are_refused(name, pair):
    (fn, has_aux, fix), (a, _) = RESULTS[name], pair
    compute = ks.value_and_grad(lambda: fn(a.value), [a], has_aux)
    for call in (compute, lambda: mirrored(2).run(compute)):
        with pytest.raises(TypeError, match="must return a") as caught:
            call()
        assert_text(caught, fix)


def test_losses_that_are_numbers_are_allowed(pair):
    a, _ = pair
    assert ks.value_and_grad(lambda: 0.0, a)() == (0.0, 0.0)
    assert ks.value_and_grad(lambda: (np.float32(1), None), a, True)() == (
        (1.0, None),
        0.0,
    )

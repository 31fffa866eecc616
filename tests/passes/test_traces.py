"""Who made an equation: the user's code, Keras's, or one for its callers."""

import functools
import gc
import os

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from keras import ops

from keras_strategies.passes import traces
from keras_strategies.passes.row_kinds import losses


@pytest.mark.quick
@pytest.mark.parametrize("directory", ["site-packages", "dist-packages"])
def test_installed_packages_are_not_libraries(directory):
    """They may lie below the directory of Python's own modules."""
    own = os.path.dirname(functools.__file__)
    assert traces._find_maker(os.path.join(own, directory, "mine", "loss.py"))
    assert traces._find_maker("/anywhere/train.py")
    assert traces._find_maker(functools.__file__) is None


def of(fn):
    def marked(x):
        return checkpoint_name(fn(x), "marked")

    jaxpr = jax.make_jaxpr(marked)(np.ones((3, 4), "float32"))
    return losses.has_user_code(jaxpr, "marked")


def test_layers_are_kerass_and_operations_are_their_callers():
    layer = keras.layers.Dense(2, "relu")
    layer.build((None, 4))
    norm = keras.layers.LayerNormalization()
    norm.build((None, 4))
    assert not of(layer)
    assert not of(lambda x: layer(norm(x)))
    assert of(lambda x: ops.sum(layer(x)))
    assert of(keras.layers.Lambda(lambda x: x + 1))


@pytest.mark.parametrize(
    ("operation", "is_own"),
    [
        (lambda x: x + 2 * x, False),
        (lambda x: ops.concatenate([x, -x]), False),
        (lambda x: x * ops.sum(ops.ones_like(x)), True),
    ],
)
def test_operations_of_functional_models(operation, is_own):
    inputs = keras.Input((4,))
    assert of(keras.Model(inputs, operation(inputs))) == is_own


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: jnp.take(x, jnp.array([1, 1]), axis=0).sum(), False),
        (lambda x: x.at[0].add(1.0).sum(), False),
        (lambda x: jnp.sort(x)[:, 0].sum(), True),
        (lambda x: jnp.median(x, axis=1).sum(), True),
        (
            lambda x: jax.lax.scan(lambda c, _: (jnp.sort(c), c), x, None, 2)[
                0
            ].sum(),
            True,
        ),
        (lambda x: (x.at[0].set(1.0) ** 2).sum(), True),
        (lambda x: (x.at[0].multiply(2.0) ** 2).sum(), True),
        (lambda x: (x @ x.T).sum(), False),
    ],
)
def test_scatters_that_xla_cannot_divide(fn, expected):
    jaxpr = jax.make_jaxpr(jax.grad(fn))(np.ones((3, 4), "float32"))
    assert traces.has_unsafe_scatters(jaxpr) == expected


def test_the_garbage_collector_is_off_while_a_function_is_traced():
    seen = []

    def fn(x, fails=False):
        with traces.without_collector():
            seen.append(gc.isenabled())
            if fails:
                raise ValueError("fails")
        seen.append(gc.isenabled())
        return x

    with jax.disable_jit():
        fn(1.0)
    assert seen == [True, True]
    jax.eval_shape(fn, 1.0)
    assert seen[2:] == [False, True]
    with pytest.raises(ValueError, match="fails"):
        jax.eval_shape(functools.partial(fn, fails=True), 1.0)
    assert gc.isenabled()
    gc.disable()
    try:
        jax.eval_shape(fn, 1.0)
        assert not gc.isenabled()
    finally:
        gc.enable()

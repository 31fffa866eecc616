"""Programs that are compiled and not run."""

import jax
import jax.numpy as jnp
import pytest

from keras_strategies.spmd import compiled

pytestmark = pytest.mark.quick
THREE = jax.ShapeDtypeStruct((3,), "float32")


def test_intermediate_values_of_another_trace_are_refused():
    kept = []

    @jax.jit
    def keep(x):
        kept.extend([x + 1, x + 2])
        return x

    keep(jnp.ones(3))
    program = jax.jit(lambda x: x + kept[0] + kept[1])
    with pytest.raises(RuntimeError, match=r"uses 2 of them.*RematScope"):
        compiled.lower(program, THREE)


def test_programs_may_have_constants_and_arguments_that_they_do_not_use():
    constant = jnp.arange(3.0)
    program = jax.jit(lambda pair, unused: pair[0] * constant)
    lowered = compiled.lower(program, (THREE, None), THREE)
    arguments, _ = lowered.compile().input_shardings
    assert arguments[0][0] is not None

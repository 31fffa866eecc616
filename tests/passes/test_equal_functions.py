"""Functions are equal if their results and their gradients are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from keras_strategies.passes import value_numbers

X = np.ones((3, 3), "float32")


def compute_same(functions, *args):
    return value_numbers.compute_same(
        jax.make_jaxpr(fn)(*args) for fn in functions
    )


def by_vjp(factor):
    """The identity, with a gradient of its own."""

    @jax.custom_vjp
    def fn(x):
        return x

    fn.defvjp(lambda x: (x, None), lambda _, g: (g * factor,))
    return fn


def by_static_argument(factor):
    def backward(factor, _, g):
        return (g * factor,)

    fn = jax.custom_vjp(lambda factor, x: x, nondiff_argnums=(0,))
    fn.defvjp(lambda factor, x: (x, None), backward)
    return lambda x: fn(factor, x)


def by_residual(factor):
    @jax.custom_vjp
    def fn(x):
        return x

    fn.defvjp(lambda x: (x, x * factor), lambda rest, g: (g * rest,))
    return fn


def by_jvp(factor):
    @jax.custom_jvp
    def fn(x):
        return x

    fn.defjvp(lambda primals, tangents: (primals[0], tangents[0] * factor))
    return fn


def by_array(factor):
    return by_vjp(np.full(3, factor, "float32"))


def by_stopping(factor):
    return jax.lax.stop_gradient if factor == 2 else lambda x: x


KINDS = [by_vjp, by_static_argument, by_residual, by_jvp, by_array, by_stopping]
MESH = jax.make_mesh((1,), ("m",), axis_types=(jax.sharding.AxisType.Auto,))
mapped = functools.partial(
    jax.shard_map, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False
)
PLACES = {
    "itself": lambda fn: fn,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": jax.vmap,
    "shard_map": mapped,
    "loop": lambda fn: (
        lambda x: jax.lax.scan(lambda c, row: (fn(c) + row, c), x[0], x)
    ),
    "branch": lambda fn: (
        lambda x: jax.lax.cond(jnp.sum(x) > 0, fn, lambda x: x + 1, x)
    ),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_differs_is_a_difference(kind, place):
    ones, twos = (PLACES[place](kind(factor)) for factor in (1, 2))
    assert not compute_same([ones, twos], X)
    assert compute_same([ones, PLACES[place](kind(1))], X)


def test_two_gradients_that_are_exchanged_are_a_difference():
    ones, twos = by_vjp(1), by_vjp(2)

    def one(x):
        return ones(x), twos(x * 2)

    def other(x):
        second = ones(x * 2)
        return twos(x), second

    assert not compute_same([one, other], X)
    assert compute_same([one, lambda x: (by_vjp(1)(x), by_vjp(2)(x * 2))], X)


def test_a_rule_that_sees_what_is_differentiated_is_a_difference():
    def make():
        fn = jax.custom_vjp(lambda x: x)
        fn.defvjp(
            lambda x: (x.value, None), lambda _, g: (g,), symbolic_zeros=True
        )
        return fn

    assert not compute_same([make(), make()], X)


def test_a_rule_may_use_a_mapped_axis():
    def make(factor):
        fn = jax.custom_vjp(lambda x: x)
        fn.defvjp(
            lambda x: (x, None),
            lambda _, g: (jax.lax.psum(g, "m") * factor,),
        )
        return mapped(fn)

    assert compute_same([make(1), make(1)], X)
    assert not compute_same([make(1), make(2)], X)


@pytest.mark.parametrize("kind", KINDS[:-1])
@pytest.mark.parametrize("place", ["itself", "jit"])
def test_a_rule_that_a_rule_calls_is_compared(kind, place):
    """Gradients of gradients differ, as in a gradient penalty."""

    def make(factor, depth):
        if depth == 0:
            return kind(factor)
        inner = make(factor, depth - 1)
        fn = jax.custom_jvp(lambda x: x * (2.0 + depth))
        fn.defjvp(lambda x, t: (fn(*x), t[0] * PLACES[place](inner)(x[0])))
        return fn

    for depth in (1, 2):
        ones, twos = make(1, depth), make(2, depth)
        assert not compute_same([ones, twos], X)
        assert compute_same([ones, make(1, depth)], X)


def test_a_rule_that_calls_an_equal_function_of_another_rule_is_compared():
    def make(factor):
        other = jax.custom_jvp(jnp.tanh)
        other.defjvp(lambda x, t: (other(*x), t[0] * factor))
        fn = jax.custom_jvp(jnp.tanh)
        fn.defjvp(lambda x, t: (fn(*x), t[0] * (1 - other(*x) ** 2)))
        return fn

    assert compute_same([make(1), make(1)], X)
    assert not compute_same([make(1), make(2)], X)


def test_rules_that_call_each_other_end():
    def make(sign):
        sine, cosine = jax.custom_jvp(jnp.sin), jax.custom_jvp(jnp.cos)
        sine.defjvp(lambda x, t: (sine(*x), cosine(*x) * t[0]))
        cosine.defjvp(lambda x, t: (cosine(*x), sign * sine(*x) * t[0]))
        return sine

    assert compute_same([make(-1), make(-1)], X)
    assert not compute_same([make(-1), make(1)], X)


def test_derivatives_inside_of_a_rule_are_no_difference():
    def make(factor):
        fn = jax.custom_vjp(lambda x: x)
        fn.defvjp(
            lambda x: (jax.nn.relu(x), None),
            lambda _, g: (by_vjp(1)(g) * factor,),
        )
        return fn

    assert compute_same([make(1), make(1)], X)
    assert not compute_same([make(1), make(2)], X)


def test_activations_of_jax_are_equal_to_themselves():
    for name in ("relu", "silu", "gelu", "softplus", "softmax", "celu"):
        fn = getattr(jax.nn, name)
        assert compute_same([lambda x, fn=fn: fn(x * 2) for _ in range(2)], X)

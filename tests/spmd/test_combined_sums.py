"""Sums of a traced function that are made together."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from keras_strategies.spmd import replica_map as rm
from keras_strategies.spmd.buffers import (
    BETWEEN_PROCESSES,
    Buffering,
    with_combined_sums,
)
from keras_strategies.spmd.mesh import ReplicaMesh

pytestmark = pytest.mark.quick

AXIS = "replica"


def psum(value):
    return jax.lax.psum(value, AXIS)


def step(x, state):
    """Two sums at once, one of two arrays, one that waits, one of integers."""
    gradient, error = psum((x.sum(0), (x**2).sum()))
    state = state - gradient
    count = psum((x > 0).sum())
    seen = psum(x.mean())
    late = psum((state * x).sum())
    largest = jax.lax.pmax(x.max(), AXIS)
    unused = psum(x.min())
    del unused
    return state, error, count, seen, late, largest, x, 5


def both(fn, replicas, buffering=BETWEEN_PROCESSES):
    """The function as it is, and with sums combined: results and programs."""
    mesh = ReplicaMesh(devices=tuple(jax.devices("cpu")[:replicas]))

    def combined(*args):
        traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        compute = with_combined_sums(traced, AXIS, buffering)
        return jax.tree.unflatten(
            jax.tree.structure(shapes), compute(*jax.tree.leaves(args))
        )

    x = np.random.default_rng(0).normal(size=(replicas * 4, 3))
    args = x.astype("float32"), np.ones(3, "float32")
    found = []
    for each in (fn, combined):
        whole = rm.replicated_spec()
        mapped = jax.jit(
            rm.replica_map(
                each,
                mesh,
                in_specs=(rm.split_spec(mesh), whole),
                out_specs=whole,
            )
        )
        found.append((mapped(*args), mapped.lower(*args).as_text()))
    return found


@pytest.mark.parametrize("replicas", [1, 2, 3, 8])
def test_combined_sums_are_the_same_sums(replicas):
    (plain, text), (combined, fewer) = both(step, replicas)
    for one, other in zip(plain, combined, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-6)
    # Four of floats in two rounds, one of integers, and the maximum.
    assert text.count("stablehlo.all_reduce") == 6
    # Of a replica that is alone there are no sums to be made.
    assert fewer.count("stablehlo.all_reduce") == (1 if replicas == 1 else 4)


def sum_if(condition, *arrays, dtype=None):
    """Sums multiples of arrays, if the condition holds."""
    return rm.sum_if(
        condition,
        lambda *a: [2 * each for each in a],
        arrays,
        AXIS,
        sum_dtype=dtype,
    )


@pytest.mark.parametrize("offset", [0, 99])
def test_other_sums_are_sent_with_those_of_a_condition(offset):
    def branching(x, state):
        error = psum((x**2).sum())
        is_summed = state.sum() > offset
        first = sum_if(is_summed, x.sum(0), x.max())
        second = sum_if(is_summed, x.min())
        late = psum(first[1] * error)
        # A replica's own, for comparison.
        parts = [psum(each / 2) for each in (*first, *second)]
        return psum(x.mean()), error, late, *parts

    (plain, text), (combined, fewer) = both(branching, 2)
    for one, other in zip(plain, combined, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    count = "stablehlo.all_reduce"
    # Both branches of the first condition, one of the second, and a round.
    assert fewer.count(count) == 4 < text.count(count)


def test_sums_of_a_condition_keep_the_dtype_in_which_they_are_sent():
    def branching(x, state):
        is_summed = state.sum() > 0
        sums = sum_if(is_summed, x.sum(0), dtype="bfloat16")
        return psum(x.mean()), psum(x.min()), sums[0] + 1.0

    (plain, text), (combined, fewer) = both(branching, 2)
    for one, other in zip(plain, combined, strict=True):
        np.testing.assert_array_equal(one, other)
    for program in (text, fewer):
        assert program.count("tensor<3xbf16>) -> tensor<3xbf16>") == 1


def test_what_prints_is_left_as_it_is(capfd):
    def printing(x, state):
        jax.debug.print("row {}", x[0, 0])
        return psum(x.sum()), psum(state.sum())

    (plain, text), (same, other) = both(printing, 2)
    np.testing.assert_allclose(plain, same)
    count = "stablehlo.all_reduce"
    assert text.count(count) == other.count(count) == 2
    jax.effects_barrier()
    assert capfd.readouterr().out.count("row") == 4


def test_sums_of_a_function_with_references_are_left_as_they_are():
    def fn(x, state):
        kept = jax.new_ref(x.sum())
        first = psum(kept[...])
        kept[...] = state.sum()
        return first, psum(kept[...]), psum(x.max())

    (one, text), (other, combined) = both(fn, 2)
    np.testing.assert_array_equal(one, other)
    assert text.count("all_reduce") == combined.count("all_reduce") == 3


def test_arrays_of_several_calls_share_a_buffer():
    def fn(x, state):
        mean, *_ = sum_all(x.mean(0), x.max())
        gradients = sum_all(x.sum(0), x**2, x[0])
        unused = sum_all(x.min(0), x.min())
        del unused
        late = sum_all(gradients[0] * state, mean * state)
        return mean, *gradients, *late

    (plain, text), (combined, fewer) = both(fn, 2)
    for one, other in zip(plain, combined, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
    count = "stablehlo.all_reduce"
    assert (text.count(count), fewer.count(count)) == (6, 2)
    # Of what is used: 2 * 3 + 12 + 3 numbers, and 2 * 3.
    assert {"tensor<21xf32>", "tensor<6xf32>"} <= set(
        re.findall(r"tensor<\d+xf32>", fewer)
    )


def test_sums_of_too_many_shapes_share_no_buffer():
    def fn(x, state):
        return sum_all(x.sum(0), x.max()), sum_all(x.mean(), x.min(), x[0])

    def at_most(limit):
        return Buffering(max_entries=9, max_shapes=limit)

    counts = [
        both(fn, 2, at_most(limit))[1][1].count("stablehlo.all_reduce")
        for limit in (1, 2)
    ]
    assert counts == [5, 1]


def sum_all(*arrays):
    return rm.all_sum(arrays, AXIS)


def inner(value, other):
    first, second = sum_all(value * other, value**2)
    return (first * second).sum() + sum_all(value, other)[0].sum()


TRANSFORMS = {
    "jvp": lambda x, y: jax.jvp(inner, (x[0], y), (x[0], y)),
    "grad": lambda x, y: jax.grad(inner, (0, 1))(x[0], y),
    "vmap": lambda x, y: jax.vmap(inner, (0, None))(x, y),
    # As many rows as columns: only their order tells how they were batched.
    "square": lambda x, y: jax.vmap(lambda row: sum_all(x[:3] @ row, row))(
        x[:3]
    ),
    "columns": lambda x, y: jax.vmap(lambda v: sum_all(v, v**2), in_axes=1)(
        x[:3]
    ),
    "jacfwd": lambda x, y: jax.jacfwd(
        lambda v: sum_all(x[:3] @ v, jnp.sin(x[:3] @ v))
    )(y),
    "linear": lambda x, y: jax.linear_transpose(
        lambda v: sum_all(x[:3] @ v, v), y
    )([x[0], y]),
    "partly": lambda x, y: jax.grad(
        lambda v: sum_all(*sum_all(sum_all(v, v**2)[0], v))[0].sum()
    )(y),
    "loop": lambda x, y: jax.lax.scan(
        lambda carry, row: (carry + psum(row), psum(row.sum())), y, x
    ),
    "jit": lambda x, y: jax.jit(inner)(x[0], y),
    "remat": lambda x, y: jax.grad(jax.checkpoint(inner))(x[0], y),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transformed_functions_have_the_same_sums(transform):
    def fn(x, state):
        return sum_all(x.sum(), x.mean()), transform(x, state)

    (plain, _), (combined, _) = both(fn, 2)
    leaves = jax.tree.leaves(plain), jax.tree.leaves(combined)
    for one, other in zip(*leaves, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)

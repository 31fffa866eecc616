"""Equal operations on all slices of a stack are one operation on the stack."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from keras_strategies.passes.slices.batching import batch_slices
from keras_strategies.passes.slices.comparison import Slice
from keras_strategies.passes.specs import (
    stack_values,
    unstack_values,
)

COUNT = 4
MESH = jax.make_mesh((2,), ("replica",), axis_types=(AxisType.Auto,))


def map_over(fn, **specs):
    return jax.shard_map(
        fn, mesh=MESH, axis_names={"replica"}, check_vma=False, **specs
    )


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def run(fn, *stacks, others=()):
    """Returns the results of a function of lists, and its program.

    Results that are slices are returned as `Slice`s.
    """
    kinds = []

    def on_stacks(stacks, others):
        inputs = [[Slice(s, i, COUNT) for i in range(COUNT)] for s in stacks]
        flat, structure = jax.tree.flatten((inputs, others))
        shapes = [
            jax.ShapeDtypeStruct(x.stack.shape[1:], x.stack.dtype)
            if isinstance(x, Slice)
            else x
            for x in flat
        ]

        def call(*leaves):
            inputs, others = jax.tree.unflatten(structure, leaves)
            return jax.tree.leaves(fn(*inputs, *others))

        outputs = batch_slices(jax.make_jaxpr(call)(*shapes), flat, map_over)
        kinds[:] = [x.place if isinstance(x, Slice) else None for x in outputs]
        return [x.stack if isinstance(x, Slice) else x for x in outputs]

    program = jax.make_jaxpr(on_stacks)(list(stacks), list(others))
    results = jax.jit(on_stacks)(list(stacks), list(others))
    expected = jax.tree.leaves(
        fn(*[[s[i] for i in range(COUNT)] for s in stacks], *others)
    )
    for result, place, value in zip(results, kinds, expected, strict=True):
        found = result if place is None else result[place[0]]
        np.testing.assert_allclose(found, value, rtol=1e-6, atol=1e-6)
    return kinds, program


ALL = [(i, COUNT) for i in range(COUNT)]


def adam(weights, slots, gradients, rate):
    slots = [0.9 * s + 0.1 * g for s, g in zip(slots, gradients, strict=True)]
    # Each weight's update computes the rate again, as Keras's does.
    weights = [
        w - jnp.sqrt(rate) * s for w, s in zip(weights, slots, strict=True)
    ]
    return weights, slots


def test_an_update_of_all_slices_is_one_of_the_stack():
    stacks = [normal(seed, COUNT, 3, 2) for seed in range(3)]
    kinds, program = run(adam, *stacks, others=[jnp.float32(4)])
    assert kinds == ALL + ALL
    names = [e.primitive.name for e in program.jaxpr.eqns]
    assert names.count("sub") == names.count("sqrt") == 1
    assert "slice" not in names


def test_a_norm_over_all_slices_reads_them_and_scales_the_stack():
    def clip(gradients):
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in gradients))
        return [g / norm for g in gradients]

    kinds, _ = run(clip, normal(0, COUNT, 3))
    assert kinds == ALL


@pytest.mark.parametrize(
    "change",
    [
        lambda x, i: x * (2 if i == 1 else 3),
        lambda x, i: x if i == 2 else -x,
        lambda x, i: jnp.sin(x) if i else jnp.cos(x),
    ],
)
def test_operations_that_differ_for_a_slice_are_computed_on_slices(change):
    def differ(values):
        return [change(x, i) for i, x in enumerate(values)]

    kinds, _ = run(differ, normal(0, COUNT, 3))
    assert kinds != ALL


def test_an_operation_on_some_of_the_slices_is_not_computed_on_the_stack():
    def two(values, x):
        return [values[0] @ x, values[2] @ x]

    kinds, program = run(two, normal(0, COUNT, 3, 3), others=[normal(1, 3)])
    assert kinds == [None, None]
    products = [e for e in program.jaxpr.eqns if "dot" in e.primitive.name]
    assert [e.outvars[0].aval.shape for e in products] == [(3,), (3,)]


def test_slices_of_one_index_of_several_stacks_are_combined():
    def combine(first, second):
        crossed = [a + b for a, b in zip(first, second[::-1], strict=True)]
        return [a * b for a, b in zip(first, second, strict=True)], crossed

    kinds, _ = run(combine, normal(0, COUNT, 3), normal(1, COUNT, 3))
    assert kinds == ALL + [None] * COUNT


def test_stacking_all_slices_in_order_is_the_stack():
    def stack(values):
        return stack_values(values), stack_values(values[::-1])

    _, program = run(stack, normal(0, COUNT, 3))
    stacked, reversed_stack = program.jaxpr.outvars
    assert [stacked] == program.jaxpr.invars
    assert reversed_stack is not stacked


def test_slices_pass_through_calls_barriers_and_mapped_functions():
    @jax.jit
    def called(values, x):
        return [v + x for v in jax.lax.optimization_barrier(values)]

    def mapped(values, x):
        stack = stack_values([jax.lax.psum(v, "replica") for v in values])
        return unstack_values(stack * x)

    replicated, split = PartitionSpec(), PartitionSpec("replica")

    def fn(values, x):
        values = map_over(
            mapped, in_specs=(split, replicated), out_specs=replicated
        )(called(values, x), x)
        whole = NamedSharding(MESH, replicated)
        return jax.lax.with_sharding_constraint(values, whole)

    kinds, program = run(fn, normal(0, COUNT, 6), others=[jnp.float32(2)])
    assert kinds == ALL
    text = str(program)
    assert text.count("psum") == text.count("optimization_barrier") == 1
    assert "concatenate[" not in text
    assert "stack[" not in text
    # The dimension of the stack is not sharded.
    assert "P(None, 'replica')" in text


def test_a_literal_or_a_constant_may_be_an_output():
    constant = normal(3, 2)
    kinds, _ = run(
        lambda values: [values[0], 1.0, constant], normal(0, COUNT, 2)
    )
    assert kinds[0] == (0, COUNT)


def test_side_effects_happen_for_each_slice():
    seen = []

    def show(values):
        for v in values:
            jax.debug.callback(lambda x: seen.append(float(x)), v)
        return [v + 1 for v in values]

    run(show, normal(0, COUNT))
    jax.effects_barrier()
    assert len(seen) == 2 * COUNT


def test_a_function_with_references_is_computed_for_each_call():
    @jax.jit
    def pair_norm(first, second):
        total = jax.new_ref(jnp.zeros(()))
        total[...] += jnp.sum(first**2)
        total[...] += jnp.sum(second**2)
        return total[...]

    def norms(values):
        return [pair_norm(*values[:2]), pair_norm(*values[2:])]

    run(norms, normal(0, COUNT, 3))


def test_random_numbers_are_drawn_for_each_slice():
    def draw(values):
        keys = [
            jax.random.key(jnp.int32(v.sum() * 1e3), impl="rbg") for v in values
        ]
        return [jax.random.normal(key, (2,)) for key in keys]

    run(draw, normal(0, COUNT, 3))

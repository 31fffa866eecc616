"""Traced functions cut at their collectives, and compared with others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.extend.core import jaxpr_as_fun

from keras_strategies.passes import stages
from keras_strategies.passes.value_numbers import ValueNumbers

pytestmark = pytest.mark.quick


def two_collectives(x, first, second):
    hidden = jnp.tanh(x)
    halved = first / 2
    return hidden, halved + hidden, second * halved, 3.0, x


ONES = (jnp.ones(3),) * 3


def test_outputs_wait_for_the_collectives_that_they_need():
    traced = jax.make_jaxpr(two_collectives)(*ONES)
    waits = stages.find_output_stages(traced.jaxpr, [0, 1, 2])
    assert waits == [0, 1, 2, 0, 0]


@pytest.mark.parametrize("outputs", [[0], [3, 1], [2], [4], []])
def test_a_part_computes_what_is_asked_and_no_more(outputs):
    traced = jax.make_jaxpr(two_collectives)(*ONES)
    part = stages.select_outputs(traced, outputs)
    values = [np.arange(3.0) + k for k in range(3)]
    whole = two_collectives(*values)
    for got, place in zip(jaxpr_as_fun(part)(*values), outputs, strict=True):
        np.testing.assert_allclose(got, whole[place], rtol=1e-6)
    names = [equation.primitive.name for equation in part.jaxpr.eqns]
    assert ("tanh" in names) == (not {0, 1}.isdisjoint(outputs))
    assert len(names) < len(traced.jaxpr.eqns)


def test_an_equation_that_acts_is_in_one_stage():
    def fn(x, first):
        jax.debug.print("{}", x)
        jax.debug.print("{}", first)
        jax.lax.axis_index("a")
        return x + first

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("a",))
    whole = jax.sharding.PartitionSpec()
    traced = jax.make_jaxpr(
        jax.shard_map(fn, mesh=mesh, in_specs=whole, out_specs=whole)
    )(1.0, 1.0)
    (mapped,) = traced.jaxpr.eqns
    inner = mapped.params["jaxpr"]
    new = [range(1), range(1, 2), range(2, 3), range(1, 3), range(2)]
    found = [stages.find_effects(inner, [0, 1], each) for each in new]
    assert list(map(len, found)) == [1, 1, 0, 1, 2]
    names = {e.primitive.name for each in found for e in each}
    assert names == {"debug_print"}


# Value numbers.


def list_numbers(*functions, args=ONES):
    numbers = ValueNumbers()
    return [
        numbers.number_outputs(jax.make_jaxpr(fn)(*args)) for fn in functions
    ]


def test_the_same_code_has_the_same_number():
    def other(x, first, second):
        halved = first / 2
        again = jnp.tanh(x)
        return again, again + halved, second * halved, 4.0, first

    one, two = list_numbers(two_collectives, other)
    # A sum's operands may be exchanged, but that is not the same code.
    are_equal = [a == b for a, b in zip(one, two, strict=True)]
    assert are_equal == [True, False, True, False, False]


@pytest.mark.parametrize(
    ("one", "two", "is_same"),
    [
        (lambda x: x * 2.0, lambda x: x * 2.0, True),
        (lambda x: x * 0.0, lambda x: x * -0.0, False),
        (lambda x: x * 2.0, lambda x: x * 3.0, False),
        (lambda x: x[:2], lambda x: x[1:], False),
        (lambda x: x.sum(), lambda x: x.max(), False),
        (lambda x: x.astype("int32"), lambda x: x.astype("int8"), False),
        (jax.nn.softmax, jax.nn.softmax, True),
        (lambda x: jnp.where(x > 0, x, 1), lambda x: jnp.where(x > 0, x, 1), 1),
        (lambda x: jnp.where(x > 0, x, 1), lambda x: jnp.where(x > 0, x, 2), 0),
        (
            lambda x: jax.lax.scan(lambda c, r: (c + r, c), 0.0, x),
            lambda x: jax.lax.scan(lambda c, r: (c + r, c), 0.0, x),
            True,
        ),
        (
            lambda x: jax.lax.scan(lambda c, r: (c + r, c), 0.0, x),
            lambda x: jax.lax.scan(lambda c, r: (c - r, c), 0.0, x),
            False,
        ),
        (
            lambda x: jax.lax.cond(x[0] > 0, lambda: x, lambda: -x),
            lambda x: jax.lax.cond(x[0] > 0, lambda: -x, lambda: x),
            False,
        ),
    ],
    ids=[
        *("numbers", "signs", "other-numbers", "slices", "reductions"),
        *("types", "inner", "where", "other-where", "scans", "other-scans"),
        "branches",
    ],
)
def test_other_code_has_another_number(one, two, is_same):
    one, two = list_numbers(one, two, args=(jnp.ones(3),))
    if is_same:
        assert one == two
    else:
        assert one[0] != two[0]


def test_what_is_called_in_python_is_never_the_same():
    def calling():
        shape = jax.ShapeDtypeStruct((), "float32")
        return lambda x: jax.pure_callback(lambda a: a, shape, x.sum())

    one, two = list_numbers(calling(), calling(), args=(jnp.ones(3),))
    assert one != two


def test_constants_are_the_same_if_they_are_one_object():
    mine, yours = np.ones(3), np.ones(3)
    one, two, three = list_numbers(
        lambda x: x * mine,
        lambda x: x * mine,
        lambda x: x * yours,
        args=(jnp.ones(3),),
    )
    assert one == two != three


# References (`jax.new_ref`) carry values past the equations' operands.


def by_reference(x, first):
    kept = jax.new_ref(jnp.zeros(3))
    kept[...] = jnp.tanh(x)
    early = kept[...]
    kept[...] += jnp.cos(first)
    return early, kept[...], x + first


@pytest.mark.parametrize("outputs", [[0], [1], [0, 1], [2]])
def test_what_is_written_to_a_reference_is_waited_for_and_kept(outputs):
    traced = jax.make_jaxpr(by_reference)(*ONES[:2])
    assert stages.has_references(traced.jaxpr)
    assert not stages.find_effects(traced.jaxpr, [0, 1], 0)
    assert stages.find_output_stages(traced.jaxpr, [0, 1]) == [0, 1, 1]
    part = stages.select_outputs(traced, outputs)
    values = np.arange(3.0, dtype="float32"), np.ones(3, "float32")
    whole = jax.jit(by_reference)(*values)
    for got, place in zip(jaxpr_as_fun(part)(*values), outputs, strict=True):
        np.testing.assert_allclose(got, whole[place], rtol=1e-6)
    names = [equation.primitive.name for equation in part.jaxpr.eqns]
    assert ("tanh" in names) == (outputs != [2])
    assert ("cos" in names) == (1 in outputs)


def test_code_with_references_is_never_the_same():
    def writing():
        def fn(x):
            kept = jax.new_ref(jnp.zeros(3))
            kept[...] = x
            return kept[...]

        return fn

    one, two = list_numbers(writing(), writing(), args=ONES[:1])
    assert one != two


# What may differ between the replicas.


def mapped_jaxpr(fn, *args):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("a",))
    whole = jax.sharding.PartitionSpec()
    mapped = jax.shard_map(
        fn, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False
    )
    (equation,) = jax.make_jaxpr(mapped)(*args).jaxpr.eqns
    return equation.params["jaxpr"]


def test_only_what_is_made_of_equal_values_is_equal():
    def fn(own, common):
        kept = jax.new_ref(jnp.zeros(()))
        before = kept[...]
        kept[...] = own
        number = jax.lax.axis_index("a")
        later = jax.jit(lambda: jax.lax.axis_index("a") + 1)()
        shape = jax.ShapeDtypeStruct((), "float32")
        answer = io_callback(lambda: np.float32(1), shape)
        return (
            *(own, common, own * common, common * 2, 7.0),
            *(before, kept[...], number, later, answer),
        )

    found = stages.find_differing_outputs(
        mapped_jaxpr(fn, *[jnp.ones(())] * 2), [True, False]
    )
    assert found == [
        *(True, False, True, False, False),
        *(False, True, True, True, True),
    ]


@pytest.mark.parametrize("reduce", [jax.lax.psum, jax.lax.pmax, jax.lax.pmin])
def test_reductions_over_an_axis_of_vmap_are_no_collectives(reduce):
    """Otherwise programs of uneven rows would exchange their results."""

    def of_rows(x):
        return jax.vmap(lambda row: reduce(row, "rows"), axis_name="rows")(x)

    equation, *_ = jax.make_jaxpr(of_rows)(np.ones((3, 2))).jaxpr.eqns
    assert not stages.is_collective(equation)
    assert stages.reduced_dims(equation) == (0,)
    both = jax.make_jaxpr(
        lambda x: jax.vmap(
            lambda row: reduce(row, ("rows", "all")), axis_name="rows"
        )(x),
        axis_env=[("all", 2)],
    )(np.ones((3, 2)))
    assert any(map(stages.is_collective, both.jaxpr.eqns))

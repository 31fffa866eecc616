"""`strategy.extended`: what libraries call."""

import copy

import jax
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.support.per_replica import ids, make_variable
from tests.support.plain_keras import mirrored


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_update_writes_every_copy(replicas):
    strategy = mirrored(replicas)
    variable = make_variable(strategy, 3.0)
    strategy.extended.update(variable, lambda v, x: v.assign_sub(x), args=(2,))
    assert float(variable.value) == 1.0
    results = strategy.extended.update(
        variable,
        lambda v, x: v.assign_add(x),
        kwargs={"x": np.float32(4)},
        group=False,
    )
    assert [float(r) for r in results] == [5.0] * replicas
    assert_replicated(variable)


@pytest.mark.parametrize("aggregation", ["none", "sum", "mean"])
def test_update_refuses_copies_that_would_differ(aggregation):
    strategy = mirrored(2)
    variable = make_variable(strategy, aggregation=aggregation)
    with pytest.raises(ValueError, match="different values"):
        strategy.extended.update(
            variable, lambda v, x: v.assign(x), args=(ids(strategy),)
        )
    assert_replicated(variable)


def test_the_optimizer_pattern_of_tf():
    """Gradients are reduced in a merge, which updates the variables."""
    strategy = mirrored(2)
    variable = make_variable(strategy, 1.0)

    def merge(strategy, gradient):
        assert ks.in_cross_replica_context()
        reduced = strategy.extended.reduce_to("sum", gradient, variable)
        strategy.extended.update(
            variable, lambda v, g: v.assign_sub(0.1 * g), args=(reduced,)
        )

    def step(x):
        (gradient,) = ks.grad(lambda: variable.value * x, [variable])()
        ks.get_replica_context().merge_call(merge, args=(gradient,))

    strategy.run(step, args=(ids(strategy),))
    assert float(variable.value) == pytest.approx(0.9)
    with strategy.debug():
        strategy.run(step, args=(ids(strategy),))
    assert float(variable.value) == pytest.approx(0.8)
    assert_replicated(variable)


def test_a_merge_that_would_write_copies_that_differ():
    strategy = mirrored(2)
    variable = make_variable(strategy, 1.0)

    def merge(strategy, x):
        strategy.extended.update(variable, lambda v, x: v.assign(x), args=(x,))

    def step(x):
        ks.get_replica_context().merge_call(merge, args=(x,))

    with pytest.raises(ValueError, match="different values"):
        strategy.run(step, args=(ids(strategy),))


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_value_is_broadcast(replicas):
    strategy = mirrored(replicas)
    value = strategy.extended.broadcast_to(2.5)
    assert isinstance(value, jax.Array if replicas == 1 else ks.Mirrored)
    assert float(strategy.reduce("mean", value, axis=None)) == 2.5
    results = strategy.run(lambda x: x * 2, args=(value,))
    assert float(strategy.reduce("sum", results, axis=None)) == 5.0 * replicas


def test_call_for_each_replica_is_run():
    strategy = mirrored(2)
    results = strategy.extended.call_for_each_replica(
        lambda x: x + 1, args=(ids(strategy),)
    )
    assert [float(r) for r in results.values] == [1.0, 2.0]


@pytest.mark.parametrize(
    "call",
    [
        lambda s, v: s.extended.update(v, lambda v: None),
        lambda s, v: s.extended.reduce_to("sum", 1.0, v),
        lambda s, v: s.extended.broadcast_to(1.0),
        lambda s, v: s.extended.call_for_each_replica(lambda: None),
    ],
)
def test_methods_of_the_cross_replica_context(call):
    strategy = mirrored(2)
    variable = make_variable(strategy)
    with pytest.raises(RuntimeError, match="cross-replica context"):
        strategy.run(lambda: call(strategy, variable))


def test_replicas_are_not_started_in_a_merge():
    strategy = mirrored(2)

    def step():
        context = ks.get_replica_context()
        context.merge_call(lambda strategy: strategy.run(lambda: 1))

    with pytest.raises(RuntimeError, match="while the replicas run"):
        strategy.run(step)


def test_what_is_no_variable_is_refused():
    strategy = mirrored(2)
    with pytest.raises(TypeError, match="expects a Keras variable"):
        strategy.extended.update(1.0, lambda v: None)


def test_other_names_are_plain_attribute_errors():
    strategy = mirrored(2)
    with pytest.raises(AttributeError, match="no attribute 'nonsense'$"):
        strategy.nonsense  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nonsense'$"):
        strategy.extended.nonsense  # noqa: B018


def test_a_strategy_is_not_copied():
    strategy = mirrored(2)
    assert copy.copy(strategy) is strategy
    assert copy.deepcopy({"a": strategy})["a"] is strategy

"""Variables with a copy of their own on each replica."""

import copy

import keras
import numpy as np
import pytest

import keras_strategies as ks
from tests.support.combinations import combine
from tests.support.plain_keras import mirrored


def make(strategy, aggregation, value=0.0, **kwargs):
    with strategy.scope():
        return keras.Variable(
            value,
            synchronization="on_read",
            aggregation=aggregation,
            name="v",
            **kwargs,
        )


def replica_id():
    return ks.get_replica_context().replica_id_in_sync_group


def copies(strategy, variable):
    return [float(c) for c in strategy.experimental_local_results(variable)]


def add_id(variable):
    def step():
        variable.assign_add(1.0 + replica_id())
        return variable.value

    return step


READ = {"sum": sum, "mean": np.mean, "only_first_replica": lambda c: c[0]}


@pytest.mark.parametrize(
    ("aggregation", "replicas"), combine(READ, [1, 2, 3, 8], every=2)
)
def test_replicas_write_their_own_copy(aggregation, replicas):
    strategy = mirrored(replicas)
    variable = make(strategy, aggregation, 2.0)
    expected = [2.0] * replicas
    step = add_id(variable)
    for _ in range(3):
        assert float(variable.value) == pytest.approx(
            float(READ[aggregation](expected))
        )
        local = strategy.run(step)
        expected = [e + 1 + i for i, e in enumerate(expected)]
        assert copies(strategy, variable) == expected
        assert [
            float(v) for v in strategy.experimental_local_results(local)
        ] == expected


@pytest.mark.parametrize(
    ("aggregation", "shares"),
    [
        ("sum", [3.0, 3.0]),
        ("mean", [6.0, 6.0]),
        ("only_first_replica", [6.0, 6.0]),
        ("none", [6.0, 6.0]),
    ],
)
def test_what_is_assigned_outside_is_shared_out(aggregation, shares):
    strategy = mirrored(2)
    variable = make(strategy, aggregation)
    step = add_id(variable)
    strategy.run(step)
    variable.assign(6.0)
    assert copies(strategy, variable) == shares
    strategy.run(step)
    assert copies(strategy, variable) == [shares[0] + 1, shares[1] + 2]


def test_a_sum_that_is_added_to_outside_grows_by_that():
    strategy = mirrored(2)
    variable = make(strategy, "sum")
    step = add_id(variable)
    strategy.run(step)
    variable.assign_add(4.0)
    assert float(variable.value) == 7.0
    strategy.run(step)
    assert float(variable.value) == 10.0


def test_an_integer_is_shared_out_without_a_rest():
    strategy = mirrored(3)
    variable = make(strategy, "sum", 0, dtype="int32")
    variable.assign(8)
    strategy.run(lambda: variable.assign_add(1))
    assert copies(strategy, variable) == [4.0, 4.0, 3.0]
    assert int(variable.value) == 11


def test_without_an_aggregation_there_is_no_one_value():
    strategy = mirrored(2)
    variable = make(strategy, "none", 1.0)
    strategy.run(add_id(variable))
    assert copies(strategy, variable) == [2.0, 3.0]
    for read in (
        lambda: float(variable.value),
        lambda: np.asarray(variable.value),
        lambda: variable.numpy(),
        lambda: variable + 1.0,
    ):
        with pytest.raises(ValueError, match="must have an aggregation"):
            read()
    with pytest.raises(ValueError, match="__jax_array__"):
        keras.ops.exp(variable)


def test_copies_are_reduced_and_gathered():
    strategy = mirrored(3)
    variable = make(strategy, "mean", 1.0)
    strategy.run(add_id(variable))
    assert float(strategy.reduce("sum", variable, axis=None)) == 9.0
    assert float(strategy.reduce("mean", variable, axis=None)) == 3.0


def test_held_copies_survive_a_run():
    strategy = mirrored(2)
    variable = make(strategy, "sum")
    held = strategy.experimental_local_results(variable)
    total = variable.value
    strategy.run(add_id(variable))
    assert [float(h) for h in held] == [0.0, 0.0]
    assert float(total) == 0.0


def test_gradients_are_of_the_own_copy_and_local():
    strategy = mirrored(2)
    variable = make(strategy, "mean", 3.0)
    strategy.run(add_id(variable))

    def step():
        (gradient,) = ks.grad(lambda: variable.value**2, [variable])()
        return gradient

    gradients = strategy.experimental_local_results(strategy.run(step))
    assert [float(g) for g in gradients] == [8.0, 10.0]


def test_written_in_a_function_with_uneven_rows():
    strategy = mirrored(2)
    variable = make(strategy, "sum")
    rows = strategy.experimental_distribute_dataset(
        strategy.experimental_make_numpy_dataset(np.ones((3, 1))).batch(3)
    )

    def step(x):
        variable.assign_add(keras.ops.sum(x))

    for batch in rows:
        strategy.run(step, args=(batch,))
    assert copies(strategy, variable) == [2.0, 1.0]


def test_made_on_the_first_call_of_a_function():
    strategy = mirrored(2)
    made = []

    def step():
        if not made:
            made.append(
                keras.Variable(
                    1.0,
                    synchronization="on_read",
                    aggregation="sum",
                    name="inside",
                )
            )
        made[0].assign_add(1.0 + replica_id())

    strategy.run(step)
    strategy.run(step)
    assert copies(strategy, made[0]) == [3.0, 5.0]
    assert float(made[0].value) == 8.0


def test_saved_and_restored_as_its_aggregate(tmp_path):
    strategy = mirrored(2)
    variable = make(strategy, "sum")
    strategy.run(add_id(variable))
    np.save(tmp_path / "v.npy", variable.numpy())
    other = make(mirrored(3), "sum")
    other.assign(np.load(tmp_path / "v.npy"))
    assert float(other.value) == 3.0


def test_a_copy_of_the_variable_is_one_of_its_own():
    strategy = mirrored(2)
    variable = make(strategy, "sum")
    strategy.run(add_id(variable))
    other = copy.deepcopy(variable)
    strategy.run(add_id(other))
    assert copies(strategy, variable) == [1.0, 2.0]
    assert copies(strategy, other) == [2.0, 4.0]


def test_outside_of_a_scope_it_is_a_plain_variable():
    variable = keras.Variable(
        1.0, synchronization="on_read", aggregation="sum", name="plain"
    )
    strategy = mirrored(2)
    strategy.run(lambda: variable.assign_add(1.0))
    assert float(variable.value) == 3.0


def test_metrics_stay_whole():
    strategy = mirrored(2)
    with strategy.scope():
        metric = keras.metrics.Sum()
    strategy.run(lambda: metric.update_state(1.0 + replica_id()))
    assert float(metric.result()) == 3.0
    assert float(metric.total.value) == 3.0


@pytest.mark.parametrize("synchronization", ["none", None])
def test_no_synchronization_is_refused(synchronization):
    strategy = mirrored(2)
    with (
        strategy.scope(),
        pytest.raises(ValueError, match="mode is not supported"),
    ):
        keras.Variable(1.0, synchronization=synchronization)

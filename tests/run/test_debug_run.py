"""Debug mode: Python itself on each replica, with the program's numbers."""

import jax
import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.support.combinations import combine
from tests.support.plain_keras import assert_same, mirrored

_random = np.random.default_rng(3)
# Five of each: op by op, every other shape is compiled for itself.
X = _random.normal(size=(20, 5)).astype("float32")
Y = _random.integers(0, 5, 20).astype("int32")


def make(strategy):
    """A step with most of what a replica's function can do."""
    with strategy.scope():
        keras.utils.set_random_seed(4)
        model = keras.Sequential(
            [
                keras.Input((5,)),
                keras.layers.Dense(5, activation="relu"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3, seed=7),
                keras.layers.Dense(5),
            ]
        )
        # A small gradient makes no large step, whatever its rounding.
        optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        rows = keras.Variable(0, dtype="int32", aggregation="sum", name="rows")
        own = keras.Variable(
            0.0, synchronization="on_read", aggregation="sum", name="own"
        )
    loss_of = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )

    def step(x, y):
        context = ks.get_replica_context()

        def loss_fn():
            logits = model(x, training=True)
            accuracy.update_state(y, logits)
            return ops.sum(loss_of(y, logits)) / 8

        loss, grads = ks.value_and_grad(loss_fn, model.trainable_variables)()
        optimizer.apply(grads, model.trainable_variables)
        rows.assign_add(x.shape[0])
        own.assign_add(loss)
        total = context.all_reduce("sum", loss)
        return {"loss": loss, "total": total, "x": x, "name": "step"}

    variables = (
        *model.variables,
        *optimizer.variables,
        *accuracy.variables,
        rows,
    )
    return step, variables, own


def results(strategy, batch_size, debug):
    step, variables, own = make(strategy)
    dataset = strategy.experimental_distribute_dataset(
        strategy.experimental_make_numpy_dataset((X, Y)).batch(batch_size)
    )
    found = []
    for batch in dataset:
        if debug:
            with strategy.debug():
                result = strategy.run(step, args=batch)
        else:
            result = strategy.run(step, args=batch)
        assert result["name"] == "step"
        found.append(
            {
                "sum": strategy.reduce("sum", result["loss"], axis=None),
                "total": strategy.experimental_local_results(result["total"]),
                "x": strategy.gather(result["x"], axis=0),
            }
        )
    assert_replicated(*variables)
    copies = strategy.experimental_local_results(own)
    values = [np.asarray(v.value) for v in (*variables, own)]
    return jax.tree.map(np.asarray, (found, copies, values))


@pytest.mark.parametrize(
    ("replicas", "batch_size"),
    [
        (2, 7),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in ((1, 8), (2, 8), (3, 7), (3, 8), (8, 7))
        ),
    ],
)
def test_a_training_step_has_the_programs_numbers(replicas, batch_size):
    compiled = results(mirrored(replicas), batch_size, debug=False)
    eager = results(mirrored(replicas), batch_size, debug=True)
    assert_same(compiled, eager)


def test_python_runs_on_every_replica_in_turn():
    seen = []

    def step(x):
        context = ks.get_replica_context()
        replica = context.replica_id_in_sync_group
        assert isinstance(replica, int)
        seen.append(("start", replica))
        # A branch that no traced program could take.
        y = x * 2 if replica == 1 and float(x) > 0 else x
        total = context.all_reduce("sum", y)
        seen.append(("end", replica, float(total)))
        return total

    strategy = mirrored(3)
    x = strategy.experimental_distribute_values_from_function(
        lambda c: np.float32(c.replica_id_in_sync_group)
    )
    with strategy.debug():
        totals = strategy.run(step, args=(x,))
    assert seen[:3] == [("start", 0), ("start", 1), ("start", 2)]
    assert seen[3:] == [("end", 0, 4.0), ("end", 1, 4.0), ("end", 2, 4.0)]
    assert [float(t) for t in totals.values] == [4.0] * 3
    # And the mode ends with the block.
    assert "Tracer" in str(strategy.run(lambda x: repr(x), args=(x,)))


@pytest.mark.parametrize("replicas", combine([2, 8], every=2))
def test_gradients_flow_through_collectives(replicas):
    strategy = mirrored(replicas)
    x = strategy.experimental_distribute_values_from_function(
        lambda c: np.arange(3, dtype="float32") + c.replica_id_in_sync_group
    )

    def step(x):
        context = ks.get_replica_context()

        def loss(x):
            mean = context.all_reduce("mean", x)
            rows = context.all_gather(x, axis=0)
            total = ops.sum(rows * ops.arange(rows.shape[0], dtype="float32"))
            return ops.sum((x - mean) ** 3) + total**2 / 100

        return jax.grad(loss)(x)

    compiled = strategy.gather(strategy.run(step, args=(x,)), axis=0)
    with strategy.debug():
        eager = strategy.gather(strategy.run(step, args=(x,)), axis=0)
    assert_same(np.asarray(compiled), np.asarray(eager))


def test_variables_made_in_the_first_call_are_kept():
    strategy = mirrored(2)
    made = []

    def step(x):
        if not made:
            made.append(
                keras.Variable(1.0, aggregation="mean", name="made_here")
            )
        made[0].assign_add(x)
        return made[0].value

    x = strategy.experimental_distribute_values_from_function(
        lambda c: np.float32(2 * c.replica_id_in_sync_group)
    )
    with strategy.debug():
        strategy.run(step, args=(x,))
        strategy.run(step, args=(x,))
    strategy.run(step, args=(x,))
    assert len(made) == 1
    assert float(made[0].value) == 4.0
    assert_replicated(made[0])


def structures_that_differ():
    replica = ks.get_replica_context().replica_id_in_sync_group
    return (1.0,) if replica else [1.0]


def shapes_that_differ():
    context = ks.get_replica_context()
    rows = 1 + context.replica_id_in_sync_group
    return context.all_reduce("sum", ops.ones((rows,)))


def a_collective_on_one_replica():
    context = ks.get_replica_context()
    if context.replica_id_in_sync_group == 1:
        context.all_reduce("sum", 1.0)


def a_collective_too_many():
    context = ks.get_replica_context()
    if context.replica_id_in_sync_group == 0:
        context.all_reduce("sum", 1.0)


def a_merge_call_on_one_replica():
    context = ks.get_replica_context()
    if int(context.replica_id_in_sync_group) == 1:
        context.merge_call(lambda strategy: None)


def a_collective_in_jit():
    context = ks.get_replica_context()
    jax.jit(lambda x: context.all_reduce("sum", x))(1.0)


@pytest.mark.parametrize(
    ("fn", "error", "text"),
    [
        (structures_that_differ, ValueError, "results of the same structure"),
        (shapes_that_differ, ValueError, "same shapes and dtypes on all"),
        (a_collective_on_one_replica, RuntimeError, "same collectives"),
        (a_collective_too_many, RuntimeError, "same collectives"),
        (a_merge_call_on_one_replica, RuntimeError, "same collectives"),
        (a_collective_in_jit, RuntimeError, "In debug mode"),
    ],
)
def test_what_differs_between_replicas_is_reported(fn, error, text):
    strategy = mirrored(2)
    with strategy.debug(), pytest.raises(error, match=text):
        strategy.run(fn)
    # No thread is left waiting, and the strategy works.
    assert strategy.run(lambda: 3) == 3


def test_an_exception_of_one_replica_ends_all():
    class Trouble(Exception):
        pass

    strategy = mirrored(3)
    with strategy.scope():
        variable = keras.Variable(1.0, aggregation="sum", name="kept")

    def step():
        context = ks.get_replica_context()
        variable.assign(5.0)
        if context.replica_id_in_sync_group == 1:
            raise Trouble
        context.all_reduce("sum", 1.0)

    with strategy.debug(), pytest.raises(Trouble):
        strategy.run(step)
    assert float(variable.value) == 1.0


def test_settings_of_keras_hold_in_replicas():
    strategy = mirrored(2)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        with strategy.debug():
            name = strategy.run(lambda: keras.config.dtype_policy().name)
    finally:
        keras.config.set_dtype_policy(before)
    assert name == "mixed_bfloat16"

"""What `run` compiles where replicas hold different numbers of rows."""

import itertools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.experimental import io_callback

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.support.combinations import combine, few
from tests.support.plain_keras import dense, mirrored


def make_batch(strategy, rows):
    random = np.random.default_rng(0)
    data = [random.normal(size=(count, 3)).astype("float32") for count in rows]
    return strategy.experimental_distribute_values_from_function(
        lambda context: data[context.replica_id_in_sync_group]
    )


def loop(strategy, *, optimizer="Adam"):
    """A training step with a metric, updated before and after the weights."""
    with strategy.scope():
        layers = dense(5), dense(1)
        layers[0].build((None, 3))
        layers[1].build((None, 5))
        weights = layers[0].trainable_variables + layers[1].trainable_variables
        optimizer = getattr(keras.optimizers, optimizer)(0.01)
        before, after = keras.metrics.Mean(), keras.metrics.Mean()

    def step(x):
        def loss():
            values = layers[1](layers[0](x))
            before.update_state(values)
            return jnp.sum(values**2) / 8

        value, gradients = ks.value_and_grad(loss, weights)()
        optimizer.apply(gradients, weights)
        after.update_state(x[:, 0])
        return value

    return step, [*weights, *optimizer.variables, *before.variables]


def text_of(strategy, step, batch):
    """The program of `run`'s last call, as JAX lowers it."""
    strategy.run(step, args=(batch,))
    runner = strategy._runner
    ((program, *_),) = runner._programs.values()
    _, array = runner._convert_argument(batch)
    return program.lower([array]).as_text()


@pytest.mark.parametrize(
    "rows", combine([(4, 2), (3, 2, 2), (2, 2, 2, 2, 2, 2, 1, 0)], every=3)
)
def test_nothing_is_computed_twice(rows):
    strategy = mirrored(len(rows))
    step, _ = loop(strategy)
    text = text_of(strategy, step, make_batch(strategy, rows))
    even = mirrored(len(rows))
    step, _ = loop(even)
    once = text_of(even, step, make_batch(even, [2] * len(rows)))
    count, variants = "stablehlo.dot_general", len(set(rows))
    assert text.count(count) == variants * once.count(count) > 0
    # Adam's, of four weights.
    assert text.count("stablehlo.sqrt") == once.count("stablehlo.sqrt")


def test_updates_are_computed_outside_of_the_branches():
    """So no one need send the weights: all compute them by one code."""
    strategy = mirrored(2)
    step, _ = loop(strategy)
    text = text_of(strategy, step, make_batch(strategy, (4, 2)))
    even = mirrored(2)
    step, _ = loop(even)
    once = text_of(even, step, make_batch(even, (2, 2)))
    count = "stablehlo.all_reduce"
    assert text.count(count) == once.count(count)


@pytest.mark.parametrize(
    ("rows", "optimizer"),
    combine(
        [(4, 2), (3, 0, 1)], ["SGD", "AdamW", "Lamb", "Adafactor"], every=4
    ),
)
def test_state_is_the_same_on_all_replicas(optimizer, rows):
    strategy = mirrored(len(rows))
    step, variables = loop(strategy, optimizer=optimizer)
    batch = make_batch(strategy, rows)
    for _ in range(5):
        strategy.run(step, args=(batch,))
    assert_replicated(*variables)


class Langevin(keras.optimizers.SGD):
    """An update that draws its own random numbers."""

    def build(self, variables):
        super().build(variables)
        self.seeds = keras.random.SeedGenerator(3)

    def update_step(self, gradient, variable, rate):
        noise = keras.random.normal(variable.shape, seed=self.seeds)
        super().update_step(gradient + noise, variable, rate)


def as_given(optimizer, weights, gradients, x):
    optimizer.apply(gradients, weights)


def scaled_by_own_rows(optimizer, weights, gradients, x):
    """Gradients that are another's on each replica."""
    own = ks.get_replica_context().replica_id_in_sync_group + x.sum()
    optimizer.apply([g + 0 * own + own for g in gradients], weights)


def at_own_rate(optimizer, weights, gradients, x):
    """A hyperparameter that is another on each replica."""
    number = ks.get_replica_context().replica_id_in_sync_group
    optimizer.learning_rate.assign(0.1 * (number + 1))
    optimizer.apply(gradients, weights)


def after_own_noise(optimizer, weights, gradients, x):
    """Weights that each replica has changed before."""
    for weight in weights:
        weight.assign_add(0.1 * x.sum() + 0 * weight)
    optimizer.apply(gradients, weights)


@pytest.mark.parametrize("rows", combine([(4, 2), (3, 0, 1)], every=2))
@pytest.mark.parametrize(
    ("optimizer", "apply"),
    few(
        [
            (Langevin, as_given),
            (keras.optimizers.SGD, scaled_by_own_rows),
            (keras.optimizers.SGD, at_own_rate),
            (keras.optimizers.SGD, after_own_noise),
        ],
        every=2,
    ),
    ids=["random", "gradients", "rate", "weights"],
)
def test_an_update_from_a_replicas_own_values_leaves_one_state(
    optimizer, apply, rows
):
    """All copies are the same also where what an update reads is not."""
    strategy = mirrored(len(rows))
    with strategy.scope():
        weight = keras.Variable(np.ones(3, "float32"), aggregation="mean")
        optimizer = optimizer(0.1)
        optimizer.build([weight])

    def step(x):
        def loss():
            return jnp.sum(x @ weight.value) / 6

        _, gradients = ks.value_and_grad(loss, [weight])()
        apply(optimizer, [weight], gradients, x)

    batch = make_batch(strategy, rows)
    for _ in range(3):
        strategy.run(step, args=(batch,))
    assert_replicated(weight, *optimizer.variables)
    assert not np.allclose(weight, 1)


def test_a_reference_keeps_its_value_past_a_collective():
    strategy = mirrored(2)

    def fn(x):
        kept = jax.new_ref(jnp.zeros(()))
        kept[...] = jnp.float32(x.size)
        total = ks.get_replica_context().all_reduce("sum", jnp.ones(()))
        kept[...] += total
        return kept[...], total

    found, _ = strategy.run(fn, args=(make_batch(strategy, (4, 2)),))
    values = strategy.experimental_local_results(found)
    assert [float(value) for value in values] == [14.0, 8.0]


def test_what_python_answers_is_one_value_in_all_results():
    strategy = mirrored(2)
    tickets = itertools.count(1)

    def ticket():
        return np.float32(next(tickets))

    def fn(x):
        answer = io_callback(ticket, jax.ShapeDtypeStruct((), "float32"))
        total = ks.get_replica_context().all_reduce("sum", x.sum())
        return answer, answer + 0 * total

    before, after = strategy.run(fn, args=(make_batch(strategy, (4, 2)),))
    before, after = map(strategy.experimental_local_results, (before, after))
    assert before == after
    assert float(before[0]) != float(before[1])


@pytest.mark.parametrize("rows", combine([(2, 2), (2, 1), (1, 1, 2)], every=3))
def test_a_replica_prints_once(rows, capfd):
    strategy = mirrored(len(rows))
    step, _ = loop(strategy)

    def printing(x):
        jax.debug.print("before {}", x.sum())
        loss = step(x)
        jax.debug.print("after {}", loss)
        total = ks.get_replica_context().all_reduce("sum", loss)
        jax.debug.print("total {}", total)
        return total

    strategy.run(printing, args=(make_batch(strategy, rows),))
    jax.effects_barrier()
    words = [line.split()[0] for line in capfd.readouterr().out.splitlines()]
    assert sorted(words) == sorted(["before", "after", "total"] * len(rows))


def test_collectives_that_need_no_others_result_share_a_stage(capfd):
    strategy = mirrored(3)

    def fn(x):
        def add(value):
            return ks.get_replica_context().all_reduce("sum", value)

        rows, own = x.shape[0], x.sum()
        total, count = add(own), add(jnp.bfloat16(rows))
        jax.debug.print("count {}", count)
        both = add(total + rows), add(count.astype("int32") * rows)
        others = [add(own * k) for k in range(5)]
        jax.debug.print("rows {}", rows)
        return (own * total, *both, others[4])

    batch = make_batch(strategy, (3, 0, 1))
    # Before any result, and with those of the first two.
    assert text_of(strategy, fn, batch).count("stablehlo.case") == 2
    jax.effects_barrier()
    printed = capfd.readouterr().out.splitlines()
    counts = ["count 4.0"] * 3
    assert sorted(printed) == [*counts, "rows 0", "rows 1", "rows 3"]
    scaled, *found = strategy.run(fn, args=(batch,))
    own = [x.sum() for x in strategy.experimental_local_results(batch)]
    total = sum(own)
    scaled = strategy.experimental_local_results(scaled)
    np.testing.assert_allclose(scaled, [total * each for each in own], 1e-5)
    found = [strategy.experimental_local_results(each)[0] for each in found]
    np.testing.assert_allclose(found, [3 * total + 4, 16, 4 * total], 1e-5)


def test_what_rows_say_is_each_replicas_own():
    """A number of rows is no common code, though no row is read for it."""
    strategy = mirrored(3)
    with strategy.scope():
        rows = keras.Variable(0.0, aggregation="sum")
        maximum = ks.merge(keras.Variable(0, dtype="int32"), "max")

    def fn(x):
        rows.assign_add(float(x.shape[0]))
        maximum.assign(x.shape[0] + 0 * maximum.value)
        count = ks.get_replica_context().all_reduce("sum", jnp.ones(()))
        return count * x.shape[0], jnp.zeros((2,)) + x.shape[0]

    for _ in range(2):
        scaled, counts = strategy.run(
            fn, args=(make_batch(strategy, (3, 0, 5)),)
        )
    values = strategy.experimental_local_results(scaled)
    assert [float(value) for value in values] == [9.0, 0.0, 15.0]
    values = strategy.experimental_local_results(counts)
    assert [value.tolist() for value in values] == [[3] * 2, [0] * 2, [5] * 2]
    assert (float(rows), int(maximum)) == (16.0, 5)


def test_random_numbers_are_drawn_as_often_as_the_longest_replica_draws():
    strategy = mirrored(2)
    with strategy.scope():
        dropout = keras.layers.Dropout(0.5, seed=3)

    def fn(x):
        for _ in range(x.shape[0]):
            noise = dropout(jnp.ones((64,)), training=True)
        total = ks.get_replica_context().all_reduce("sum", noise.sum())
        return noise, total

    batch = make_batch(strategy, (3, 1))
    first, total = strategy.run(fn, args=(batch,))
    assert int(dropout.seed_generator.state.value[1]) == 3
    one, other = strategy.experimental_local_results(first)
    assert not np.array_equal(one, other)
    mean = strategy.reduce("mean", total, axis=None)
    assert float(mean) == pytest.approx(float(one.sum()) + float(other.sum()))

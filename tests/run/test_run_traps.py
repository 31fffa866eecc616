"""What an adversary found in loops of one's own: each as it should be."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.support.plain_keras import dense, mirrored


def by_replica(strategy, fn):
    return strategy.experimental_distribute_values_from_function(
        lambda c: fn(c.replica_id_in_sync_group)
    )


def ids(strategy):
    return by_replica(strategy, lambda i: np.float32(i + 1))


def uneven(strategy, rows):
    dataset = strategy.experimental_distribute_dataset(iter([rows]))
    return next(iter(dataset))


def values(per_replica):
    return [np.asarray(v).tolist() for v in per_replica.values]


# Functions that are equal, and are not.

SCRIPT = """
with strategy.scope():
    weight = keras.Variable(1.0, name="weight")
def helper():
    return SCALE * weight.value
def step(x):
    return helper() * x
result = strategy.run(step, args=(x,))
"""


def test_a_loop_of_a_script_that_makes_its_model_anew():
    strategy = mirrored(2)
    scope = {"strategy": strategy, "keras": keras, "x": ids(strategy)}
    scope["SCALE"] = 1.0
    code = compile(SCRIPT, "script", "exec")
    exec(code, scope)
    first = scope["weight"]
    first.assign(100.0)
    exec(code, scope)
    assert values(scope["result"]) == [1.0, 2.0]
    scope["SCALE"] = 10.0
    exec(code, scope)
    assert values(scope["result"]) == [10.0, 20.0]
    # And what did not change is not compiled again.
    count = strategy._runner.num_programs
    exec("result = strategy.run(step, args=(x,))", scope)
    assert strategy._runner.num_programs == count


def test_numbers_that_compare_equal_and_are_not():
    strategy = mirrored(2)

    def sign(number):
        return jnp.copysign(1.0, number) + 0 * ids_context

    ids_context = jnp.zeros(())
    assert values(strategy.run(sign, args=(0.0,))) == [1.0, 1.0]
    assert values(strategy.run(sign, args=(-0.0,))) == [-1.0, -1.0]
    for _ in range(3):
        strategy.run(lambda x: jnp.asarray(x), args=(float("nan"),))
    assert strategy._runner.num_programs == 3


def test_layers_that_were_frozen_when_the_program_was_made():
    strategy = mirrored(2)
    with strategy.scope():
        layer = dense(1)
        layer.build((None, 1))

    def step(x):
        if not layer.trainable_variables:
            return -jnp.ones(())
        return jnp.ones(())

    for flag in (True, False, True, False, True):
        layer.trainable = flag
        result = strategy.run(step, args=(ids(strategy),))
        assert values(result) == [1.0 if flag else -1.0] * 2
    # A loop that freezes layers in turn does not compile each time.
    assert strategy._runner.num_programs == 2


# What JAX keeps of inner functions.


def test_functions_that_jax_keeps_see_the_variables():
    strategy = mirrored(2)
    with strategy.scope():
        weight = keras.Variable(3.0, name="weight")
        layer = keras.layers.Dense(1, kernel_initializer="ones")
        layer.build((None, 2))
    compiled = jax.jit(lambda x: x + weight.value)
    rematerialized = keras.remat(layer)

    def body(carry, x):
        return carry + x * weight.value, carry

    def step(x):
        total, _ = jax.lax.scan(body, 0 * x, jnp.ones(3))
        return {
            "jit": compiled(x),
            "remat": rematerialized(x * jnp.ones((1, 2)))[0, 0],
            "scan": total,
            "cond": jax.lax.cond(x > 0, compiled, compiled, x),
        }

    result = strategy.run(step, args=(ids(strategy),))
    assert {k: values(v) for k, v in result.items()} == {
        "jit": [4.0, 5.0],
        "remat": [2.0, 4.0],
        "scan": [9.0, 9.0],
        "cond": [4.0, 5.0],
    }


def test_jaxs_own_collectives_know_the_replica_axis():
    strategy = mirrored(2)
    total = strategy.run(
        lambda x: jax.lax.psum(x, "replica"), args=(ids(strategy),)
    )
    assert values(total) == [3.0, 3.0]


# Metrics of one's own, fed with scalars.


class Follows(keras.metrics.Metric):
    """A metric whose state is a function of the last state and the value."""

    def __init__(self, rule, start=0.0):
        super().__init__(name="follows")
        self.rule = rule
        self.state = self.add_variable(
            (), keras.initializers.Constant(start), name="state"
        )

    def update_state(self, value):
        self.state.assign(self.rule(self.state.value, value))

    def result(self):
        return self.state.value


@pytest.mark.parametrize("is_debug", [False, True])
@pytest.mark.parametrize(
    ("rule", "start", "expected"),
    [
        (lambda s, v: jnp.maximum(s, v), 0.0, 2.0),
        (lambda s, v: jnp.minimum(s, v), 100.0, 1.0),
        (lambda s, v: v + 0 * s, 0.0, 2.0),
        (lambda s, v: 0.5 * s + 0.5 * v, 0.0, 1.25),
        (lambda s, v: s + v, 0.0, 3.0),
        (lambda s, v: s + v**2, 0.0, 5.0),
    ],
    ids=["max", "min", "last", "ema", "sum", "squares"],
)
def test_a_metric_of_scalars_sees_the_replicas_in_turn(
    rule, start, expected, is_debug
):
    strategy = mirrored(2)
    with strategy.scope():
        metric = Follows(rule, start)

    def step(x):
        metric.update_state(x)

    with strategy.debug() if is_debug else contextlib.nullcontext():
        strategy.run(step, args=(ids(strategy),))
    assert float(metric.result()) == pytest.approx(expected)
    assert_replicated(*metric.variables)


@pytest.mark.parametrize("is_debug", [False, True])
def test_a_metric_that_is_no_sum_sees_all_rows_of_a_tail(is_debug):
    class Largest(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="largest")
            self.state = self.add_variable((), "zeros", name="state")
            self.rows = self.add_variable((), "zeros", name="rows")

        def update_state(self, rows):
            largest = keras.ops.max(rows)
            self.state.assign(keras.ops.maximum(self.state, largest))
            self.rows.assign(keras.ops.cast(rows.shape[0], "float32"))

        def result(self):
            return self.state.value

    strategy = mirrored(3)
    with strategy.scope():
        metric = Largest()
    rows = np.array([1.0, 2.0, 9.0, 4.0], "float32")

    def step(x):
        metric.update_state(x)

    mode = strategy.debug() if is_debug else contextlib.nullcontext()
    with mode, pytest.warns(UserWarning, match="not shown to add"):
        strategy.run(step, args=(uneven(strategy, rows),))
    assert float(metric.result()) == 9.0
    assert float(metric.rows.value) == 4.0
    assert_replicated(*metric.variables)


# Replicas with different numbers of rows.


@pytest.mark.parametrize("is_debug", [False, True])
def test_numbers_that_depend_on_the_rows(is_debug):
    strategy = mirrored(2)
    x = uneven(strategy, np.ones((3, 1), "float32"))

    def run(fn):
        with strategy.debug() if is_debug else contextlib.nullcontext():
            return strategy.run(fn, args=(x,))

    total, rows, name = run(lambda x: (jnp.sum(x), x.shape[0], "name"))
    assert values(total) == [2.0, 1.0]
    assert values(rows) == [2, 1]
    assert name == "name"
    assert int(strategy.reduce("sum", rows, axis=None)) == 3
    for fn in (
        lambda x: {"a": 1.0, "b" if len(x) == 2 else "c": 2.0},
        lambda x: "two" if len(x) == 2 else "one",
        lambda x: 1.0 if len(x) == 2 else jnp.sum(x),
    ):
        with pytest.raises(ValueError, match="the same structure"):
            run(fn)


def test_seeds_that_replicas_use_differently_stay_replicated():
    strategy = mirrored(2)
    with strategy.scope():
        seeds = keras.random.SeedGenerator(3)

    def step(x):
        for _ in range(x.shape[0]):
            keras.random.uniform((), seed=seeds)

    strategy.run(step, args=(uneven(strategy, np.ones((3, 1), "float32")),))
    assert_replicated(seeds.state)
    assert np.asarray(seeds.state.value).tolist() == [3, 2]


def test_a_function_that_catches_everything_is_reported():
    strategy = mirrored(2)

    def step(x):
        try:
            return ks.get_replica_context().all_reduce("sum", jnp.sum(x))
        except BaseException:
            return jnp.float32(-99)

    with pytest.raises(RuntimeError, match="Catch `Exception` instead"):
        strategy.run(step, args=(uneven(strategy, np.ones((3, 1))),))


# Reducing.


def test_booleans_are_counted_in_every_layout():
    strategy = mirrored(2)
    parts = by_replica(strategy, lambda i: np.array(True))
    rows = uneven(strategy, np.array([True, True, False, True]))
    for value, axis, total in ((parts, None, 2), (rows, 0, 3)):
        assert int(strategy.reduce("sum", value, axis=axis)) == total
    assert float(strategy.reduce("mean", parts, axis=None)) == 1.0
    assert float(strategy.reduce("mean", rows, axis=0)) == 0.75


@pytest.mark.parametrize(
    "large", [np.uint8(200), np.int32(2**31 - 129), np.int16(30000)]
)
def test_means_of_integers_do_not_overflow(large):
    strategy = mirrored(2)
    parts = by_replica(strategy, lambda i: large)
    results = strategy.run(lambda x: x, args=(parts,))
    context_values = strategy.run(
        lambda x: ks.get_replica_context().all_reduce("mean", x), args=(parts,)
    )
    for mean in (
        strategy.reduce("mean", parts, axis=None),
        strategy.reduce("mean", results, axis=None),
        context_values.values[0],
    ):
        assert float(mean) == pytest.approx(float(large), rel=1e-6)


def test_values_of_another_strategy_are_refused():
    two, three = mirrored(2), mirrored(3)
    for value in (
        three.run(lambda: jnp.ones(2)),
        three.run(lambda: jnp.ones(100)),
        ids(three),
        uneven(three, np.ones(3)),
    ):
        with pytest.raises(ValueError, match="strategy whose `run`"):
            two.reduce("sum", value, axis=None)
        with pytest.raises(ValueError, match="strategy whose `run`"):
            two.gather(value, axis=0)
        with pytest.raises(ValueError, match="strategy whose `run`"):
            two.run(lambda x: x, args=(value,))


def test_axes_may_be_numpys_integers():
    strategy = mirrored(2)
    value = by_replica(strategy, lambda i: np.ones(2))
    assert float(strategy.reduce("sum", value, axis=np.int64(0))) == 4.0


# Variables.


def test_a_users_variable_in_a_name_scope_is_a_users():
    strategy = mirrored(2)
    with strategy.scope(), keras.name_scope("outer"):
        variable = keras.Variable(0.0, name="inner")
    with pytest.raises(ValueError, match="has no aggregation"):
        strategy.run(
            lambda x: (variable.assign_add(x), 0)[1], args=(ids(strategy),)
        )


def test_variables_assigned_between_strategies_on_common_devices():
    """They share buffers there, which neither strategy's step may take."""
    two, three = mirrored(2), mirrored(3)
    with two.scope():
        ours = keras.Variable(np.zeros(64, "float32"), name="ours")
    with three.scope():
        theirs = keras.Variable(np.ones(64, "float32"), name="theirs")

    def add_to_ours():
        ours.assign_add(jnp.ones(64))

    def add_to_theirs():
        theirs.assign_add(jnp.ones(64))

    expected = 1.0
    for _ in range(3):
        three.run(add_to_theirs)
        expected += 1
        ours.assign(theirs)
        three.run(add_to_theirs)
        np.testing.assert_array_equal(ours.numpy(), np.full(64, expected))
        two.run(add_to_ours)
        theirs.assign(ours)
        two.run(add_to_ours)
        expected += 1
        np.testing.assert_array_equal(theirs.numpy(), np.full(64, expected))
        assert_replicated(ours, theirs)


def test_a_function_that_fails_leaves_no_program():
    strategy = mirrored(2)

    def fail():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        strategy.run(fail)
    assert len(strategy._runner._programs) == 0


def test_copies_of_another_strategy_are_refused():
    two, three = mirrored(2), mirrored(3)
    with three.scope():
        variable = keras.Variable(
            0.0, synchronization="on_read", aggregation="sum", name="v"
        )
    for use in (lambda: variable.assign_add(1.0), lambda: variable + 1.0):
        with pytest.raises(RuntimeError, match="by the strategy that created"):
            two.run(use)


def test_copies_are_gathered():
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable(
            [1.0, 2.0], synchronization="on_read", aggregation="sum", name="v"
        )
    assert strategy.gather(variable, axis=0).tolist() == [1, 2, 1, 2]


# What failed, or happens at once.


def test_a_program_that_failed_late_is_reported_once():
    strategy = mirrored(2)

    def fail(x):
        raise RuntimeError("late")

    def bad(x):
        return jax.pure_callback(fail, jax.ShapeDtypeStruct((), "float32"), x)

    def run_both():
        x = ids(strategy)
        with pytest.raises(jax.errors.JaxRuntimeError):
            np.asarray(strategy.run(bad, args=(x,)).values[0])
        try:
            return strategy.run(lambda x: x + 1, args=(x,))
        except jax.errors.JaxRuntimeError:
            return strategy.run(lambda x: x + 1, args=(x,))

    # JAX keeps a failed program's tokens until the thread ends, and every
    # later jax.effects_barrier() of the thread would tell of it again.
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(run_both).result()
    assert values(result) == [2.0, 3.0]


def test_two_threads_write_one_variable():
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable(0.0, aggregation="mean", name="v")

    def step():
        variable.assign_add(1.0)

    def loop():
        for _ in range(50):
            strategy.run(step)

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert float(variable.value) == 100.0


def test_debug_mode_in_a_callback_of_fit():
    strategy = mirrored(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((4, 1), "float32")
    seen = []

    class Look(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            with strategy.debug():
                result = strategy.run(
                    lambda: keras.ops.sum(model.layers[0].kernel.value)
                )
            kernel = float(np.asarray(model.layers[0].kernel.value)[0, 0])
            seen.append((values(result)[0], kernel))

    model.fit(x, 2 * x, batch_size=2, verbose=0, callbacks=[Look()])
    assert len(seen) == 2
    assert all(a == pytest.approx(b) for a, b in seen)
    assert seen[0] != seen[1]


def test_debug_mode_reads_a_variable_first_in_a_branch():
    strategy = mirrored(2)
    with strategy.scope():
        weight = keras.Variable(3.0, name="weight")

    def step(x):
        return jax.lax.cond(
            x > 1, lambda: weight.value * x, lambda: weight.value
        )

    with strategy.debug():
        result = strategy.run(step, args=(ids(strategy),))
    assert values(result) == [3.0, 6.0]


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("others", [1, 3])
def test_a_variable_of_another_strategy_is_not_written(others, debug):
    two, other = mirrored(2), mirrored(others)
    with other.scope():
        theirs = keras.Variable(1.0, aggregation="mean", name="theirs")
    layout = theirs.value.sharding

    def write():
        theirs.assign_add(1.0)

    def read():
        return 2 * theirs

    with two.debug() if debug else contextlib.nullcontext():
        with pytest.raises(RuntimeError, match="Mixing strategies"):
            two.run(write)
        # Reading it is no harm.
        found = two.reduce("mean", two.run(read), axis=None)
    assert float(found) == 2.0
    assert theirs.value.sharding == layout
    assert float(theirs.value) == 1.0
    other.run(write)
    assert float(theirs.value) == 2.0


def test_variables_of_no_strategy_and_of_equal_devices_are_written():
    plain = keras.Variable(1.0, aggregation="mean", name="plain")
    one, same = mirrored(2), mirrored(2)
    with one.scope():
        ours = keras.Variable(1.0, aggregation="mean", name="ours")
    for variable in (plain, ours):
        same.run(lambda v=variable: v.assign_add(1.0))
        assert float(variable.value) == 2.0


class Subclassed(keras.Model):
    """Without a `build` of its own: Keras's makes no variables."""

    def __init__(self):
        super().__init__()
        self.dense = dense(1)

    def call(self, x):
        return self.dense(x)


@pytest.mark.parametrize(
    "make", [lambda: keras.Sequential([dense(1)]), Subclassed]
)
def test_a_model_that_is_not_built_has_no_gradients(make):
    strategy = mirrored(2)
    with strategy.scope():
        model = make()

    def step(x):
        def loss():
            return jnp.sum(model(x))

        return ks.value_and_grad(loss, model.trainable_variables)()[0]

    x = np.ones((4, 3), "float32")
    with pytest.raises(ValueError, match="call it on one batch"):
        strategy.run(step, args=(x,))
    with strategy.scope():
        model(x)
    strategy.run(step, args=(x,))
    model.trainable = False
    with pytest.raises(ValueError, match="but is empty"):
        ks.grad(lambda: 0.0, model.trainable_variables)


# Variables that a branch or the body of a loop writes.

WRITES = {
    "a value": lambda p, write: ops.cond(p, lambda: write(1.0), lambda: 0.0),
    "a loop": lambda p, write: ops.while_loop(
        lambda i: i < 3, lambda i: (write(1.0), i + 1)[1:], (0,)
    ),
    "jit": lambda p, write: jax.jit(lambda: write(p))(),
    "gradient": lambda p, write: ks.grad(
        lambda: ops.cond(p > 0, lambda: write(p), lambda: p), [WEIGHT]
    )(),
}
WEIGHT = keras.Variable(1.0, name="weight")


@pytest.mark.parametrize("name", WRITES)
def test_a_variable_written_in_a_branch_is_named(name):
    strategy = mirrored(2)
    with strategy.scope():
        counter = keras.Variable(0.0, name="counter", aggregation="sum")

    def write(value):
        counter.assign(value)
        return 0.0

    def step(x):
        WRITES[name](x, write)
        return counter.value

    with pytest.raises(RuntimeError, match="must not write a variable") as e:
        strategy.run(step, args=(ids(strategy),))
    assert "'counter'" in str(e.value)
    assert "Received" in str(e.value)
    assert float(counter.value) == 0.0


def test_a_variable_written_under_a_gradient_of_jax():
    strategy = mirrored(2)
    with strategy.scope():
        counter = keras.Variable(0.0, name="counter", aggregation="sum")

    def step(x):
        def loss(value):
            counter.assign_add(1.0)
            return value * x

        return jax.grad(loss)(2.0)

    assert values(strategy.run(step, args=(ids(strategy),))) == [1.0, 2.0]
    assert float(counter.value) == 2.0

"""`ks.GradientTape` beside TensorFlow's, and its errors."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_strategies as ks
from tests.tape.cases import CASES, Library

RNG = np.random.default_rng(5)
X, Y, W = (
    RNG.normal(size=shape).astype("float32")
    for shape in ((4, 3), (4, 2), (3, 2))
)


@functools.cache
def tensorflow():
    import tensorflow as tf
    import tensorflow.experimental.numpy as tnp

    def loop(count, body, start):
        return tf.while_loop(
            lambda i, h: i < count,
            lambda i, h: (i + 1, body(h)),
            (tf.constant(0), start),
        )[1]

    return Library(
        np=tnp,
        tape=tf.GradientTape,
        variable=lambda value, trainable=True: tf.Variable(
            value, trainable=trainable
        ),
        stop=tf.stop_gradient,
        loop=loop,
        branch=tf.cond,
        jit=tf.function,
        cast=tf.cast,
    )


class Variables:
    """Variables that a function creates in its first trace, and then reuses."""

    def __init__(self):
        self.made, self.next = [], 0

    def make(self, value, trainable=True):
        if self.next == len(self.made):
            variable = keras.Variable(
                np.zeros(value.shape, "float32"), trainable=trainable
            )
            self.made.append(variable)
        variable = self.made[self.next]
        self.next += 1
        variable.assign(value)
        return variable


def ours(variables):
    def loop(count, body, start):
        return jax.lax.fori_loop(0, count, lambda i, h: body(h), start)

    return Library(
        np=keras.ops,
        tape=ks.GradientTape,
        variable=variables.make,
        stop=jax.lax.stop_gradient,
        loop=loop,
        branch=jax.lax.cond,
        jit=jax.jit,
        cast=lambda value, dtype: jnp.asarray(value).astype(dtype),
    )


def strategy_of(replicas):
    return ks.MirroredStrategy(devices=jax.devices()[:replicas])


def run(fn, strategy):
    """What a case returns in `run`, from each replica."""
    variables = Variables()

    def compute(x, y, w):
        variables.next = 0
        return fn(ours(variables), x, y, w)

    results = strategy.run(compute, args=(X, Y, W))
    local = strategy.experimental_local_results
    leaves, structure = jax.tree.flatten(
        results,
        is_leaf=lambda x: x is None or isinstance(x, ks.PerReplica),
    )
    leaf_gradients = [
        [None] * strategy.num_replicas_in_sync if leaf is None else local(leaf)
        for leaf in leaves
    ]
    return [
        jax.tree.unflatten(structure, of_replica)
        for of_replica in zip(*leaf_gradients, strict=True)
    ] or [results]


def compare(found, expected):
    """Nests of arrays are equal, and None where the other is None."""
    leaves = [
        jax.tree.leaves(nest, is_leaf=lambda leaf: leaf is None)
        for nest in (found, expected)
    ]
    for one, two in zip(*leaves, strict=True):
        assert (one is None) == (two is None), (one, two)
        if one is not None:
            one, two = np.asarray(one), np.asarray(two)
            assert one.dtype == two.dtype
            np.testing.assert_allclose(one, two, rtol=3e-5, atol=1e-6)


def expect(fn):
    """What a case returns with TensorFlow."""
    arrays = [tensorflow().np.asarray(array) for array in (X, Y, W)]
    return fn(tensorflow(), *arrays)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    "replicas", [1, 2, pytest.param(3, marks=pytest.mark.slow)]
)
def test_gradients_are_those_of_tensorflow(name, replicas):
    expected = expect(CASES[name])
    for found in run(CASES[name], strategy_of(replicas)):
        compare(found, expected)


def weigh(leaf):
    """A number to which each entry of an array contributes another part."""
    leaf = leaf.real + leaf.imag
    weights = np.cos(np.arange(leaf.size, dtype="float32")).reshape(leaf.shape)
    return (leaf.astype("float32") * weights).sum()


class AllCases(keras.Model):
    """All cases in one step; the logs are what they return."""

    def __init__(self, variables):
        super().__init__()
        self.cases, self.made = variables, list(variables.made)

    def call(self, x):
        return x

    def train_step(self, data):
        self.cases.next = 0
        arrays = map(jnp.asarray, (X, Y, W))
        arrays = [jax.lax.optimization_barrier(array) for array in arrays]
        return {
            f"{name} {k}": weigh(leaf)
            for name, fn in CASES.items()
            for k, leaf in enumerate(
                jax.tree.leaves(fn(ours(self.cases), *arrays))
            )
        }


@pytest.mark.parametrize(
    ("replicas", "rows"),
    [
        (2, 6),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [(1, 4), (1, 6), (2, 8), (3, 6), (3, 7)]
        ),
    ],
)
def test_a_fit_has_the_gradients_of_tensorflow(replicas, rows):
    strategy, variables = strategy_of(replicas), Variables()

    def make_variables(*arrays):
        variables.next = 0
        for fn in CASES.values():
            fn(ours(variables), *arrays)

    with strategy.scope():
        strategy.run(make_variables, args=(X, Y, W))
        model = AllCases(variables)
        model.compile()
    x = np.ones((rows, 3), "float32")
    history = model.fit(x, batch_size=4, verbose=0).history
    wanted = {
        f"{name} {k}": weigh(np.asarray(leaf))
        for name, fn in CASES.items()
        for k, leaf in enumerate(jax.tree.leaves(expect(fn)))
    }
    assert wanted.keys() == history.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(
            history[name][0], value, rtol=3e-5, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("rows", [8, 6])
def test_an_uneven_batch_has_the_gradients_of_one_device(replicas, rows):
    x, y = RNG.normal(size=(rows, 3)), RNG.normal(size=(rows, 2))
    x, y = x.astype("float32"), y.astype("float32")

    def train(count):
        strategy = strategy_of(count)
        with strategy.scope():
            weight = keras.Variable(W)
            optimizer = keras.optimizers.Adam(0.1)

        def step(x, y):
            with ks.GradientTape() as tape:
                error = keras.ops.tanh(keras.ops.matmul(x, weight)) - y
                each = keras.ops.sum(error**2, axis=1)
                loss = ks.compute_average_loss(each, global_batch_size=4)
            gradients = tape.gradient(loss, [weight])
            optimizer.apply_gradients(zip(gradients, [weight], strict=True))

        data = [(x[:4], y[:4]), (x[4:], y[4:])]
        for batch in strategy.experimental_distribute_dataset(iter(data)):
            strategy.run(step, args=batch)
        return np.asarray(weight.value)

    np.testing.assert_allclose(train(replicas), train(1), rtol=3e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["one_variable", "second_order", "maml"])
def test_a_program_has_the_operations_of_value_and_grad(name):
    def with_grad(x, y, w):
        def loss(w, x=x):
            error = jnp.tanh(x @ w) - y
            return jnp.mean(error**2)

        if name == "one_variable":
            return jax.grad(loss)(w)
        if name == "second_order":
            first, pull = jax.vjp(jax.grad(loss), w)
            return first, pull(jnp.ones_like(first))[0]
        return jax.grad(lambda v: loss(v - 0.5 * jax.grad(loss)(v), x=x * 0.5))(
            w
        )

    variables = Variables()

    def with_tape(x, y, w):
        variables.next = 0
        return CASES[name](ours(variables), x, y, w)

    def count(fn):
        strategy = strategy_of(1)
        text = strategy.compile_run(fn, args=(X, Y, W)).as_text()
        return [text.count(f" {op}(") for op in ("dot", "tanh")]

    assert count(with_tape) == count(with_grad)


def differentiate_square(x):
    with ks.GradientTape() as tape:
        tape.watch(x)
        value = x**2
    return tape.gradient(value, x)


def test_a_tape_outside_of_a_step_is_refused():
    variable = keras.Variable(W)
    with ks.GradientTape() as tape:
        loss = keras.ops.sum(variable**2)
    with pytest.raises(RuntimeError, match="value_and_grad"):
        tape.gradient(loss, variable)


def test_a_traced_tape_that_is_not_part_of_a_step_is_refused():
    with pytest.raises(RuntimeError, match="must be used in a step"):
        jax.jit(differentiate_square)(jnp.ones(3))


@pytest.mark.parametrize(
    "transform",
    [
        lambda x: jax.grad(lambda x: jnp.sum(differentiate_square(x)))(x),
        lambda x: jax.vmap(differentiate_square)(x),
    ],
)
def test_a_tape_within_a_transformation_is_refused(transform):
    with pytest.raises(RuntimeError, match="GradientTape"):
        strategy_of(2).run(transform, args=(jnp.ones(3),))


def test_numbers_among_the_targets_are_constants():
    def differentiate(x):
        with ks.GradientTape() as tape:
            tape.watch(x)
            value = x**2
        return tape.gradient([value, 3, 2.0], x)

    strategy = strategy_of(2)
    for found in strategy.experimental_local_results(
        strategy.run(differentiate, args=(jnp.ones(3),))
    ):
        np.testing.assert_array_equal(found, 2 * np.ones(3))


def test_a_tape_in_debug_mode_is_refused():
    strategy = strategy_of(2)
    with strategy.debug(), pytest.raises(RuntimeError, match="value_and_grad"):
        strategy.run(differentiate_square, args=(jnp.ones(3),))


def fail_twice(x):
    with ks.GradientTape() as tape:
        tape.watch(x)
        value = x**2
    tape.gradient(value, x)
    tape.gradient(value, x)


def fail_entered_again(x):
    tape = ks.GradientTape()
    with tape, tape:
        pass


def fail_watch_outside(x):
    ks.GradientTape().watch(x)


def fail_watch_numpy(x):
    with ks.GradientTape() as tape:
        tape.watch(np.ones(3))


def fail_reset_outside(x):
    ks.GradientTape().reset()


def fail_reset_of_outer(x):
    with ks.GradientTape() as tape, ks.GradientTape():
        tape.reset()


def fail_reset_in_a_named_scope(x):
    with ks.GradientTape() as tape, jax.named_scope("layer"):
        tape.reset()


def fail_left_in_the_wrong_order(x):
    one, two = ks.GradientTape(), ks.GradientTape()
    with contextlib.ExitStack() as stack:
        one.__enter__()
        stack.enter_context(two)
        one.__exit__()


def fail_stop_outside(x):
    with ks.GradientTape().stop_recording():
        pass


def fail_unconnected(x):
    with ks.GradientTape() as tape:
        tape.watch(x)
        value = x**2
    tape.gradient(value, x, unconnected_gradients="ones")


def fail_output_gradients(x):
    with ks.GradientTape() as tape:
        tape.watch(x)
        value = x**2
    tape.gradient(value, x, output_gradients=[x, x])


def fail_jacobian(x):
    with ks.GradientTape() as tape:
        tape.watch(x)
        value = x**2
    tape.jacobian(value, x)


def fail_batch_jacobian(x):
    ks.GradientTape().batch_jacobian(x, x, experimental_use_pfor=False)


@pytest.mark.parametrize(
    ("fn", "error", "match"),
    [
        (fail_twice, RuntimeError, "non-persistent"),
        (fail_entered_again, ValueError, "still recording"),
        (fail_watch_outside, ValueError, "while the tape records"),
        (fail_watch_numpy, ValueError, "ndarray"),
        (fail_reset_outside, ValueError, "while the tape records"),
        (fail_reset_of_outer, ValueError, "only the innermost"),
        (fail_reset_in_a_named_scope, ValueError, "in a named scope"),
        (fail_left_in_the_wrong_order, ValueError, "reverse of the order"),
        (fail_stop_outside, ValueError, "while the tape records"),
        (fail_unconnected, ValueError, "'none' or 'zero'"),
        (fail_output_gradients, ValueError, "2 entries for 1"),
        (fail_jacobian, NotImplementedError, "jax.jacobian"),
        (fail_batch_jacobian, NotImplementedError, "jax.jacobian"),
    ],
)
def test_wrong_uses_raise(fn, error, match):
    with pytest.raises(error, match=match):
        strategy_of(1).run(fn, args=(jnp.ones(3),))


def test_nothing_stays_patched():
    method = keras.StatelessScope.get_current_value
    with ks.GradientTape():
        assert keras.StatelessScope.get_current_value is not method
    assert keras.StatelessScope.get_current_value is method
    with pytest.raises(ZeroDivisionError), ks.GradientTape():
        raise ZeroDivisionError
    assert keras.StatelessScope.get_current_value is method


def test_watched_variables_are_those_that_were_read():
    strategy = strategy_of(2)
    with strategy.scope():
        one, two = keras.Variable(W), keras.Variable(W)
    found = []

    def step():
        with ks.GradientTape() as tape:
            keras.ops.sum(one * 2.0)
        found.append(tape.watched_variables())

    strategy.run(step)
    assert found
    assert all(len(read) == 1 and read[0] is one for read in found)
    assert two.path not in [variable.path for variable in found[0]]

"""Components that differ in other dimensions than their rows, in `run`."""

import contextlib

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.support.combinations import combine
from tests.support.plain_keras import assert_same, mirrored

debug = pytest.mark.parametrize(
    "debug", [False, True], ids=["program", "debug"]
)
SHAPES = {
    "columns": [(1, 1), (1, 2), (1, 3)],
    "both": [(3, 1), (1, 2), (2, 2)],
    "none": [(2, 0), (2, 3), (0, 1)],
    "rank 3": [(2, 1, 4), (2, 3, 4), (2, 2, 1)],
}


def make_parts(shapes):
    return [np.full(s, k + 1.0, "float32") for k, s in enumerate(shapes)]


def distributed(strategy, shapes):
    parts = make_parts(shapes)
    return strategy.experimental_distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group]
    )


def run(strategy, fn, *args, debug):
    with strategy.debug() if debug else contextlib.nullcontext():
        return strategy.run(fn, args=args)


def local(strategy, value):
    return [np.asarray(v) for v in strategy.experimental_local_results(value)]


@debug
@pytest.mark.parametrize("name", combine(SHAPES, every=5))
def test_each_replica_computes_with_its_own(name, debug):
    strategy, shapes = mirrored(3), SHAPES[name]
    x, parts = distributed(strategy, shapes), make_parts(shapes)

    def fn(x, scale):
        assert x.ndim == len(shapes[0])
        return {"twice": scale * x, "sum": jnp.sum(x), "size": x.size}

    out = run(strategy, fn, x, 2.0, debug=debug)
    assert_same([2 * p for p in parts], local(strategy, out["twice"]))
    assert_same(
        [np.sum(p, dtype="float32") for p in parts], local(strategy, out["sum"])
    )
    assert [int(v) for v in local(strategy, out["size"])] == [
        p.size for p in parts
    ]
    # A result is an argument again, beside one that differs in its rows.
    rows = distributed(strategy, [(1,), (2,), (1,)])
    again = run(
        strategy,
        lambda x, rows: jnp.sum(x) + jnp.sum(rows),
        out["twice"],
        rows,
        debug=debug,
    )
    assert_same(
        [float(2 * p.sum() + k) for p, k in zip(parts, (1, 4, 3), strict=True)],
        [float(v) for v in local(strategy, again)],
    )


@debug
def test_collectives(debug):
    strategy = mirrored(2)
    x = distributed(strategy, [(1, 1), (1, 2)])

    def fn(x):
        context = ks.get_replica_context()
        return (
            context.all_gather(x, axis=1),
            context.all_reduce("sum", jnp.sum(x)),
        )

    gathered, total = run(strategy, fn, x, debug=debug)
    for value in local(strategy, gathered):
        assert value.tolist() == [[1.0, 2.0, 2.0]]
    assert [float(v) for v in local(strategy, total)] == [5.0, 5.0]
    whole = strategy.gather(run(strategy, lambda x: x, x, debug=debug), axis=1)
    assert whole.tolist() == [[1.0, 2.0, 2.0]]
    with pytest.raises(ValueError, match="shape"):
        run(
            strategy,
            lambda x: ks.get_replica_context().all_reduce("sum", x),
            x,
            debug=debug,
        )


@debug
@pytest.mark.parametrize("is_divided", combine([False, True], every=2))
def test_a_step_of_training(debug, is_divided):
    """Texts of other lengths: each replica's gradient of its own."""
    divide = ks.experimental.FullySharded(min_size=1) if is_divided else None
    strategy = ks.MirroredStrategy(
        ["cpu:0", "cpu:1"], variable_partitioner=divide
    )
    with strategy.scope():
        weight = keras.Variable(np.ones((4, 2), "float32"), name="weight")
        optimizer = keras.optimizers.SGD(0.1)
        optimizer.build([weight])
    shapes = [(2, 3, 4), (1, 5, 4)]
    x = distributed(strategy, shapes)

    def loss_of(weight, x):
        return jnp.mean(jnp.tanh(x @ weight)) / 2

    def step(x):
        loss, grads = ks.value_and_grad(
            lambda: loss_of(weight.value, x), [weight]
        )()
        optimizer.apply(grads, [weight])
        return loss

    for _ in range(2):
        losses = run(strategy, step, x, debug=debug)
    plain = jnp.ones((4, 2))
    for _ in range(2):
        expected, grads = zip(
            *[
                jax.value_and_grad(loss_of)(plain, p)
                for p in make_parts(shapes)
            ],
            strict=True,
        )
        plain = plain - 0.1 * sum(grads)
    assert_same(
        [float(v) for v in expected],
        [float(v) for v in local(strategy, losses)],
    )
    np.testing.assert_allclose(weight.numpy(), plain, rtol=1e-5)
    assert_replicated(weight)

"""`run`: what a replica's function sees, returns and changes."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_strategies as ks
from keras_strategies.strategy import current
from keras_strategies.testing import assert_replicated
from tests.support.combinations import combine, few
from tests.support.numbers import assert_all_close, assert_leaves_close
from tests.support.plain_keras import dense, mirrored

REPLICAS = (1, 2, 3, 8)
HALF = np.array([[0.0, 0.5]], "float32")
_random = np.random.default_rng(0)


def ids():
    return ks.get_replica_context().replica_id_in_sync_group


def values_of(strategy, value):
    return [np.asarray(v) for v in strategy.experimental_local_results(value)]


def by_replica(strategy, fn):
    return strategy.experimental_distribute_values_from_function(
        lambda context: fn(context.replica_id_in_sync_group)
    )


# Arguments and results.


@pytest.mark.parametrize("replicas", REPLICAS)
def test_every_replica_has_its_id_and_its_component(replicas):
    strategy = mirrored(replicas)
    x = by_replica(strategy, lambda i: np.full((2,), 10.0 * i, "float32"))

    def fn(x, y, *, scale):
        return {"x": x * scale, "id": (ids(), y)}

    out = strategy.run(fn, args=(x, np.float32(3)), kwargs={"scale": 2.0})
    assert [v.tolist() for v in values_of(strategy, out["x"])] == [
        [20.0 * i] * 2 for i in range(replicas)
    ]
    assert values_of(strategy, out["id"][0]) == list(range(replicas))
    assert values_of(strategy, out["id"][1]) == [3.0] * replicas


def test_what_is_no_array_is_passed_and_returned_as_it_is():
    strategy = mirrored(2)
    seen = []

    def fn(name, flag, nothing, model):
        seen.append((name, flag, nothing, model))
        return name, None, 3, {"flag": flag}

    model = object()
    out = strategy.run(fn, args=("a", True, None, model))
    assert out == ("a", None, 3, {"flag": True})
    assert seen[0] == ("a", True, None, model)


@pytest.mark.parametrize("is_debug", [False, True])
def test_tensors_of_tensorflow_are_arrays(is_debug):
    """Of a plain loop over `tf.data`, and of a function of values."""
    strategy = mirrored(2)
    values = by_replica(strategy, tf.constant)
    data = tf.data.Dataset.from_tensor_slices(HALF.T).batch(1)
    with strategy.debug() if is_debug else contextlib.nullcontext():
        outs = [
            strategy.run(lambda x, i: x * 2 + i, args=(rows, values))
            for rows in data
        ]
    found = [[v.tolist() for v in values_of(strategy, out)] for out in outs]
    assert found == [[[[0.0]], [[1.0]]], [[[1.0]], [[2.0]]]]
    if not is_debug:
        assert strategy._runner.num_programs == 1


def test_results_are_arguments_of_the_next_run():
    strategy = mirrored(3)
    first = strategy.run(lambda: {"id": ids() * jnp.ones((2,))})
    second = strategy.run(lambda nest: nest["id"] + 1, args=(first,))
    assert [v.tolist() for v in values_of(strategy, second)] == [
        [1.0 + i] * 2 for i in range(3)
    ]


def test_a_result_that_is_no_array_is_refused():
    with pytest.raises(TypeError, match="Received: a result of type set"):
        mirrored(2).run(lambda: {1, 2})


def test_components_of_different_kinds_are_refused():
    strategy = mirrored(2)
    for wrong in (
        ks.PerReplica((np.zeros((2, 1)), np.zeros(2))),
        ks.PerReplica((np.zeros(2, "float32"), np.zeros(2, "int32"))),
    ):
        with pytest.raises(ValueError, match="the same rank and dtype"):
            strategy.run(lambda x: x, args=(wrong,))
    wrong = ks.PerReplica((np.zeros(1),) * 3)
    with pytest.raises(ValueError, match="3 components for 2 replicas"):
        strategy.run(lambda x: x, args=(wrong,))


# Compiling once.


def traces(strategy, make, calls=4):
    """How often the functions that `make` returns are traced."""
    counts = []

    def count():
        counts.append(1)

    for k in range(calls):
        fn, args = make(k, count)
        strategy.run(fn, args=args)
    return sum(counts)


def a_def(k, count):
    def fn(x):
        count()
        return x

    return fn, (np.float32(k),)


def a_lambda(k, count):
    return (lambda x: (count(), x)[1]), (np.float32(k),)


def a_partial(k, count):
    def fn(count, x):
        count()
        return x

    return functools.partial(fn, count), (np.float32(k),)


class HasMethod:
    def method(self, count, x):
        count()
        return x


_has_method = HasMethod()


def a_method(k, count):
    return _has_method.method, (count, np.float32(k))


@pytest.mark.parametrize("make", [a_def, a_lambda, a_partial, a_method])
def test_equal_functions_are_compiled_once(make):
    # An abstract trace that finds the variables, and the program's.
    assert traces(mirrored(2), make) == 2


@pytest.mark.filterwarnings("ignore:`run` has compiled:UserWarning")
def test_a_cell_that_is_given_other_objects_is_seen():
    # Objects that are let go of, so that their memory is used again.
    class Config:
        def __init__(self, scale):
            self.scale = scale

    strategy = mirrored(2)
    config = None

    def fn(x):
        return x * config.scale

    for k in range(12):
        config = Config(k)
        out = strategy.run(fn, args=(np.float32(1),))
        assert values_of(strategy, out) == [k, k]


@pytest.mark.filterwarnings("ignore:`run` has compiled:UserWarning")
def test_what_differs_is_compiled_anew():
    def number(k, count):
        return a_def(k, count)[0], (float(k),)

    def shape(k, count):
        return a_def(k, count)[0], (np.zeros((k + 1,)),)

    def cell(k, count):
        return (lambda x: (count(), x + k)[1]), (np.float32(1),)

    for make in (number, shape, cell):
        assert traces(mirrored(2), make) == 8


step = 0  # Has the name of an attribute, too.


def test_a_global_with_the_name_of_an_attribute_is_no_part_of_a_function():
    class Config:
        step = 2

    config = Config()
    count = itertools.count()

    def fn(x):
        next(count)
        return x * config.step

    strategy = mirrored(2)
    for number in range(4):
        globals()["step"] = number
        out = strategy.run(fn, args=(np.float32(1),))
        assert values_of(strategy, out) == [2, 2]
    assert next(count) == 2


def test_a_global_that_a_class_body_reads_is_a_part_of_a_function():
    def fn(x):
        class Config:
            value = step

        return x + Config.value

    strategy = mirrored(2)
    for number in range(3):
        globals()["step"] = number
        out = strategy.run(fn, args=(np.float32(1),))
        assert values_of(strategy, out) == [1 + number, 1 + number]


def test_a_loop_that_keeps_compiling_is_told_why():
    strategy = mirrored(2)

    def loop():
        for k in range(8):

            def fn(x):
                return x

            strategy.run(fn, args=(k,))

    with pytest.warns(UserWarning, match="has compiled 'fn' 5 times") as told:
        loop()
    assert len(told) == 1


# Variables.


@pytest.mark.parametrize("replicas", combine(REPLICAS, every=2))
def test_a_training_step_equals_a_loop_over_replicas(replicas):
    x = _random.normal(size=(4 * replicas, 3)).astype("float32")
    y = _random.normal(size=(4 * replicas, 1)).astype("float32")
    strategy = mirrored(replicas)
    with strategy.scope():
        layer = dense(1)
        layer.build((None, 3))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        metric = keras.metrics.Mean()
    kernel, bias = (w.copy() for w in layer.get_weights())
    momentum = [np.zeros_like(kernel), np.zeros_like(bias)]

    def step(x, y):
        loss, grads = ks.value_and_grad(
            lambda: ks.compute_average_loss(jnp.sum((layer(x) - y) ** 2, 1)),
            layer.trainable_variables,
        )()
        optimizer.apply(grads, layer.trainable_variables)
        metric.update_state(x[:, 0])
        return loss

    parts = [np.split(a, replicas) for a in (x, y)]
    batch = tuple(by_replica(strategy, lambda i, p=p: p[i]) for p in parts)
    for _ in range(3):
        losses = strategy.run(step, args=batch)
        # By hand: the gradient of the global mean.
        error = x @ kernel + bias - y
        grads = [2 * x.T @ error / len(x), 2 * error.sum(0) / len(x)]
        total = float((error**2).sum(1).mean())
        assert float(strategy.reduce("sum", losses, axis=None)) == (
            pytest.approx(total, rel=1e-5)
        )
        momentum = [
            0.9 * m - 0.1 * g for m, g in zip(momentum, grads, strict=True)
        ]
        kernel, bias = kernel + momentum[0], bias + momentum[1]
    np.testing.assert_allclose(layer.get_weights()[0], kernel, rtol=1e-4)
    np.testing.assert_allclose(layer.get_weights()[1], bias, rtol=1e-4)
    assert float(metric.result()) == pytest.approx(float(x[:, 0].mean()))
    assert int(optimizer.iterations) == 3
    assert_replicated(layer)


def test_variables_made_on_the_first_call_are_kept():
    strategy = mirrored(2)
    made = {}

    def fn(x):
        if not made:
            made["layer"] = keras.layers.Dense(2)
            made["own"] = keras.Variable(1.5, name="own")
            made["optimizer"] = keras.optimizers.Adam()
            made["metric"] = keras.metrics.Mean()
        y = made["layer"](x)
        made["metric"].update_state(jnp.mean(x))
        return jnp.sum(y) * made["own"].value

    x = by_replica(strategy, lambda i: np.ones((2, 3), "float32"))
    first = values_of(strategy, strategy.run(fn, args=(x,)))
    kernel = made["layer"].kernel
    second = values_of(strategy, strategy.run(fn, args=(x,)))
    assert made["layer"].kernel is kernel
    assert first == second
    assert float(made["own"]) == 1.5
    assert float(made["metric"].result()) == 1.0
    assert strategy.extended.variable_created_in_scope(kernel)
    assert len(kernel.value.sharding.device_set) == 2


def test_held_arrays_and_shared_buffers_survive():
    strategy = mirrored(2)
    with strategy.scope():
        online = keras.Variable(np.ones(3, "float32"), name="online")
        target = keras.Variable(np.zeros(3, "float32"), name="target")
    online.assign(online.value)

    def fn():
        online.assign(ks.get_replica_context().all_reduce("mean", online + 1))
        return online.value

    held = online.value
    for _ in range(5):
        target.assign(online)
        strategy.run(fn)
        target.assign(online.value)
        before = target.value
        strategy.run(fn)
        np.testing.assert_allclose(np.asarray(before), target.numpy())
    np.testing.assert_allclose(np.asarray(held), 1.0)
    np.testing.assert_allclose(online.numpy(), 11.0)
    np.testing.assert_allclose(target.numpy(), 10.0)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_random_layers_draw_other_numbers_on_every_replica(implementation):
    strategy = mirrored(2)
    with strategy.scope():
        seeds = keras.random.SeedGenerator(3)
        dropout = keras.layers.Dropout(0.25, seed=4)

    def draw():
        kept = dropout(jnp.ones((100, 100)), training=True)
        return keras.random.normal((4,), seed=seeds), kept.mean()

    with jax.default_prng_impl(implementation):
        numbers, means = strategy.run(draw)
        third, _ = values_of(strategy, strategy.run(draw)[0])
    first, second = values_of(strategy, numbers)
    assert not np.allclose(first, second)
    assert not np.allclose(first, third)
    one, other = values_of(strategy, means)
    assert one != other
    np.testing.assert_allclose([one, other], 1, atol=0.03)
    assert seeds.state.numpy().tolist() == [3, 2]


def test_trainable_flipped_is_seen():
    strategy = mirrored(2)
    with strategy.scope():
        layer = dense(1)
        layer.build((None, 3))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build(layer.trainable_variables)
    x = by_replica(strategy, lambda i: np.ones((2, 3), "float32"))

    def step(x):
        weights = layer.trainable_variables
        if weights:
            grads = ks.grad(lambda: jnp.sum(layer(x)), weights)()
            optimizer.apply(grads, weights)
        return jnp.sum(layer(x))

    strategy.run(step, args=(x,))
    layer.trainable = False
    before = layer.get_weights()
    strategy.run(step, args=(x,))
    np.testing.assert_array_equal(before[0], layer.get_weights()[0])


def test_run_inside_a_callback_sees_fits_weights():
    strategy = mirrored(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), dense(1)])
        model.compile("sgd", "mse")
    seen = []

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(strategy.run(lambda: model.weights[0].value + 0))

    x = _random.normal(size=(16, 3)).astype("float32")
    model.fit(x, x[:, :1], batch_size=8, verbose=0, callbacks=[Looks()])
    first, last = (values_of(strategy, v)[0] for v in seen)
    np.testing.assert_allclose(last, model.get_weights()[0])
    assert not np.allclose(first, last)


# Contexts.


def test_the_default_replica_context():
    context = ks.get_replica_context()
    assert context.replica_id_in_sync_group == 0
    assert context.num_replicas_in_sync == 1
    assert float(context.all_reduce("sum", 3.0)) == 3.0
    assert context.all_gather(np.ones((2, 3)), axis=1).shape == (2, 3)
    assert context.merge_call(lambda s, x: x + 1, args=(1,)) == 2


# Collectives.


def test_values_of_other_structures_are_refused():
    def made(context):
        return (1.0, 2.0) if context.replica_id_in_sync_group else 1.0

    with pytest.raises(ValueError, match=r"\[PyTreeDef\(\*\), PyTreeDef"):
        mirrored(2).experimental_distribute_values_from_function(made)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("shape", [(0,), (0, 2), (3, 0)])
def test_all_gather_where_no_replica_has_anything(replicas, shape):
    strategy = mirrored(replicas)
    axis = shape.index(0)

    def gather(x):
        return ks.get_replica_context().all_gather(x, axis)

    value = strategy.experimental_distribute_values_from_function(
        lambda context: np.zeros(shape, "int8")
    )
    for part in values_of(strategy, strategy.run(gather, args=(value,))):
        assert part.shape == shape
        assert part.dtype == "int8"


@pytest.mark.parametrize("replicas", REPLICAS)
def test_all_reduce_and_all_gather_of_nests(replicas):
    strategy = mirrored(replicas)
    total = sum(range(replicas))

    def fn():
        context = ks.get_replica_context()
        nest = {"a": ids() * jnp.ones((2,)), "b": [ids() + 1, 2.0]}
        return {
            "sum": context.all_reduce(ks.ReduceOp.SUM, nest),
            "mean": context.all_reduce("mean", nest),
            "gather": context.all_gather(nest["a"][None] + HALF, 0),
            "columns": context.all_gather(nest["a"][None], axis=-1),
            "none": context.all_reduce("sum", []),
        }

    out = strategy.run(fn)
    assert out["none"] == []
    for result in strategy.experimental_local_results(out):
        assert result["sum"]["a"].tolist() == [total] * 2
        assert int(result["sum"]["b"][0]) == total + replicas
        assert float(result["sum"]["b"][1]) == 2.0 * replicas
        assert result["mean"]["a"].tolist() == pytest.approx(
            [total / replicas] * 2
        )
        assert result["gather"].tolist() == [
            [i, i + 0.5] for i in range(replicas)
        ]
        assert result["columns"].shape == (1, 2 * replicas)


@pytest.mark.parametrize("replicas", [2, 8])
def test_gradients_through_collectives_are_those_of_the_sum_of_losses(replicas):
    strategy = mirrored(replicas)
    x = by_replica(strategy, lambda i: np.float32(i + 1))

    def through_sum(x):
        def loss(x):
            total = ks.get_replica_context().all_reduce("sum", x)
            return (ids() + 1) * total**2

        return jax.grad(loss)(x)

    def through_gather(x):
        def loss(x):
            rows = ks.get_replica_context().all_gather(x[None], axis=0)
            return (ids() + 1) * jnp.sum(rows**3)

        return jax.grad(loss)(x)

    components = np.arange(1, replicas + 1)
    weights = components.sum()  # Of all replicas' losses.
    total = components.sum()
    got = values_of(strategy, strategy.run(through_sum, args=(x,)))
    np.testing.assert_allclose(got, 2 * total * weights, rtol=1e-5)
    got = values_of(strategy, strategy.run(through_gather, args=(x,)))
    np.testing.assert_allclose(got, 3 * components**2 * weights, rtol=1e-5)


def test_merge_call_reduces_and_updates():
    strategy = mirrored(2)

    def merge(strategy, value, scale):
        total = strategy.reduce("sum", value, axis=None)
        pairs = [(value, None), ({"a": value}, None)]
        same, nest = strategy.extended.batch_reduce_to("mean", pairs)
        total = total + 0 * (same + nest["a"])
        with pytest.raises(RuntimeError, match="reduce_to"):
            _ = value.values
        return total * scale, value

    def fn():
        context = ks.get_replica_context()
        return context.merge_call(merge, args=(ids() + 1,), kwargs={"scale": 2})

    total, own = strategy.run(fn)
    assert values_of(strategy, total) == [6, 6]
    assert values_of(strategy, own) == [1, 2]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda c: c.all_reduce("max", 1.0), ValueError, "not a valid"),
        (lambda c: c.all_reduce(3, 1.0), ValueError, "ReduceOp"),
        (lambda c: c.all_gather(1.0, axis=0), ValueError, "out of bounds"),
        (lambda c: c.all_gather(np.ones(2), 1), ValueError, "out of bounds"),
    ],
)
def test_mistakes_with_collectives(call, error, text):
    with pytest.raises(error, match=text):
        mirrored(2).run(lambda: call(ks.get_replica_context()))


def test_old_names_warn_once(monkeypatch):
    monkeypatch.setattr(current, "_warned", set())
    strategy = mirrored(2)
    with pytest.warns(DeprecationWarning, match="its new name, `run`"):
        strategy.experimental_run_v2(lambda: 1)
    assert strategy.experimental_run_v2(lambda: 1) == 1


# Different numbers of rows.

UNEVEN = [(2, (4, 2)), (4, (4, 2, 0, 0)), (4, (3, 2, 1, 0)), (3, (1, 1, 2))]


@pytest.mark.parametrize(("replicas", "rows"), few(UNEVEN, every=2))
def test_every_replica_sees_exactly_its_rows(replicas, rows):
    strategy = mirrored(replicas)
    data = [_random.normal(size=(count, 3)).astype("float32") for count in rows]
    x = by_replica(strategy, lambda i: data[i])

    def fn(x, scale):
        context = ks.get_replica_context()
        total = context.all_reduce("sum", jnp.sum(x))
        centered = x - total
        return {
            "rows": centered * scale,
            "count": context.all_reduce("sum", x.shape[0]),
            "all": context.all_reduce("sum", jnp.sum(centered)),
            "name": "a",
        }

    out = strategy.run(fn, args=(x, np.float32(2)))
    total = sum(d.sum() for d in data)
    got = values_of(strategy, out["rows"])
    for component, expected in zip(got, data, strict=True):
        np.testing.assert_allclose(
            component, 2 * (expected - total), rtol=1e-5, atol=1e-5
        )
    assert values_of(strategy, out["count"]) == [sum(rows)] * replicas
    everything = sum((d - total).sum() for d in data)
    np.testing.assert_allclose(
        values_of(strategy, out["all"]), everything, rtol=1e-4
    )
    assert out["name"] == "a"
    gathered = strategy.gather(out["rows"], axis=0)
    assert gathered.shape == (sum(rows), 3)
    mean = strategy.reduce("mean", x, axis=0)
    np.testing.assert_allclose(
        mean, np.concatenate(data).mean(axis=0), rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(("replicas", "rows"), few(UNEVEN, every=4))
def test_training_on_uneven_rows_is_that_of_one_device(replicas, rows):
    x = _random.normal(size=(sum(rows), 3)).astype("float32")
    y = _random.normal(size=(sum(rows), 1)).astype("float32")

    def made():
        layer = dense(1)
        layer.build((None, 3))
        return layer, keras.optimizers.Adam(0.1), keras.metrics.Mean()

    def step_of(layer, optimizer, metric):
        def step(x, y):
            def loss():
                return ks.compute_average_loss(
                    jnp.sum((layer(x) - y) ** 2, axis=1),
                    global_batch_size=sum(rows),
                )

            value, grads = ks.value_and_grad(loss, layer.trainable_variables)()
            optimizer.apply(grads, layer.trainable_variables)
            metric.update_state(x[:, 0])
            return value

        return step

    strategy = mirrored(replicas)
    with strategy.scope():
        ours = made()
    alone = mirrored(1)
    with alone.scope():
        plain = made()
    ends = np.cumsum(rows)
    batch = tuple(
        by_replica(strategy, lambda i, a=a: a[ends[i] - rows[i] : ends[i]])
        for a in (x, y)
    )
    for _ in range(3):
        losses = strategy.run(step_of(*ours), args=batch)
        loss = alone.run(step_of(*plain), args=(x, y))
        total = strategy.reduce("sum", losses, axis=None)
        assert float(total) == pytest.approx(float(loss), rel=1e-5)
    assert_all_close(ours[0].get_weights(), plain[0].get_weights())
    assert float(ours[2].result()) == pytest.approx(
        float(plain[2].result()), rel=1e-5, abs=1e-6
    )
    assert int(ours[1].iterations) == 3
    assert_replicated(ours[0])


def test_collectives_under_a_gradient_of_uneven_rows():
    strategy = mirrored(3)
    x = by_replica(
        strategy, lambda i: np.arange(1, 4 - i)[:, None].astype("float32")
    )

    def fn(x, compiled):
        def loss(x):
            ctx = ks.get_replica_context()
            total = ctx.all_reduce("sum", jnp.sum(x))

            def gather(x):
                return ctx.all_gather(x, axis=0)

            every = (jax.jit(gather) if compiled else gather)(x)
            return total * jnp.sum(x**2) + jnp.sum(jnp.cumsum(every) * total)

        return jax.value_and_grad(loss)(x)

    with strategy.debug():
        expected = strategy.run(fn, args=(x, False))
    found = strategy.run(fn, args=(x, True))
    of = strategy.experimental_local_results
    for one, other in zip(found, expected, strict=True):
        assert_all_close(of(one), of(other), rtol=1e-6, atol=0)


def test_a_collective_in_a_loop_needs_even_rows():
    strategy = mirrored(2)
    x = by_replica(strategy, lambda i: np.ones((2 - i, 1), "float32"))

    def fn(x):
        def add(_, total):
            return total + ks.get_replica_context().all_reduce("sum", x.sum())

        return jax.lax.fori_loop(0, 3, add, 0.0)

    with pytest.raises(RuntimeError, match="inside a loop or a branch"):
        strategy.run(fn, args=(x,))


def test_replicas_that_do_something_else_for_other_rows_are_refused():
    strategy = mirrored(2)
    x = by_replica(strategy, lambda i: np.ones((2 - i, 1), "float32"))

    def fn(x):
        if x.shape[0] == 2:
            return ks.get_replica_context().all_reduce("sum", jnp.sum(x))
        return jnp.sum(x)

    with pytest.raises(ValueError, match="same collectives"):
        strategy.run(fn, args=(x,))


# A user's own variables.


@pytest.mark.parametrize("rows", [(2, 2), (2, 1)], ids=["even", "uneven"])
@pytest.mark.parametrize(
    ("aggregation", "assigned", "added", "subtracted"),
    [
        ("sum", 5.0, 10.0 + 5.0, 10.0 - 5.0),
        ("mean", 2.5, 12.5, 7.5),
        ("only_first_replica", 2.0, 12.0, 8.0),
    ],
)
def test_values_written_in_replicas_are_aggregated(
    aggregation, assigned, added, subtracted, rows
):
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable(10.0, aggregation=aggregation, name="v")
    x = by_replica(strategy, lambda i: np.ones((rows[i], 1), "float32"))
    writes = {"assign": assigned, "assign_add": added, "assign_sub": subtracted}
    for method, expected in writes.items():
        variable.assign(10.0)

        def fn(x, method=method):
            getattr(variable, method)(2.0 + ids() + 0 * jnp.sum(x))
            return variable.value

        seen = values_of(strategy, strategy.run(fn, args=(x,)))
        assert [float(v) for v in seen] == [expected] * 2
        assert float(variable) == expected
        copies = [float(s.data) for s in variable.value.addressable_shards]
        assert copies == [expected] * 2


def test_a_variable_without_aggregation_must_be_written_alike():
    strategy = mirrored(2)
    with strategy.scope():
        steps = keras.Variable(0, dtype="int32", name="steps")
        own = keras.Variable(1.0, name="own")

    def alike():
        steps.assign_add(1)
        own.assign(own * 2)
        return 0

    for _ in range(3):
        strategy.run(alike)
    assert (int(steps), float(own)) == (3, 8.0)
    with pytest.raises(ValueError, match="'own' with aggregation='none'"):
        strategy.run(lambda: own.assign(ids() * 1.0) * 0)
    strategy.run(alike)
    assert int(steps) == 4


def test_what_differs_in_a_later_call_is_reported_at_the_next():
    strategy = mirrored(2)
    with strategy.scope():
        own = keras.Variable(1.0, name="own")

    def fn(scale):
        own.assign(1.0 + ids() * scale)
        return 0

    strategy.run(fn, args=(np.float32(0),))
    strategy.run(fn, args=(np.float32(1),))
    with pytest.raises(ValueError, match="wrote different values"):
        strategy.run(fn, args=(np.float32(0),))


def test_what_a_loss_writes_is_combined_once():
    strategy = mirrored(2)
    with strategy.scope():
        weight = keras.Variable(2.0, name="weight")
        total = keras.Variable(1.0, aggregation="sum", name="total")
        metric = keras.metrics.Sum()
        by_hand = keras.metrics.Sum(name="by_hand")

    def fn():
        def loss():
            total.assign_add(1.0 + ids())
            metric.update_state(ids() + 1.0)
            return weight.value * 3.0, "aux"

        both, grads = ks.value_and_grad(loss, [weight], has_aux=True)()
        (variable,) = by_hand.variables
        variable.assign(variable + 1.0 + ids())
        return both[0], grads[0], both[1]

    value, gradient, aux = strategy.run(fn)
    assert values_of(strategy, value) == [6.0, 6.0]
    assert values_of(strategy, gradient) == [3.0, 3.0]
    assert aux == "aux"
    assert float(total) == 1.0 + 1.0 + 2.0
    assert float(metric.result()) == float(by_hand.result()) == 3.0


def test_gradients_outside_of_run_write_variables_too():
    weight = keras.Variable([1.0, 2.0])
    seen = keras.Variable(0.0)

    def loss(scale):
        seen.assign_add(1.0)
        return scale * jnp.sum(weight.value**2)

    value, grads = ks.value_and_grad(loss, [weight])(3.0)
    assert float(value) == 15.0
    assert grads[0].tolist() == [6.0, 12.0]
    assert ks.grad(loss, [weight])(1.0)[0].tolist() == [2.0, 4.0]
    assert float(seen) == 2.0
    with pytest.raises(TypeError, match="must contain only Keras variables"):
        ks.grad(loss, [np.ones(2)])


# What run cannot do.


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "text"),
    [
        (abs, np.ones(3), None, r"Pass `args=\(x,\)`"),
        (abs, (), [1], r"Pass `args=\(x,\)`"),
    ],
)
def test_what_is_no_call_is_refused(fn, args, kwargs, text):
    with pytest.raises(TypeError, match=text):
        mirrored(2).run(fn, args=args, kwargs=kwargs)


def test_options_have_no_effect():
    strategy = mirrored(2)
    assert strategy.run(lambda: 1, options=ks.RunOptions()) == 1


@pytest.mark.parametrize(
    "fn",
    [
        float,
        np.asarray,
        lambda x: 1 if x > 0 else 2,
        lambda x: [1, 2][x.astype("int32")],
        lambda x: range(x.astype("int32")),
    ],
)
def test_python_that_needs_an_arrays_value_is_told_of_debug_mode(fn):
    strategy = mirrored(2)
    x = by_replica(strategy, lambda i: np.float32(i))
    with pytest.raises(TypeError, match=r"print values in `with strategy"):
        strategy.run(lambda x: (fn(x), None)[1], args=(x,))
    with strategy.debug():
        strategy.run(lambda x: (fn(x), None)[1], args=(x,))


@pytest.mark.parametrize("replicas", combine([2, 8], every=2))
def test_gradients_compose_with_jaxs_transformations(replicas):
    strategy = mirrored(replicas)
    with strategy.scope():
        layer = dense(2)
        layer.build((None, 3))
    x = by_replica(strategy, lambda i: _random.normal(size=(4, 3)) + i)

    def loss(x):
        return jnp.sum(jnp.tanh(layer(x)) ** 2)

    def plainly(x):
        return ks.value_and_grad(loss, layer.trainable_variables)(x)

    def checkpointed(x):
        # Made here: JAX keeps what it traced of a function, and with it the
        # values that variables had then.
        again = jax.checkpoint(lambda x: loss(x))
        return ks.value_and_grad(again, layer.trainable_variables)(x)

    def inside_of_jaxs(x):
        def penalty(x):
            value, grads = plainly(x)
            return value + sum(jnp.sum(g**2) for g in grads)

        return jax.grad(penalty)(x)

    expected = strategy.run(plainly, args=(x,))
    found = strategy.run(checkpointed, args=(x,))
    assert_leaves_close(expected, found, atol=0)
    second = strategy.run(inside_of_jaxs, args=(x,))
    epsilon = 1e-2
    for replica, (x_gradient, part) in enumerate(
        zip(x.values, second.values, strict=True)
    ):

        def penalty(x):
            value, grads = plainly(x)
            return float(value + sum(jnp.sum(g**2) for g in grads))

        x_gradient = jnp.asarray(np.asarray(x_gradient))
        step = np.zeros((4, 3), "float32")
        step[1, 2] = epsilon
        slope = (penalty(x_gradient + step) - penalty(x_gradient - step)) / (
            2 * epsilon
        )
        assert slope == pytest.approx(float(part[1, 2]), rel=2e-2, abs=1e-2), (
            replica
        )

"""Every row of tf.distribute's semantics that has a meaning here.

Each function is one row: its section (contexts, strategy, replica context,
variables), what tf.distribute promises, and the check. Rows that start with
"deviates" assert what docs/parity.md says instead.
"""

import collections
import threading

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.support.per_replica import ids, make_variable, on_read
from tests.support.plain_keras import mirrored

CONTEXTS, STRATEGY, REPLICA, VARIABLES = (
    "1 contexts",
    "2 strategy",
    "3 replica context",
    "4 variables",
)
ROWS = []


def row(section, promise):
    def add(check):
        ROWS.append(pytest.param(check, id=f"{section}: {promise}"))
        return check

    return add


@pytest.mark.parametrize("check", ROWS)
def test_row(check):
    check(mirrored(2))


def parts(*arrays):
    return ks.PerReplica([np.asarray(a) for a in arrays])


def values(per_replica):
    return [np.asarray(v).tolist() for v in per_replica.values]


def replica_id():
    return ks.get_replica_context().replica_id_in_sync_group


# 1. Contexts.


@row(CONTEXTS, "get_strategy is never None")
def _(strategy):
    default = ks.get_strategy()
    assert default.num_replicas_in_sync == 1
    assert default is ks.get_strategy()
    with strategy.scope():
        assert ks.get_strategy() is strategy


@row(CONTEXTS, "has_strategy is False for the default one in its scope")
def _(strategy):
    with ks.get_strategy().scope():
        assert not ks.has_strategy()
    with strategy.scope():
        assert ks.has_strategy()


@row(CONTEXTS, "exactly one of cross-replica and replica context holds")
def _(strategy):
    def check(is_cross, is_inside=True):
        assert ks.in_cross_replica_context() is is_cross
        assert (ks.get_replica_context() is None) is is_cross
        assert ks.has_strategy() is is_inside
        assert (ks.get_strategy() is strategy) is is_inside

    check(False, is_inside=False)
    with strategy.scope():
        check(True)

    def merge(strategy):
        check(True)

    def step():
        check(False)
        ks.get_replica_context().merge_call(merge)

    strategy.run(step)
    variable = keras.Variable(1.0)
    strategy.extended.update(variable, lambda v: check(True))


@row(CONTEXTS, "set_strategy holds without `with`, and is left by None")
def _(strategy):
    ks.experimental_set_strategy(strategy)
    try:
        assert ks.get_strategy() is strategy
    finally:
        ks.experimental_set_strategy(None)
    assert not ks.has_strategy()


@row(CONTEXTS, "set_strategy in a scope: RuntimeError, also for the same")
def _(strategy):
    with strategy.scope():
        for other in (strategy, None):
            with pytest.raises(RuntimeError, match="must not be called inside"):
                ks.experimental_set_strategy(other)


@row(CONTEXTS, "a new thread sees no strategy")
def _(strategy):
    seen = []
    with strategy.scope():
        thread = threading.Thread(target=lambda: seen.append(ks.has_strategy()))
        thread.start()
        thread.join()
    assert seen == [False]


@row(CONTEXTS, "another strategy's scope inside: RuntimeError Mixing")
def _(strategy):
    other = mirrored(3)
    with strategy.scope():
        with pytest.raises(RuntimeError, match="Mixing different"):
            other.scope().__enter__()
        for call in (
            lambda: other.run(lambda: 1),
            lambda: other.reduce("sum", ids(strategy), axis=None),
            lambda: other.gather(0.0, axis=0),
            lambda: other.experimental_distribute_dataset([]),
            lambda: other.extended.call_for_each_replica(lambda: 1),
        ):
            with pytest.raises(RuntimeError, match="Mixing different"):
                call()


CROSS_ONLY = {
    "scope": lambda s: s.scope().__enter__(),
    "run": lambda s: s.run(lambda: 1),
    "reduce": lambda s: s.reduce("sum", 1.0, axis=None),
    "gather": lambda s: s.gather(jnp.ones(1), axis=0),
    "distribute_dataset": lambda s: s.experimental_distribute_dataset(iter(())),
    "from_function": lambda s: s.distribute_datasets_from_function(list),
}


@row(CONTEXTS, "methods of the cross-replica context in a replica: error")
def _(strategy):
    for name, call in CROSS_ONLY.items():
        with pytest.raises(RuntimeError, match="cross-replica context"):
            strategy.run(lambda call=call: call(strategy))
        assert not ks.has_strategy(), name


@row(CONTEXTS, "a replica context used elsewhere: RuntimeError")
def _(strategy):
    kept = []
    strategy.run(lambda: kept.append(ks.get_replica_context()))
    for use in (
        lambda c: c.all_reduce("sum", 1.0),
        lambda c: c.replica_id_in_sync_group,
        lambda c: c.merge_call(lambda s: None),
    ):
        with pytest.raises(RuntimeError, match="inside of the function"):
            use(kept[0])

    def merge(strategy, context):
        context.all_reduce("sum", 1.0)

    def step():
        context = ks.get_replica_context()
        context.merge_call(merge, args=(context,))

    with pytest.raises(RuntimeError, match="inside of the function"):
        strategy.run(step)


@row(CONTEXTS, "scope yields the strategy; nesting it changes nothing")
def _(strategy):
    with strategy.scope() as outer, strategy.scope() as inner:
        assert outer is inner is strategy
    assert not ks.has_strategy()


@row(CONTEXTS, "deviates: a scope object entered after its exit works")
def _(strategy):
    scope = strategy.scope()
    for _ in range(2):
        with scope, scope:
            assert ks.get_strategy() is strategy
    assert not ks.has_strategy()


@row(CONTEXTS, "run, reduce and datasets work outside of the scope")
def _(strategy):
    dataset = strategy.experimental_distribute_dataset(iter([np.ones((4, 1))]))
    for batch in dataset:
        sums = strategy.run(ops.sum, args=(batch,))
        assert float(strategy.reduce("sum", sums, axis=None)) == 4.0


# 2. Strategy.


@row(STRATEGY, "number of replicas, and no cluster on one machine")
def _(strategy):
    assert strategy.num_replicas_in_sync == 2
    assert isinstance(strategy.num_replicas_in_sync, int)
    assert strategy.cluster_resolver is None


@row(STRATEGY, "run replaces distributed values in nests; args may be a list")
def _(strategy):
    def step(a, pair, *, key):
        assert pair[1] == "plain"
        return a + pair[0]["x"] + key

    result = strategy.run(
        step,
        args=[ids(strategy), ({"x": ids(strategy)}, "plain")],
        kwargs={"key": np.float32(10)},
    )
    assert values(result) == [10.0, 12.0]


@row(STRATEGY, "deviates: run is traced once, not called once per replica")
def _(strategy):
    calls = []
    for _ in range(3):
        strategy.run(lambda: calls.append(1))
    # Once to find the variables, once to compile.
    assert len(calls) == 2


@row(STRATEGY, "results are regrouped: nests, equal Python values unwrapped")
def _(strategy):
    Pair = collections.namedtuple("Pair", "a b")
    result = strategy.run(
        lambda: Pair([replica_id(), None], {"n": 3, "s": "text"})
    )
    assert isinstance(result, Pair)
    assert values(result.a[0]) == [0, 1]
    assert result.a[1] is None
    assert result.b == {"n": 3, "s": "text"}


@row(STRATEGY, "results are regrouped: a variable comes back as itself")
def _(strategy):
    variable = keras.Variable(1.0)
    assert strategy.run(lambda: variable) is variable


@row(STRATEGY, "one replica gets and gives plain values")
def _(_):
    one = mirrored(1)
    result = one.run(lambda x: x + 1, args=(ids(one),))
    assert isinstance(result, jax.Array)
    assert float(result) == 1.0


@row(STRATEGY, "the replica's id is an int32, traced")
def _(strategy):
    result = strategy.run(replica_id)
    assert result.values[0].dtype == jnp.int32
    assert values(result) == [0, 1]
    # Deviates: an int32 and a float add up, as in JAX.
    assert values(strategy.run(lambda: 1.5 + replica_id())) == [1.5, 2.5]


@row(STRATEGY, "operations of reduce: a name in any case, or an error")
def _(strategy):
    for op in ("sum", "SUM", "Sum", ks.ReduceOp.SUM):
        assert float(strategy.reduce(op, ids(strategy), axis=None)) == 1.0
    for op in ("MAX", "none", "", 1):
        with pytest.raises(ValueError, match=f"{op!r} is not a valid ReduceOp"):
            strategy.reduce(op, ids(strategy), axis=None)
    with pytest.raises(TypeError, match="axis"):
        strategy.reduce("sum", ids(strategy))


@row(STRATEGY, "reduce with axis=None: elementwise, MEAN by replicas")
def _(strategy):
    value = parts([1.0, 2.0], [3.0, 5.0])
    total = strategy.reduce("sum", value, axis=None)
    assert total.tolist() == [4.0, 7.0]
    assert strategy.reduce("mean", value, axis=None).tolist() == [2.0, 3.5]
    with pytest.raises(ValueError, match="shapes must be equal"):
        strategy.reduce("sum", parts([1.0], [1.0, 2.0]), axis=None)


@row(STRATEGY, "reduce over an axis: the mean is over the true count")
def _(strategy):
    value = parts([1.0, 2.0, 3.0, 4.0], [5.0, 9.0])
    assert float(strategy.reduce("mean", value, axis=0)) == 4.0  # 24 / 6.
    assert float(strategy.reduce("sum", value, axis=0)) == 24.0
    empty = parts([1.0, 3.0], np.zeros(0))
    assert float(strategy.reduce("mean", empty, axis=-1)) == 2.0
    nothing = parts(np.zeros(0), np.zeros(0))
    assert np.isnan(strategy.reduce("mean", nothing, axis=0))
    assert float(strategy.reduce("sum", nothing, axis=0)) == 0.0


@row(STRATEGY, "reduce over several axes: the product of their sizes")
def _(strategy):
    value = parts(np.ones((2, 3)), np.full((1, 3), 4.0))
    assert float(strategy.reduce("mean", value, axis=(0, 1))) == 2.0


@row(STRATEGY, "reduce over an axis that is not there: ValueError")
def _(strategy):
    vector = parts([1.0], [2.0])
    for value, axis in ((vector, 1), (vector, -2), (ids(strategy), 0)):
        for op in ("sum", "mean"):
            with pytest.raises(ValueError, match="out of bounds"):
                strategy.reduce(op, value, axis=axis)


@row(STRATEGY, "deviates: MEAN of int32 is float32; SUM stays int32")
def _(strategy):
    value = parts(np.int32([1, 2]), np.int32([2, 4]))
    for axis in (None, 0):
        mean = strategy.reduce("mean", value, axis=axis)
        assert mean.dtype == jnp.float32
        assert strategy.reduce("sum", value, axis=axis).dtype == jnp.int32
    assert float(strategy.reduce("mean", value, axis=0)) == 2.25


@row(STRATEGY, "reduce maps over nests, also with an axis")
def _(strategy):
    nest = {"a": parts([1.0], [2.0]), "b": (parts([3.0], [4.0]),)}
    total = strategy.reduce("sum", nest, axis=0)
    assert float(total["a"]) == 3.0
    assert float(total["b"][0]) == 7.0


@row(STRATEGY, "reduce of plain values: MEAN is the value, SUM an error")
def _(strategy):
    assert strategy.reduce("mean", 3.0, axis=None) == 3.0
    with pytest.raises(ValueError, match="A non-DistributedValues value"):
        strategy.reduce("sum", 3.0, axis=None)
    assert strategy.reduce("sum", 0.0, axis=None) == 0.0
    assert mirrored(1).reduce("sum", 3.0, axis=None) == 3.0
    assert float(strategy.reduce("sum", jnp.ones(3), axis=0)) == 6.0
    assert float(strategy.reduce("mean", jnp.ones(3), axis=0)) == 1.0


@row(STRATEGY, "reduce of a variable: MEAN is its value, SUM an error")
def _(strategy):
    with strategy.scope():
        variable = keras.Variable(3.0)
    assert float(strategy.reduce("mean", variable, axis=None)) == 3.0
    with pytest.raises(ValueError, match="A non-DistributedValues value"):
        strategy.reduce("sum", variable, axis=None)


@row(STRATEGY, "gather: in the order of replicas, of any sizes along the axis")
def _(strategy):
    value = parts([[1.0, 2.0]], [[3.0, 4.0], [5.0, 6.0]])
    gathered = strategy.gather(value, axis=0)
    assert gathered.tolist() == [[1, 2], [3, 4], [5, 6]]
    with pytest.raises(TypeError, match="shapes that differ"):
        strategy.gather(value, axis=1)
    plain = jnp.ones(2)
    assert strategy.gather(plain, axis=0) is plain


@row(STRATEGY, "local results: a tuple of components, of nests, or the value")
def _(strategy):
    local = strategy.experimental_local_results
    assert [float(v) for v in local(ids(strategy))] == [0.0, 1.0]
    nests = local({"a": ids(strategy), "b": 3})
    assert [(float(n["a"]), n["b"]) for n in nests] == [(0.0, 3), (1.0, 3)]
    assert local(3) == (3,)
    with strategy.scope():
        variable = keras.Variable(2.0)
    assert [float(v) for v in local(variable)] == [2.0, 2.0]


@row(STRATEGY, "values from a function: always per replica, nests allowed")
def _(strategy):
    made = strategy.experimental_distribute_values_from_function(
        lambda c: {"one": 1.0, "id": c.replica_id_in_sync_group}
    )
    assert isinstance(made["one"], ks.PerReplica)
    assert values(made["id"]) == [0, 1]
    one = mirrored(1)
    plain = one.experimental_distribute_values_from_function(lambda c: 5)
    assert plain == 5


@row(STRATEGY, "make_numpy_dataset stacks lists; tuples and dicts are nests")
def _(strategy):
    make = strategy.experimental_make_numpy_dataset
    rows = list(make([np.ones(3), np.zeros(3)]))
    assert [r.tolist() for r in rows] == [[1, 1, 1], [0, 0, 0]]
    first, *_ = make((np.arange(2), {"k": np.arange(2)}))
    assert first == (0, {"k": 0})


# 3. Replica context.


@row(REPLICA, "its properties, and that it is a context manager")
def _(strategy):
    def step():
        context = ks.get_replica_context()
        assert context.num_replicas_in_sync == 2
        assert context.strategy is strategy
        assert context.devices == strategy.extended.worker_devices
        with context as same:
            assert ks.get_replica_context() is context is same

    strategy.run(step)


@row(REPLICA, "merge_call runs once, in the cross-replica context")
def _(strategy):
    calls = []

    def merge(strategy, x, *, plain):
        calls.append(plain)
        return strategy.reduce("sum", x, axis=None), plain

    def step(x):
        context = ks.get_replica_context()
        total, plain = context.merge_call(
            merge, args=(x,), kwargs={"plain": "p"}
        )
        assert plain == "p"
        return total

    assert values(strategy.run(step, args=(ids(strategy),))) == [1.0, 1.0]
    assert calls == ["p", "p"]  # Once a trace.


@row(REPLICA, "merge_call in merge_call: RuntimeError")
def _(strategy):
    def step():
        context = ks.get_replica_context()
        context.merge_call(lambda s: context.merge_call(lambda s: None))

    with pytest.raises(RuntimeError, match="inside of the function"):
        strategy.run(step)


@row(REPLICA, "merge_call of the default context calls the function")
def _(_):
    context = ks.get_replica_context()
    assert context.merge_call(lambda s, x: x + 1, args=(2,)) == 3


@row(REPLICA, "all_reduce of nests, also of numbers and of nothing")
def _(strategy):
    def step(x):
        context = ks.get_replica_context()
        assert context.all_reduce("sum", []) == []
        nest = context.all_reduce(
            ks.ReduceOp.MEAN, {"x": x, "n": (2.0, jnp.ones(2))}
        )
        return nest, context.all_reduce("sum", 2.0)

    nest, total = strategy.run(step, args=(ids(strategy),))
    assert values(nest["x"]) == [0.5, 0.5]
    assert values(nest["n"][1]) == [[1, 1], [1, 1]]
    assert values(total) == [4.0, 4.0]


@row(REPLICA, "deviates: all_reduce SUM of a captured constant is N times it")
def _(strategy):
    constant = jnp.float32(3)
    result = strategy.run(
        lambda: ks.get_replica_context().all_reduce("sum", constant)
    )
    assert values(result) == [6.0, 6.0]


@row(REPLICA, "all_gather of nests along an axis, the same everywhere")
def _(strategy):
    def step(x):
        context = ks.get_replica_context()
        return context.all_gather({"a": x[None, None]}, axis=1)

    result = strategy.run(step, args=(ids(strategy),))
    assert values(result["a"]) == [[[0, 1]], [[0, 1]]]
    with pytest.raises(ValueError, match="out of bounds"):
        strategy.run(lambda: ks.get_replica_context().all_gather(1.0, axis=0))


@row(REPLICA, "gradients: all_reduce gives the reduction of all gradients")
def _(strategy):
    def step(x, op):
        def loss(x):
            total = ks.get_replica_context().all_reduce(op, x)
            return (1.0 + replica_id()) * total

        return jax.grad(loss)(x)

    assert values(strategy.run(step, args=(ids(strategy), "sum"))) == [3, 3]
    assert values(strategy.run(step, args=(ids(strategy), "mean"))) == [1.5] * 2


@row(REPLICA, "gradients: all_gather gives the sum, and the replica's slice")
def _(strategy):
    def step(x):
        def loss(x):
            rows = ks.get_replica_context().all_gather(x, axis=0)
            return (1.0 + replica_id()) * ops.sum(rows * jnp.array([10.0, 1.0]))

        return jax.grad(loss)(x[None])[0]

    assert values(strategy.run(step, args=(ids(strategy),))) == [30.0, 3.0]


@row(REPLICA, "there are two reductions")
def _(_):
    assert {op.name: op.value for op in ks.ReduceOp} == {
        "SUM": "SUM",
        "MEAN": "MEAN",
    }


# 4. Variables.


@row(VARIABLES, "deviates: NONE written differently in replicas is an error")
def _(strategy):
    variable = make_variable(strategy)
    strategy.run(lambda: variable.assign_add(2.0))
    assert float(variable.value) == 3.0
    with pytest.raises(ValueError, match="has no aggregation"):
        strategy.run(lambda: variable.assign(1.0 * replica_id()))
    assert_replicated(variable)


@row(VARIABLES, "SUM, MEAN, ONLY_FIRST: written values are combined")
def _(strategy):
    for aggregation, expected in (
        ("sum", 1 + (2.0 + 3.0)),
        ("mean", 1 + 2.5),
        ("only_first_replica", 1 + 2.0),
    ):
        variable = make_variable(strategy, aggregation=aggregation)
        strategy.run(lambda v=variable: v.assign_add(2.0 + replica_id()))
        assert float(variable.value) == expected
        strategy.run(lambda v=variable: v.assign_sub(2.0 + replica_id()))
        assert float(variable.value) == 1.0
        assert_replicated(variable)


@row(VARIABLES, "a cross write goes to all copies; a cross read is a copy")
def _(strategy):
    variable = make_variable(strategy, aggregation="sum")
    variable.assign(7.0)
    assert values(strategy.run(lambda: variable.value * 1)) == [7.0, 7.0]
    assert float(variable.value) == 7.0
    assert_replicated(variable)


@row(VARIABLES, "on_read: replicas write their own copy")
def _(strategy):
    for aggregation, read in (
        ("sum", 7.0),
        ("mean", 3.5),
        ("only_first_replica", 3.0),
    ):
        variable = on_read(strategy, aggregation)
        strategy.run(lambda v=variable: v.assign_add(2.0 + replica_id()))
        local = strategy.experimental_local_results(variable)
        assert [float(c) for c in local] == [3.0, 4.0]
        assert float(variable.value) == read


@row(VARIABLES, "on_read: a cross assign of SUM is shared out, else copied")
def _(strategy):
    for aggregation, copy in (("sum", 4.0), ("mean", 8.0)):
        variable = on_read(strategy, aggregation)
        variable.assign(8.0)
        local = strategy.experimental_local_results(variable)
        assert [float(c) for c in local] == [copy, copy]


@row(VARIABLES, "deviates: on_read SUM can be added to outside")
def _(strategy):
    variable = on_read(strategy, "sum", 0.0)
    variable.assign_add(4.0)
    assert float(variable.value) == 4.0


@row(VARIABLES, "on_read NONE: a cross read is an error")
def _(strategy):
    variable = make_variable(strategy, synchronization="on_read")
    with pytest.raises(ValueError, match="must have an aggregation"):
        float(variable.value)


@row(VARIABLES, "on_read SUM: the initial value is on every copy")
def _(strategy):
    variable = on_read(strategy, "sum", 3.0)
    assert float(variable.value) == 6.0


@row(VARIABLES, "unknown ways of synchronizing and aggregating are refused")
def _(strategy):
    with pytest.raises(ValueError, match="mode is not supported"):
        make_variable(strategy, synchronization="none")
    with pytest.raises(ValueError, match="synchronization"):
        make_variable(strategy, synchronization="often")
    with pytest.raises(ValueError, match="aggregation"):
        make_variable(strategy, aggregation="max")


@row(VARIABLES, "copies of a random initial value agree")
def _(strategy):
    with strategy.scope():
        layer = keras.layers.Dense(3)
        layer.build((None, 2))
    assert_replicated(*layer.variables)


@row(VARIABLES, "a variable made in run is one for all replicas, and kept")
def _(strategy):
    made = []

    def step():
        if not made:
            made.append(keras.Variable(1.0, aggregation="sum", name="made"))
        made[0].assign_add(1.0)

    for _ in range(2):
        strategy.run(step)
    assert len(made) == 1
    assert float(made[0].value) == 5.0
    assert strategy.extended.variable_created_in_scope(made[0])


@row(VARIABLES, "made outside: plain, read in run, and not the scope's")
def _(strategy):
    variable = keras.Variable(2.0, aggregation="sum", name="outside")
    assert not strategy.extended.variable_created_in_scope(variable)
    assert values(strategy.run(lambda: variable.value + 1)) == [3.0, 3.0]


@row(VARIABLES, "gradients in a replica are local until they are reduced")
def _(strategy):
    variable = make_variable(strategy, 3.0)

    def step(x):
        (local,) = ks.grad(lambda: variable.value * x, [variable])()
        return local, ks.get_replica_context().all_reduce("sum", local)

    local, reduced = strategy.run(step, args=(ids(strategy),))
    assert values(local) == [0.0, 1.0]
    assert values(reduced) == [1.0, 1.0]


@row(VARIABLES, "an optimizer's apply in run sums over the replicas")
def _(strategy):
    with strategy.scope():
        variable = keras.Variable(3.0, name="w")
        optimizer = keras.optimizers.SGD(1.0)

    def step(x):
        grads = ks.grad(lambda: variable.value * x, [variable])()
        optimizer.apply(grads, [variable])

    strategy.run(step, args=(parts(np.float32(1), np.float32(4)),))
    assert float(variable.value) == -2.0


@row(VARIABLES, "metrics are updated in replicas and read outside")
def _(strategy):
    with strategy.scope():
        metric = keras.metrics.Mean()
    strategy.run(metric.update_state, args=(parts([1.0, 2.0], [6.0, 7.0]),))
    assert float(metric.result()) == 4.0


@row(VARIABLES, "extended.update gives each copy its component of arguments")
def _(strategy):
    variable = on_read(strategy, "sum")
    strategy.extended.update(
        variable, lambda v, x: v.assign(10 * x), args=(ids(strategy),)
    )
    local = strategy.experimental_local_results(variable)
    assert [float(c) for c in local] == [0.0, 10.0]
    assert float(variable.value) == 10.0


@row(VARIABLES, "a value per replica is not one array outside, but is in run")
def _(strategy):
    with pytest.raises(ValueError, match="as one array"):
        np.asarray(ids(strategy))
    assert values(strategy.run(jnp.exp2, args=(ids(strategy),))) == [1.0, 2.0]

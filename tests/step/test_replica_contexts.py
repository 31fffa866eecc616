"""A model's code in the loops sees the replica that it runs for, as in `run`.

Each use of a replica context is made in a layer, a loss, a metric or a train
step, and its numbers are those of a loop over the replicas in numpy.
"""

import warnings

import jax
import keras
import numpy as np
import pytest
from keras import ops

import keras_strategies as ks
from tests.support.combinations import combine, cover
from tests.support.models import compiled_in
from tests.support.plain_keras import mirrored

FEATURES = 2
_random = np.random.default_rng(3)


def batch(rows):
    return _random.normal(size=(rows, FEATURES)).astype("float32")


def context():
    return ks.get_replica_context()


def by_id(x):
    scale = ops.cast(context().replica_id_in_sync_group, x.dtype) + 1.0
    return x * scale


def minus_sum(x):
    return x - context().all_reduce("sum", ops.mean(x, axis=0))


def minus_mean(x):
    return x - context().all_reduce(ks.ReduceOp.MEAN, ops.sum(x, axis=0))


def against_all(x):
    rows = context().all_gather(x, axis=0)
    return ops.matmul(x, ops.transpose(ops.mean(rows, 0, keepdims=True)))


def merged(x):
    def largest(strategy, value):
        return strategy.reduce("sum", value, axis=None)

    return x - context().merge_call(largest, args=(ops.mean(x, axis=0),))


def counted(x):
    return x / context().num_replicas_in_sync - ops.mean(
        context().all_reduce("sum", x[:1] * 0.0)
    )


# What each use makes of the rows of all replicas, a list of arrays.
USES = {
    "id": (by_id, lambda xs: [x * (i + 1) for i, x in enumerate(xs)]),
    "sum": (
        minus_sum,
        lambda xs: [x - sum(each.mean(0) for each in xs) for x in xs],
    ),
    "mean": (
        minus_mean,
        lambda xs: [x - sum(e.sum(0) for e in xs) / len(xs) for x in xs],
    ),
    "all_gather": (
        against_all,
        lambda xs: [
            x @ np.concatenate(xs).mean(0, keepdims=True).T for x in xs
        ],
    ),
    "merge_call": (
        merged,
        lambda xs: [x - sum(each.mean(0) for each in xs) for x in xs],
    ),
    "num_replicas": (counted, lambda xs: [x / len(xs) for x in xs]),
}


class Uses(keras.layers.Layer):
    def __init__(self, use):
        super().__init__()
        self.use = use
        self.seen = set()

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        if ks.in_cross_replica_context():
            # A functional model that is made in a scope, as in tf.
            return x
        strategy = ks.get_strategy()
        self.seen.add((type(strategy).__name__, strategy.num_replicas_in_sync))
        return self.use(x * self.scale)


def split(x, replicas):
    """As the loops and `run` share rows: the first ones have one more."""
    floor, extra = divmod(len(x), replicas)
    sizes = [floor + (k < extra) for k in range(replicas)]
    return np.split(x, np.cumsum(sizes)[:-1])


def model_of(strategy, use, loss="mse", **compiled):
    with strategy.scope():
        layer = Uses(use)
        model = keras.Sequential([layer])
        model.compile(keras.optimizers.SGD(0.1), loss, **compiled)
    return model, layer


def partitioned(replicas):
    devices = [f"CPU:{i}" for i in range(replicas)]
    shards = ks.experimental.FullySharded(min_size=1)
    return ks.MirroredStrategy(devices, variable_partitioner=shards)


@pytest.mark.parametrize(
    ("name", "rows", "replicas"), cover(USES, (12, 7), (1, 2, 3, 4))
)
def test_a_layer_sees_its_replica(name, rows, replicas):
    use, expected = USES[name]
    x = batch(rows)
    strategy = mirrored(replicas)
    model, layer = model_of(strategy, use)
    of_all = expected([part.astype("float64") for part in split(x, replicas)])
    rows_of_all = np.concatenate(of_all)
    found = model.predict(x, batch_size=rows, verbose=0)
    np.testing.assert_allclose(found, rows_of_all, rtol=2e-5, atol=1e-5)
    loss = float(np.mean(rows_of_all**2))
    y = np.zeros_like(rows_of_all, "float32")
    found = model.evaluate(x, y, batch_size=rows, verbose=0)
    assert found == pytest.approx(loss, rel=2e-5, abs=1e-6)
    history = model.fit(x, y, batch_size=rows, shuffle=False, verbose=0)
    assert history.history["loss"] == [pytest.approx(loss, rel=2e-5, abs=1e-6)]
    # Outputs are of that degree in the scale, and losses of twice that.
    degree = 2 if name == "all_gather" else 1
    after = 1 - 0.1 * 2 * degree * loss
    assert np.asarray(layer.scale) == pytest.approx(after, rel=5e-5, abs=1e-6)
    assert layer.seen == {("MirroredStrategy", replicas)}
    ks.testing.assert_replicated(model)


def test_run_gives_the_same_numbers():
    for rows in (12, 7):
        x = batch(rows)
        strategy = mirrored(3)
        data = strategy.experimental_distribute_values_from_function(
            lambda ctx, x=x: split(x, 3)[ctx.replica_id_in_sync_group]
        )
        for use, expected in USES.values():
            parts = strategy.experimental_local_results(
                strategy.run(use, args=(data,))
            )
            for found, other in zip(parts, expected(split(x, 3)), strict=True):
                np.testing.assert_allclose(found, other, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("steps", "make"), combine((3, 1), (mirrored, partitioned), every=3)
)
def test_several_steps_of_even_and_uneven_batches(steps, make):
    """Batches of 6, 6 and 3 rows, and of one row: fewer than replicas."""
    x = np.concatenate([batch(15), batch(1)])
    y = np.zeros((16, FEATURES), "float32")
    weights = []
    for replicas, of_steps in ((4, 1), (4, steps)):
        keras.utils.set_random_seed(0)
        strategy = make(replicas) if of_steps == steps else mirrored(replicas)
        with strategy.scope():
            inputs = keras.Input((FEATURES,))
            hidden = keras.layers.Dense(4, "tanh")(inputs)
            outputs = keras.layers.Dense(FEATURES)(Uses(minus_mean)(hidden))
            model = keras.Model(inputs, outputs)
            model.compile("sgd", "mse", steps_per_execution=of_steps)
        for part in (slice(0, 15), slice(15, 16)):
            model.fit(x[part], y[part], batch_size=6, shuffle=False, verbose=0)
        weights.append(model.get_weights())
        ks.testing.assert_replicated(model)
    for one, other in zip(*weights, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        assert np.all(np.isfinite(one))


def check_as_one_device(replicas, train):
    """Asserts that `train(strategy)` has the numbers of one device."""
    found = []
    for strategy in (mirrored(replicas), ks.OneDeviceStrategy("CPU:0")):
        keras.utils.set_random_seed(0)
        found.append(train(strategy))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=3e-5, atol=1e-6)


def contrastive(y_true, y_pred):
    """Each row against the rows of all replicas, as in SimCLR on TPUs."""
    ctx = context()
    every = ctx.all_gather(y_pred, axis=0)
    logits = ops.matmul(y_pred, ops.transpose(every))
    rows = ops.shape(y_pred)[0]
    place = ctx.replica_id_in_sync_group * rows + ops.arange(rows)
    return -ops.take_along_axis(
        ops.log_softmax(logits), ops.cast(place, "int32")[:, None], axis=1
    )


@pytest.mark.parametrize("replicas", combine([2, 3], every=2))
def test_a_contrastive_loss_over_all_replicas_is_that_of_one_device(replicas):
    def train(strategy):
        with strategy.scope(), warnings.catch_warnings():
            warnings.simplefilter("error")
            model = keras.Sequential(
                [keras.Input((FEATURES,)), keras.layers.Dense(3)]
            )
            model.compile(keras.optimizers.SGD(0.1), contrastive)
            x = np.linspace(-1, 1, 24).reshape(12, 2).astype("float32")
            history = model.fit(
                x, x[:, :1], batch_size=12, epochs=3, shuffle=False, verbose=0
            )
        return [history.history["loss"], *model.get_weights()]

    check_as_one_device(replicas, train)


class SeenIds(keras.metrics.Metric):
    """The sum of what each replica adds: its id + 1, for each row."""

    def __init__(self):
        super().__init__(name="ids")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        replica = ops.cast(context().replica_id_in_sync_group, "float32") + 1
        rows = ops.sum(ops.ones_like(y_pred[:, 0]))
        self.total.assign_add(replica * rows)

    def result(self):
        return ops.convert_to_tensor(self.total)


@pytest.mark.parametrize(
    ("replicas", "rows"), combine([2, 3], [12, 7], every=3)
)
def test_a_metric_sees_its_replica(replicas, rows):
    x = batch(rows)
    model, _ = model_of(mirrored(replicas), lambda x: x, metrics=[SeenIds()])
    expected = sum(
        (i + 1) * len(part) for i, part in enumerate(split(x, replicas))
    )
    y = np.zeros_like(x)
    found = model.evaluate(x, y, batch_size=rows, return_dict=True, verbose=0)
    assert found["ids"] == expected
    history = model.fit(x, y, batch_size=rows, verbose=0)
    assert history.history["ids"] == [expected]


class OwnStep(keras.Model):
    """Averages over the replicas what it has computed of its own rows."""

    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
        self.built = True

    def call(self, x):
        return x * self.scale

    def train_step(self, state, data):
        weights, others, slots, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        compute = jax.value_and_grad(lambda w: self.loss_of(x, y, w[0]))
        total, grads = self.reduce(x, *compute(weights))
        weights, slots = self.optimizer.stateless_apply(slots, grads, weights)
        return {"total": total}, (weights, others, slots, metrics)

    def loss_of(self, x, y, scale):
        center = context().all_reduce("mean", ops.mean(x * scale))
        return ops.mean(ops.square(x * scale - center - y))

    def reduce(self, x, loss, grads):
        return context().all_reduce("mean", loss), grads


@pytest.mark.parametrize(
    ("replicas", "rows"), combine([1, 2, 3], [12, 7], every=2)
)
def test_a_train_step_of_ones_own_sees_its_replica(replicas, rows):
    x = batch(rows)
    model = compiled_in(mirrored(replicas), OwnStep, keras.optimizers.SGD(0.1))
    parts = split(x.astype("float64"), replicas)
    center = np.mean([part.mean() for part in parts])
    loss = np.mean([np.mean((part - center) ** 2) for part in parts])
    y = np.zeros_like(x)
    history = model.fit(x, y, batch_size=rows, shuffle=False, verbose=0)
    assert history.history["total"] == [pytest.approx(loss, rel=2e-5)]
    # The loss is the scale's square times that of scale 1.
    assert np.asarray(model.scale) == pytest.approx(1 - 0.2 * loss, rel=5e-5)
    found = model.train_on_batch(x, y, return_dict=True)
    assert np.isfinite(found["total"])


class Counts(OwnStep):
    def train_step(self, state, data):
        logs, state = super().train_step(state, data)
        return logs | {"epochs": ops.convert_to_tensor(3, "int32")}, state


@pytest.mark.parametrize("rows", [12, 7])
def test_an_integer_in_the_logs_is_not_counted_by_each_replica(rows):
    x = batch(rows)
    model = compiled_in(mirrored(2), Counts, keras.optimizers.SGD(0.1))
    logs = model.train_on_batch(x, np.zeros_like(x), return_dict=True)
    assert int(logs["epochs"]) == 3


def test_batches_of_a_method_see_their_replica():
    x = batch(7)
    use, expected = USES["sum"]
    model, _ = model_of(mirrored(3), use)
    rows = np.concatenate(expected(split(x, 3)))
    loss = float(np.mean(rows**2))
    np.testing.assert_allclose(
        model.predict_on_batch(x), rows, rtol=2e-5, atol=1e-5
    )
    y = np.zeros_like(x)
    assert model.test_on_batch(x, y) == pytest.approx(loss, rel=2e-5)
    assert model.train_on_batch(x, y) == pytest.approx(loss, rel=2e-5)


@pytest.mark.parametrize(
    "reduction", ["sum", "sum_over_batch_size", "mean_with_sample_weight"]
)
def test_weights_of_rows_and_sums_are_exact_on_uneven_replicas(reduction):
    """A layer that asks for its replica, and losses with each reduction."""
    x, y = batch(7), batch(7)
    options = {"batch_size": 7, "shuffle": False, "verbose": 0, "epochs": 2}
    options["sample_weight"] = np.linspace(0.1, 2.0, 7).astype("float32")

    def train(strategy):
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        model, _ = model_of(
            strategy,
            lambda x: x + 0.0 * context().all_reduce("sum", ops.mean(x)),
            loss,
        )
        history = model.fit(x, y, **options)
        return [history.history["loss"], *model.get_weights()]

    check_as_one_device(3, train)


def test_a_step_over_the_global_batch_has_no_replica():
    strategy = mirrored(2)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((3, FEATURES), batch_size=4),
                keras.layers.LSTM(3, stateful=True),
                Uses(minus_sum),
            ]
        )
        model.compile("sgd", "mse")
    x = np.ones((4, 3, FEATURES), "float32")
    with pytest.raises(RuntimeError, match="over the global batch"):
        model.fit(x, np.ones((4, 3)), batch_size=4, verbose=0)
    with pytest.raises(RuntimeError, match="over the global batch"):
        model.predict(x, batch_size=4, verbose=0)


@pytest.mark.parametrize("rows", [4, 3])
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_an_eager_step_has_no_replica(method, rows):
    x = batch(rows)
    model = compiled_in(
        mirrored(2),
        lambda: keras.Sequential([keras.Input((FEATURES,)), Uses(minus_sum)]),
        "sgd",
        "mse",
        run_eagerly=True,
    )
    data = (x,) if method == "predict" else (x, x)
    with pytest.raises(RuntimeError, match="run_eagerly=True"):
        getattr(model, method)(*data, batch_size=rows, verbose=0)


class Regularized(OwnStep):
    """Adds its weights to the loss, whatever the rows."""

    def loss_of(self, x, y, scale):
        loss = keras.losses.MeanSquaredError()(y, x * scale)
        return loss + 0.5 * ops.square(scale)

    def reduce(self, x, loss, grads):
        self.asked = context().replica_id_in_sync_group
        return loss, grads


@pytest.mark.parametrize("rows", combine([7, 2, 1], every=2))
def test_a_replica_without_rows_has_no_gradient(rows):
    x, y = batch(rows), batch(rows)
    model = compiled_in(mirrored(4), Regularized, keras.optimizers.SGD(0.1))
    options = {"batch_size": rows, "shuffle": False, "verbose": 0}
    model.fit(x, y, epochs=2, **options)
    scale = 1.0
    for _ in range(2):
        scale -= 0.1 * (np.mean(2 * x * (x * scale - y)) + scale)
    assert np.asarray(model.scale) == pytest.approx(scale, rel=2e-5)


@pytest.mark.parametrize("rows", combine([12, 7, 2], every=3))
def test_synchronized_statistics_are_those_of_all_rows(rows):
    """Beside a layer that asks for its replica; two have no rows, of two."""
    x, y = batch(rows), batch(rows)

    def train(strategy):
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((FEATURES,)),
                    Uses(lambda x: x + 0.0 * context().all_reduce("sum", 1.0)),
                    keras.layers.BatchNormalization(
                        synchronized=True, momentum=0.5
                    ),
                ]
            )
            model.compile(keras.optimizers.SGD(0.1), "mse")
        options = {"batch_size": rows, "shuffle": False, "verbose": 0}
        model.fit(x, y, epochs=2, **options)
        return model.get_weights()

    check_as_one_device(4, train)


@pytest.mark.parametrize("rows", [4, 3])
def test_other_rows_than_the_batch_has_are_not_returned(rows):
    def rows_of_all(x):
        return context().all_gather(x, axis=0)

    model, _ = model_of(mirrored(2), rows_of_all)
    with pytest.raises(RuntimeError, match="the number of rows of the batch"):
        model.predict(batch(rows), batch_size=rows, verbose=0)


def centered(x):
    """Subtracts the mean of all replicas' rows."""
    if ks.in_cross_replica_context():
        return x
    rows = ops.cast(ops.shape(x)[0], x.dtype)
    total = context().all_reduce("sum", ops.sum(x, axis=0))
    return x - total / context().all_reduce("sum", rows)


@pytest.mark.parametrize(
    ("loss", "rows"),
    combine(
        ["mse", keras.losses.MeanSquaredError("mean_with_sample_weight")],
        [2, 7],
        every=3,
    ),
)
def test_looked_up_weights_before_a_collective(rows, loss):
    """Without rows a lookup has no gradient, which others wait for."""
    tokens = _random.integers(1, 5, (rows, 3))
    y = batch(rows)[:, :1]
    weight = np.linspace(0.5, 2.0, rows).astype("float32")

    def train(strategy):
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((3,)),
                    keras.layers.Embedding(5, 2),
                    keras.layers.Lambda(centered),
                    keras.layers.Flatten(),
                    keras.layers.Dense(1),
                ]
            )
            model.compile(keras.optimizers.SGD(0.1), loss)
        options = {"batch_size": rows, "shuffle": False, "verbose": 0}
        model.fit(tokens, y, sample_weight=weight, epochs=2, **options)
        return model.get_weights()

    check_as_one_device(3, train)


class Reduces(OwnStep):
    """Reduces its gradients itself, with the rows of all replicas."""

    def loss_of(self, x, y, scale):
        return ops.sum(ops.square(x * scale - y))

    def reduce(self, x, loss, grads):
        size = context().all_reduce("sum", float(x.shape[0] * x.shape[1]))
        return loss, [context().all_reduce("sum", grads[0]) / size]


@pytest.mark.parametrize("rows", combine([7, 2], every=2))
def test_gradients_that_a_step_reduces_itself(rows):
    x, y = batch(rows), batch(rows)
    model = compiled_in(mirrored(3), Reduces, keras.optimizers.SGD(0.1))
    model.fit(x, y, batch_size=rows, shuffle=False, verbose=0)
    scale = 1 - 0.1 * np.mean(2 * x * (x - y))
    assert np.asarray(model.scale) == pytest.approx(scale, rel=2e-5)


@pytest.mark.parametrize("rows", combine([6, 7], every=2))
def test_a_problem_after_a_collective_is_raised_as_it_is(rows):
    flags = {"fails": False}

    def use(x):
        total = context().all_reduce("sum", ops.mean(x))
        if flags["fails"]:
            raise KeyError("a problem of the layer")
        return x - total

    x = batch(rows)
    model, _ = model_of(mirrored(2), use)
    model.fit(x, x, batch_size=rows, verbose=0)
    model.make_train_function(force=True)
    flags["fails"] = True
    for run in (
        lambda: model.predict(x, batch_size=rows, verbose=0),
        lambda: model.fit(x, x, batch_size=rows, verbose=0),
    ):
        with pytest.raises(KeyError, match="a problem of the layer"):
            run()
    flags["fails"] = False
    model.fit(x, x, batch_size=rows, verbose=0)


@pytest.mark.parametrize("replicas", combine((2, 3), every=2))
def test_a_jitted_function_is_asked_in_each_step(replicas):
    """JAX keeps its trace, in which replicas had other numbers of rows."""

    def minus_total(x):
        return x - 0.1 * context().all_reduce("sum", ops.sum(x, axis=0))

    jitted = jax.jit(minus_total)
    model, _ = model_of(mirrored(replicas), jitted)
    for rows in (6, 5, 7):
        x = batch(rows)
        expected = x - 0.1 * x.sum(axis=0)
        found = model.predict(x, batch_size=rows, verbose=0)
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5)
        loss = model.train_on_batch(x, np.zeros_like(x))
        assert loss == pytest.approx(np.mean(expected**2), rel=1e-4)
        model.set_weights([np.ones_like(w) for w in model.get_weights()])


def test_callbacks_see_what_they_saw_before():
    seen = []
    strategy = mirrored(2)
    model, _ = model_of(strategy, minus_sum)
    callback = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(
            (ks.has_strategy(), ks.get_strategy().num_replicas_in_sync)
        )
    )
    x = batch(4)
    model.fit(x, x, batch_size=4, callbacks=[callback], verbose=0)
    with strategy.scope():
        model.fit(x, x, batch_size=4, callbacks=[callback], verbose=0)
    assert seen == [(False, 1), (True, 2)]
    assert not ks.has_strategy()


def test_one_replica_after_an_error_in_a_step():
    def fails(x):
        context().all_reduce("sum", ops.mean(x))
        raise ValueError("a problem of the layer")

    model, _ = model_of(mirrored(2), fails)
    with pytest.raises(ValueError, match="a problem of the layer"):
        model.predict(batch(4), verbose=0)
    assert ks.get_strategy().num_replicas_in_sync == 1

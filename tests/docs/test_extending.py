"""docs/extending.md: each of its classes works where the page says."""

import ast
import pathlib
import re

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.support.combinations import combine
from tests.support.plain_keras import assert_same, dense, mirrored

TEXT = (pathlib.Path(__file__).parents[2] / "docs/extending.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.M | re.S)
_random = np.random.default_rng(0)
X = _random.normal(size=(22, 3)).astype("float32")
Y = _random.normal(size=(22, 1)).astype("float32")
COLUMNS = {"image": X, "label": Y}


def made(name):
    """The class of that name, as the page defines it."""
    (block,) = (b for b in BLOCKS if f"class {name}(" in b)
    names = {"ks": ks, "jax": jax, "keras": keras, "np": np}
    exec(block, names)
    return names[name]


def model_of(strategy, seed=1):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), dense(1)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def plain_model():
    model = keras.Sequential([keras.Input((3,)), dense(1)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def test_every_class_of_the_page_is_tried():
    names = [
        node.name
        for block in BLOCKS
        for node in ast.parse(block).body
        if isinstance(node, ast.ClassDef)
    ]
    assert names == ["EveryOther", "Table", "FromOurScheduler", "Patience"]


# A strategy.


def test_a_strategy_takes_six_lines_and_has_one_devices_numbers(tmp_path):
    strategy = made("EveryOther")()
    (block,) = (b for b in BLOCKS if "class EveryOther(" in b)
    assert len([line for line in block.splitlines() if line.strip()]) <= 6
    assert strategy.mesh.devices == tuple(jax.devices()[::2])
    assert strategy.num_replicas_in_sync == 4
    assert strategy.mesh.mesh.axis_names == ("replica",)
    plain, model = plain_model(), model_of(strategy)
    for each in (plain, model):
        each.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert_same(plain.get_weights(), model.get_weights())
    assert_same(
        plain.evaluate(X, Y, verbose=0), model.evaluate(X, Y, verbose=0)
    )
    assert_replicated(model)

    def fn():
        return ks.get_replica_context().replica_id_in_sync_group

    total = strategy.reduce("sum", strategy.run(fn), axis=None)
    assert int(total) == 0 + 1 + 2 + 3
    config = ks.estimator.RunConfig(
        model_dir=str(tmp_path), train_distribute=strategy
    )
    estimator = ks.estimator.model_to_estimator(plain_model(), config=config)
    estimator.train(lambda: (X, Y), steps=1)
    assert estimator.get_variable_value("global_step") == 1


def test_replicas_of_two_cores_divide_variables():
    class Pairs(ks.Strategy):
        def __init__(self):
            mesh = ks.ReplicaMesh(devices=jax.devices(), cores_per_replica=2)
            super().__init__(mesh, layout_map={".*kernel": ("model", None)})

    strategy = Pairs()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), dense(2)])
        model.compile("sgd", "mse")
    model.fit(np.ones((8, 4)), np.ones((8, 2)), verbose=0)
    kernel = model.weights[0].value
    assert kernel.addressable_shards[0].data.shape == (2, 2)


@pytest.mark.parametrize(
    ("make", "error", "part"),
    [
        (lambda: ks.Strategy(jax.devices()), TypeError, "ks.ReplicaMesh"),
        (lambda: ks.ReplicaMesh(devices=["cpu:0"]), TypeError, "'cpu:0'"),
        (lambda: ks.ReplicaMesh(devices=[]), ValueError, "at least one"),
        (
            lambda: ks.ReplicaMesh(devices=[jax.devices()[0]] * 2),
            ValueError,
            "must not contain duplicates",
        ),
    ],
)
def test_a_wrong_mesh_is_refused(make, error, part):
    with pytest.raises(error, match=part) as caught:
        make()
    assert "Received: " in str(caught.value)


# A source.


def arrays_in_order(source, epochs):
    """The batches of a source's epochs, for plain Keras."""
    for epoch in range(epochs):
        for part in source.read(epoch, 0, lambda rows: (0, rows)):
            yield part.data


@pytest.mark.parametrize(
    ("steps", "replicas"), combine([1, 2], [1, 2, 3, 8], every=4)
)
def test_a_source_trains_as_its_rows_do_in_plain_keras(replicas, steps):
    source = made("Table")(COLUMNS, 8, seed=3)
    plain = plain_model()
    for x, y in arrays_in_order(source, epochs=2):
        plain.train_on_batch(x, y)
    strategy = mirrored(replicas)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), dense(1)])
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(optimizer, "mse", steps_per_execution=steps)
    model.fit(source, epochs=2, verbose=0)
    assert_same(plain.get_weights(), model.get_weights())
    assert_replicated(model)


def test_every_entry_point_takes_a_source(tmp_path):
    strategy, plain = mirrored(3), plain_model()
    model = model_of(strategy)
    model.set_weights(plain.get_weights())
    Table = made("Table")
    source = Table(COLUMNS, 8, seed=3)
    expected = plain.evaluate(X, Y, verbose=0)
    assert_same(expected, model.evaluate(source, verbose=0))
    order = np.concatenate([y for _, y in arrays_in_order(source, 1)])
    outputs = model.predict(Table(COLUMNS, 8, seed=3), verbose=0)
    rows = np.concatenate([x for x, _ in arrays_in_order(source, 1)])
    assert_same(plain.predict(rows, verbose=0), outputs)
    history = model.fit(
        source, validation_data=Table(COLUMNS, 5, seed=0), verbose=0
    ).history
    assert_same(history["val_loss"][-1], model.evaluate(X, Y, verbose=0))
    dataset = strategy.experimental_distribute_dataset(
        Table(COLUMNS, 8, seed=3)
    )
    seen = [strategy.gather(y, axis=0) for _, y in dataset]
    np.testing.assert_array_equal(np.concatenate(seen), order)
    assert "a table" in str(strategy.explain_input(Table(COLUMNS, 8, seed=3)))
    config = ks.estimator.RunConfig(
        model_dir=str(tmp_path), train_distribute=strategy
    )
    estimator = ks.estimator.model_to_estimator(plain_model(), config=config)
    estimator.train(lambda: Table(COLUMNS, 8, seed=3), steps=3)
    assert estimator.get_variable_value("global_step") == 3


def test_a_fit_on_a_source_resumes_in_the_middle_of_an_epoch(tmp_path):
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations) == 4:
                raise KeyboardInterrupt

    Table = made("Table")

    def fit(directory, *callbacks):
        model = model_of(mirrored(2))
        model.set_weights([np.ones((3, 1)), np.zeros(1)])
        checkpoint = ks.callbacks.Checkpoint(directory, save_every_steps=1)
        source = Table(COLUMNS, 8, seed=3)
        calls = [checkpoint, *callbacks]
        model.fit(source, epochs=3, verbose=0, callbacks=calls)
        return model.get_weights()

    whole = fit(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "run", Stop())
    assert_same(whole, fit(tmp_path / "run"), tolerance=0)


def test_steps_per_epoch_continues_in_a_source():
    Table, model = made("Table"), model_of(mirrored(2))
    # Four batches, two passes.
    source = Table(COLUMNS, 6, 3)
    model.fit(source, steps_per_epoch=2, epochs=4, verbose=0)
    plain = plain_model()
    for x, y in arrays_in_order(Table(COLUMNS, 6, 3), epochs=2):
        plain.train_on_batch(x, y)
    assert_same(plain.get_weights(), model.get_weights())


class NoParts(ks.data.Source):
    def read(self, epoch, start, cut):
        yield X[:4], Y[:4]


class Infinite(ks.data.Source):
    is_infinite = True

    def read(self, epoch, start, cut):
        while True:
            yield ks.data.take((X[:4], Y[:4]), cut)


def off():
    return ks.InputOptions(
        distribute=ks.data.DistributeOptions(
            auto_shard_policy=ks.data.AutoShardPolicy.OFF
        )
    )


@pytest.mark.parametrize(
    ("act", "error", "part"),
    [
        (lambda s, m: m.fit(NoParts(), verbose=0), TypeError, "ks.data.take"),
        (
            lambda s, m: m.fit(Infinite(), verbose=0),
            ValueError,
            "needs a number of steps",
        ),
        (lambda s, m: m.fit(Infinite(), Y), ValueError, "`y`"),
        (
            lambda s, m: s.experimental_distribute_dataset(Infinite(), off()),
            ValueError,
            "itself decides",
        ),
    ],
)
def test_what_makes_no_sense_with_a_source_is_refused(act, error, part):
    strategy = mirrored(2)
    model = model_of(strategy)
    with pytest.raises(error, match=part) as caught:
        act(strategy, model)
    assert re.search("Received: |Pass ", str(caught.value))
    assert int(model.optimizer.iterations) == 0


def test_an_infinite_source_takes_a_number_of_steps():
    model = model_of(mirrored(2))
    model.fit(Infinite(), steps_per_epoch=3, epochs=2, verbose=0)
    assert int(model.optimizer.iterations) == 6


def test_class_weights_apply_to_a_source():
    columns = {"image": X, "label": (Y[:, 0] > 0).astype("int32")}
    Table = made("Table")
    weights = {0: 0.5, 1: 2.0}
    plain, model = plain_model(), model_of(mirrored(3))
    rows = list(arrays_in_order(Table(columns, 22, 0), 1))
    for each, given in ((plain, rows[0]), (model, (Table(columns, 22, 0),))):
        each.fit(
            *given,
            class_weight=weights,
            shuffle=False,
            batch_size=22,
            verbose=0,
        )
    assert_same(plain.get_weights(), model.get_weights())


# A resolver.


def test_a_resolver_says_where_each_process_is():
    environ = {"OUR_HOSTS": "a:2222,b:2222", "OUR_RANK": "1"}
    resolver = made("FromOurScheduler")(environ)
    info = ks.cluster_resolver.task_info(resolver)
    assert (info.process_id, info.num_processes) == (1, 2)
    assert info.coordinator_address == "a:2222"
    assert resolver.master() == "b:2222"
    assert resolver.master("worker", 0, "grpc") == "grpc://a:2222"


def test_a_resolver_of_one_process_makes_a_strategy():
    environ = {"OUR_HOSTS": "localhost:2222", "OUR_RANK": "0"}
    resolver = made("FromOurScheduler")(environ)
    strategy = ks.MultiWorkerMirroredStrategy(resolver)
    assert strategy.cluster_resolver is resolver
    assert strategy.num_replicas_in_sync == 8


# A callback.


def test_a_callbacks_state_is_resumed(tmp_path):
    patience = made("Patience")
    first = patience(epochs=5)

    def fit(callback, epochs):
        model = model_of(mirrored(2))
        checkpoint = ks.callbacks.Checkpoint(tmp_path, save_every_epochs=1)
        calls = [checkpoint, callback]
        model.fit(X, Y, epochs=epochs, verbose=0, callbacks=calls)

    fit(first, 2)
    second = patience(epochs=5)
    fit(second, 3)
    assert second._best <= first._best < float("inf")
    third = patience(epochs=1)
    third.on_train_begin()
    third.set_state(second.get_state())
    assert third.get_state() == second.get_state()

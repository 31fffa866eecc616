"""Replicas whose cores belong to several processes; run in each of them."""

import functools
import pathlib
import warnings

import jax
import keras
import numpy as np

import keras_strategies as ks
from keras_strategies.testing import assert_replicated

warnings.filterwarnings("ignore", "Your input ran out of data")
# AutoGraph looks for the source of lambdas.
warnings.filterwarnings("ignore", category=DeprecationWarning)

LAYOUT = {
    ".*up/kernel": (None, "model"),
    ".*up/bias": ("model",),
    ".*down/kernel": ("model", None),
}
_random = np.random.default_rng(0)
X = _random.normal(size=(22, 6)).astype("float32")
Y = np.tanh(X[:, :3])


def spanning(width, shares=False):
    """A strategy whose replicas have a core in each of `width` processes.

    Args:
      width: Processes that share replicas follow each other.
      shares: Whether a process has cores of other replicas as well, which is
        refused.
    """
    topology = ks.tpu.experimental.Topology.from_devices(jax.devices())
    places = topology.device_coordinates
    cores = [
        [places[(task + k) % len(places), device] for k in range(width)]
        for task in range(0, len(places), width)
        for device in range(len(places[0]))
    ]
    if shares:
        flat = places.reshape(-1, places.shape[-1])
        pairs = (0, 1), (2, 4), (3, 5), (6, 7)
        cores = [[flat[i] for i in pair] for pair in pairs]
    assignment = ks.tpu.experimental.DeviceAssignment(topology, np.array(cores))
    return ks.TPUStrategy(device_assignment=assignment, layout_map=LAYOUT)


def compiled(optimizer=None):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", name="up"),
            keras.layers.Dropout(0.0),
            keras.layers.Dense(3, name="down"),
        ]
    )
    optimizer = optimizer or keras.optimizers.Adam(0.01, epsilon=0.01)
    model.compile(optimizer, "mse", metrics=["mae"])
    return model


@functools.cache
def used(strategy, directory=None):
    """What the loops of a model return, and its weights."""
    with strategy.scope() if strategy else warnings.catch_warnings():
        model = compiled()
    loops = {"batch_size": 8, "verbose": 0}
    fit = loops | {"epochs": 2, "shuffle": False}
    found = {
        "history": model.fit(X, Y, **fit).history,
        "evaluate": model.evaluate(X, Y, **loops),
        "predict": model.predict(X, **loops).tolist(),
        "train_on_batch": model.train_on_batch(X[:7], Y[:7]),
        "weights": [w.tolist() for w in model.get_weights()],
    }
    if strategy:
        assert_replicated(model)
        kernel = model.layers[0].kernel.value
        assert kernel.addressable_shards[0].data.shape != kernel.shape
    if directory is not None:
        model.save(f"{directory}/model.keras")
        own = ks.callbacks.Checkpoint(f"{directory}/own")
        model.fit(X, Y, callbacks=[own], **fit)
        with strategy.scope():
            resumed = compiled()
        own = ks.callbacks.Checkpoint(f"{directory}/own")
        resumed.fit(X, Y, callbacks=[own], **fit)
        for got, want in zip(
            resumed.get_weights(), model.get_weights(), strict=True
        ):
            np.testing.assert_array_equal(got, want)
        loaded = keras.saving.load_model(f"{directory}/model.keras")
        found["loaded"] = [w.tolist() for w in loaded.get_weights()]
    return found


@functools.cache
def looped(strategy):
    """A loop of one's own over uneven batches, and values of each replica."""
    with strategy.scope() if strategy else warnings.catch_warnings():
        model = compiled(keras.optimizers.SGD(0.1, momentum=0.9))
        optimizer = model.optimizer
        optimizer.build(model.trainable_variables)
    batches = [(X[k : k + 7], Y[k : k + 7]) for k in range(0, 22, 7)]
    if strategy is None:
        strategy = ks.get_strategy()

    def step(x, y):
        def loss():
            error = keras.ops.square(model(x, training=True) - y)
            return keras.ops.sum(keras.ops.mean(error, -1)) / 7

        value, grads = ks.value_and_grad(loss, model.trainable_variables)()
        optimizer.apply(grads, model.trainable_variables)
        return value

    losses = [
        float(strategy.reduce("sum", strategy.run(step, batch), axis=None))
        for batch in strategy.experimental_distribute_dataset(iter(batches))
    ]
    return losses, [w.tolist() for w in model.get_weights()]


def values_of(strategy):
    """Values that are made for each replica, and local results."""
    own = strategy.experimental_distribute_values_from_function(
        lambda c: np.full(2, float(c.replica_id_in_sync_group), "float32")
    )
    ids = strategy.run(
        lambda: ks.get_replica_context().replica_id_in_sync_group
    )
    with strategy.scope():
        layer = keras.layers.Dense(8, name="up")
        layer.build((None, 6))
    local = strategy.experimental_local_results
    return {
        "own": [v.tolist() for v in local(own)],
        "ids": [int(v) for v in local(ids)],
        "sum": np.asarray(strategy.reduce("sum", own, axis=None)).tolist(),
        "gathered": np.asarray(strategy.gather(own, 0)).tolist(),
        "bias": [v.shape for v in local(layer.bias)],
    }


def rows_of_files(strategy, directory):
    """The rows that a shuffled dataset of files gives this process's replicas.

    Each epoch, and their numbers a step.
    """
    import tensorflow as tf

    files = sorted(str(path) for path in pathlib.Path(directory).glob("*.txt"))
    dataset = (
        tf.data.Dataset.from_tensor_slices(files)
        .shuffle(8)
        .interleave(
            tf.data.TextLineDataset,
            cycle_length=2,
            num_parallel_calls=2,
            deterministic=False,
        )
        .shuffle(16)
        .map(lambda line: tf.strings.to_number(line))
        .batch(8)
    )
    distributed = strategy.experimental_distribute_dataset(dataset)
    local = strategy.experimental_local_results
    epochs = []
    for _ in range(2):
        rows = []
        for batch in distributed:
            seen = strategy.run(lambda x: x, (batch,))
            rows.append([np.asarray(v).tolist() for v in local(seen)])
        epochs.append(rows)
    return epochs


def everything(width, directory):
    strategy = spanning(width)
    return {
        "used": used(strategy, directory),
        "looped": looped(strategy),
        "values": values_of(strategy),
        "files": rows_of_files(strategy, directory),
    }


def errors(width):
    """The messages of what must not differ within a replica."""
    strategy, me = spanning(width), jax.process_index()
    with strategy.scope():
        model = compiled()
    random = np.random.default_rng(me)

    def batches():
        for k in range(3):
            x = X[:8].copy()
            if k == 1 and me == 1:
                # In the middle: the first and the last row are alike.
                x[3] += 1
            yield x, Y[:8]

    # In a row of many, none of those by which all processes compare arrays.
    rows = np.tile(X[:8], (25, 1))
    rows[123] += me
    targets = np.tile(Y[:8], (25, 1))
    arrays = {"batch_size": 40, "shuffle": False, "verbose": 0}
    make = strategy.experimental_distribute_values_from_function
    calls = {
        "generator": lambda: model.fit(batches(), verbose=0),
        "arrays": lambda: model.fit(rows, targets, **arrays),
        "on_batch": lambda: model.train_on_batch(X[:8] + me, Y[:8]),
        "values": lambda: make(lambda _: random.normal(size=2)),
        "shares": lambda: spanning(width, shares=True),
    }
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = None
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found

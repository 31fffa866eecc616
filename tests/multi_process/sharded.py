"""Training with divided variables, in several processes."""

import pathlib
import sys
import time
from unittest import mock

import jax
import keras
import numpy as np
from jax.experimental import multihost_utils

import keras_strategies as ks
from benchmarks.large_steps.recommender import FEATURES
from benchmarks.large_steps.recommender import make_model as make_recommender
from keras_strategies.testing import assert_replicated
from keras_strategies.variables.model_variables import (
    all_variables,
)
from tests.support.peaks import measure_added
from tests.support.plain_keras import dense

_random = np.random.default_rng(0)
X = _random.normal(size=(22, 6)).astype("float32")
Y = np.tanh(X[:, :3])


def compiled(optimizer="adam"):
    optimizers = {
        "adam": lambda: keras.optimizers.Adam(0.01, epsilon=0.01),
        "sgd": lambda: keras.optimizers.SGD(
            0.1, momentum=0.9, global_clipnorm=0.1
        ),
        "lamb": lambda: keras.optimizers.Lamb(0.01),
    }
    layers = [dense(24), keras.layers.Activation("tanh"), dense(24), dense(3)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(optimizers[optimizer](), "mse", metrics=["mae"])
    return model


def made(shards, cores=1, offload=None):
    partitioner = ks.experimental.FullySharded(
        shards, min_size=1, offload=offload
    )
    if cores == 1:
        return ks.MultiWorkerMirroredStrategy(variable_partitioner=partitioner)
    topology = ks.tpu.experimental.Topology.from_devices(jax.devices())
    assignment = ks.tpu.experimental.DeviceAssignment.build(
        topology, [cores, 1, 1, 1], num_replicas=len(jax.devices()) // cores
    )
    return ks.TPUStrategy(
        device_assignment=assignment,
        layout_map={".*/kernel": _last_over_cores},
        variable_partitioner=partitioner,
    )


def _last_over_cores(shape):
    return (None, "model") if shape[1] % 2 == 0 else (None, None)


def first_weights(model):
    """Weights that every process can make."""
    random = np.random.default_rng(1)
    return [
        random.normal(size=weight.shape, scale=0.3)
        for weight in model.get_weights()
    ]


def fitted(optimizer, shards, batch_size=8, cores=1, offload=None):
    """Weights and losses after two epochs."""
    strategy = made(shards, cores, offload)
    with strategy.scope():
        model = compiled(optimizer)
    model.set_weights(first_weights(model))
    history = model.fit(
        X, Y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0
    )
    assert_replicated(model)
    divided = [
        v for v in model.variables if not v.value.sharding.is_fully_replicated
    ]
    return {
        "weights": [weight.tolist() for weight in model.get_weights()],
        "history": history.history,
        "evaluate": model.evaluate(X, Y, batch_size=batch_size, verbose=0),
        "predict": model.predict(X, batch_size=batch_size, verbose=0).tolist(),
        "divided": len(divided),
        "slots": [np.asarray(v).tolist() for v in model.optimizer.variables],
        "slots_on_host": sum(
            v.value.sharding.memory_kind == "pinned_host"
            for v in model.optimizer.variables
        ),
    }


def find_collectives():
    """The kinds of collectives in a train step's program."""
    strategy = made(None)
    with strategy.scope():
        model = compiled()
    rows = len(X) // 2 * 2
    shapes = [
        jax.ShapeDtypeStruct((rows, array.shape[1]), "float32")
        for array in (X, Y)
    ]
    program = strategy.compile_step(model, tuple(shapes))
    return [kind for kind, count in program.collectives.items() if count]


def train_long(size, steps):
    """Returns how far weights of large shards are from those of one device.

    Args:
      size: The rows and columns of the model's kernel.
      steps: The number of steps.
    """
    x = np.random.default_rng(0).normal(size=(4, size)).astype("float32")
    weights = []
    for strategy in (made(None), ks.OneDeviceStrategy("cpu:0")):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            layer = keras.layers.Dense(size, kernel_initializer="zeros")
            model = keras.Sequential([keras.Input((size,)), layer])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(x, x, batch_size=4, epochs=steps, shuffle=False, verbose=0)
        weights.append(np.asarray(layer.kernel))
    found, expected = weights
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def pause(seconds):
    """Trains with a callback that sleeps in process 1; returns the loss."""
    strategy = made(None)
    with strategy.scope():
        model = compiled()
    model.set_weights(first_weights(model))
    sleeps = jax.process_index() == 1

    def sleep(batch, logs):
        if batch == 1 and sleeps:
            time.sleep(seconds)

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=sleep)
    fit = {"batch_size": 4, "shuffle": False, "verbose": 0}
    return model.fit(X, Y, callbacks=[callback], **fit).history["loss"]


LARGE = 4096  # Rows and columns: with 67 MB, Keras takes a variable for large.


def large(size):
    """Parts of two variables that Keras takes for large; of both, what this
    process has."""
    strategy = ks.MultiWorkerMirroredStrategy()
    weights = keras.layers.Dense(size, use_bias=False)
    own = keras.layers.Dense(size, use_bias=False, kernel_initializer=_unseeded)
    # Keras 3.16 has it elsewhere.
    core = sys.modules[keras.Variable._initialize_with_initializer.__module__]
    decide = core.should_shard_at_init
    with (
        mock.patch.object(
            core,
            "should_shard_at_init",
            side_effect=lambda *args: size < LARGE or decide(*args),
        ) as asked,
        strategy.scope(),
    ):
        weights.build((None, size))
        own.build((None, size))
    assert asked.call_count == 2
    kernels = [layer.kernel.value for layer in (weights, own)]
    return [k.addressable_data(0)[:2, :4].tolist() for k in kernels]


def _unseeded(shape, dtype=None):
    value = np.random.default_rng().normal(size=shape)
    return keras.ops.convert_to_tensor(value, dtype)


def saved_at_once(directory):
    """Files that both processes save at the same path; what is read back."""
    with ks.MultiWorkerMirroredStrategy().scope():
        model = compiled()
    model.set_weights(first_weights(model))
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    weights = model.get_weights()
    for _ in range(10):
        # All processes evaluate together, so they save at the same time.
        model.evaluate(X[:8], Y[:8], verbose=0)
        model.save_weights(f"{directory}/at_once.weights.h5")
        model.save(f"{directory}/at_once.keras")
        model.load_weights(f"{directory}/at_once.weights.h5")
        _assert_same(model.get_weights(), weights)
        loaded = keras.saving.load_model(f"{directory}/at_once.keras")
        _assert_same(loaded.get_weights(), weights)
    return sorted(p.name for p in pathlib.Path(directory).glob("*at_once*"))


def saved(directory, shards):
    """Files, checkpoints and a loop of one's own; what was read back."""
    strategy = made(shards)
    with strategy.scope():
        model = compiled()
    model.set_weights(first_weights(model))
    best = keras.callbacks.ModelCheckpoint(
        f"{directory}/best.keras", monitor="loss", save_best_only=True
    )
    backup = keras.callbacks.BackupAndRestore(f"{directory}/backup")
    own = ks.callbacks.Checkpoint(f"{directory}/own")
    fit = {"batch_size": 8, "shuffle": False, "verbose": 0}
    model.fit(X, Y, epochs=1, callbacks=[best, backup], **fit)
    model.fit(X, Y, epochs=2, callbacks=[own], **fit)
    model.save(f"{directory}/model.keras")
    model.save_weights(f"{directory}/model.weights.h5")
    weights = model.get_weights()
    with strategy.scope():
        again = compiled()
    # Outside of the scope.
    again.optimizer.build(again.trainable_variables)
    again.save(f"{directory}/again.keras")
    again.load_weights(f"{directory}/model.weights.h5")
    _assert_same(again.get_weights(), weights)
    with strategy.scope():
        loaded = keras.saving.load_model(f"{directory}/model.keras")
    _assert_same(loaded.get_weights(), weights)
    with strategy.scope():
        resumed = compiled()
    own = ks.callbacks.Checkpoint(f"{directory}/own")
    resumed.fit(X, Y, epochs=2, callbacks=[own], **fit)
    _assert_same(resumed.get_weights(), weights)
    resumed.fit(X, Y, epochs=3, callbacks=[own], **fit)
    assert_replicated(resumed)
    trained = [np.asarray(v) for v in all_variables(resumed)]
    strategy.detach(resumed)
    _assert_same(map(np.asarray, all_variables(resumed)), trained)
    for variable in all_variables(resumed):
        assert len(variable.value.sharding.device_set) == 1
    resumed.fit(X, Y, epochs=1, **fit)
    return [weight.tolist() for weight in weights]


def _assert_same(actual, wanted):
    for got, want in zip(actual, wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def looped(shards):
    """Losses of a loop of one's own, and the weights after it.

    Args:
      shards: Over how many replicas each variable is divided; None for a loop
        on one device.
    """
    strategy = made(shards) if shards else ks.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        model = compiled("lamb")
    model.set_weights(first_weights(model))
    model.optimizer.build(model.trainable_variables)

    def step(x, y):
        def loss():
            error = keras.ops.square(model(x, training=True) - y)
            return keras.ops.sum(keras.ops.mean(error, -1)) / 8

        value, grads = ks.value_and_grad(loss, model.trainable_variables)()
        model.optimizer.apply(grads, model.trainable_variables)
        return value

    data = strategy.experimental_make_numpy_dataset((X, Y)).batch(8)
    losses = [
        float(strategy.reduce("sum", strategy.run(step, batch), axis=None))
        for batch in strategy.experimental_distribute_dataset(data)
    ]
    assert_replicated(model, *model.optimizer.variables)
    return losses, [weight.tolist() for weight in model.get_weights()]


def refused():
    """What processes are told that do not divide alike, or capture parts."""
    told = {}

    def tell(name, act):
        try:
            act()
            told[name] = None
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"

    me = jax.process_index()

    def raises(path, shape, dtype):
        if me == 1 and shape == (24, 24):
            raise LookupError("no rule here")
        return len(shape) - 1 if shape[-1] % 2 == 0 else None

    def differs(path, shape, dtype):
        return me if shape == (24, 24) else None

    def is_whole_in_one(path, shape, dtype):
        return 0 if me == 1 and len(shape) == 2 else None

    def make_partitioner(name):
        if name == "shards":
            return ks.experimental.FullySharded(2 if me else 4, min_size=1)
        functions = {f.__name__: f for f in (raises, differs, is_whole_in_one)}
        return functions[name]

    for name in ("raises", "differs", "is_whole_in_one", "shards"):
        strategy = ks.MultiWorkerMirroredStrategy(
            variable_partitioner=make_partitioner(name)
        )

        def create(strategy=strategy):
            with strategy.scope():
                compiled()

        plain = compiled()
        plain.build((None, 6))
        tell(f"{name}, created", create)
        tell(f"{name}, attached", lambda s=strategy, m=plain: s.attach(m))
        assert len(plain.weights[0].value.sharding.device_set) == 1
    strategy = made(4)
    with strategy.scope():
        model = compiled()
    model.set_weights(first_weights(model))
    before = model.get_weights()
    kernel = model.weights[0]
    array = kernel.value

    def step(given=None):
        value = keras.ops.sum(kernel * (array if given is None else given))
        kernel.assign(kernel * 2.0)
        return value

    tell("captured", lambda: strategy.run(step))
    tell("called", lambda: model(X[me : me + 4]))
    tell("called, a layer", lambda: model.layers[-1](np.full((2, 24), me)))
    alone = compiled()
    alone.set_weights(before)
    called = multihost_utils.process_allgather(model(X[:4]), tiled=True)
    np.testing.assert_allclose(called, alone(X[:4]), atol=1e-6)
    tell("assigned", lambda: kernel.assign(np.full(kernel.shape, me)))
    _assert_same(model.get_weights(), before)
    total = strategy.reduce("mean", strategy.run(step, (array,)), axis=None)
    told["passed"] = float(total) - float(np.sum(before[0] ** 2))
    model.fit(X, Y, batch_size=8, verbose=0)
    assert_replicated(model)
    return told


def assign(size):
    """Megabytes that assigning an array adds for a while to a process's.

    Args:
      size: The rows and columns of the array.
    """
    with made(None).scope():
        layer = keras.layers.Dense(size, use_bias=False)
        layer.build((None, size))
    drawn = np.random.default_rng(4).normal(size=(size, size))
    drawn = drawn.astype("float32")
    _, added = measure_added(lambda: layer.kernel.assign(drawn))
    np.testing.assert_array_equal(np.asarray(layer.kernel), drawn)
    return added


def building(num_layers, width):
    """The most that a device holds while a model is built; its megabytes."""
    held = []

    def watched(shape, dtype=None):
        held.append(_held())
        return keras.initializers.GlorotUniform(1)(shape, dtype)

    with made(None).scope():
        layers = [
            keras.layers.Dense(
                width, use_bias=False, kernel_initializer=watched
            )
            for _ in range(num_layers)
        ]
        model = keras.Sequential([keras.Input((width,)), *layers])
        model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    # Until a copy has arrived, what it was copied from is held too.
    variables = [*model.variables, *model.optimizer.variables]
    jax.block_until_ready([variable.value for variable in variables])
    last, end = _held(), time.monotonic() + 5
    while time.monotonic() < end:
        time.sleep(0.1)
        last = min(last, _held())
    return max(*held, last), last


def _held():
    """Megabytes of the arrays on this process's first device."""
    first, found = jax.local_devices()[0], {}
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            if shard.device == first:
                place = shard.data.unsafe_buffer_pointer()
                found[place] = shard.data.nbytes
    return sum(found.values()) / 1e6


def run_cases(names, shards):
    """What cases of tests/parity give, and how many variables are divided."""
    from tests.parity.cases import CASES
    from tests.parity.one_device import Trained

    found = {}
    for name in names:
        with made(shards).scope():
            trained = Trained(CASES[name])
        result = trained.run(15, 4, ("evaluate", "predict"))
        assert_replicated(trained.model)
        divided = sum(
            not v.value.sharding.is_fully_replicated
            for v in trained.model.variables
        )
        leaves = [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(result)]
        found[name] = {"leaves": leaves, "divided": divided}
    return found


def look_up(words, width, steps, rows=8):
    """Returns a table after steps of Adam, and the collectives of a step.

    All replicas share the table by columns.
    """
    ids = np.random.default_rng(2).integers(0, words, (rows, 3)).astype("int32")
    y = np.tanh(np.arange(rows, dtype="float32"))[:, None]

    def make():
        table = keras.layers.Embedding(words, width)
        pool = keras.layers.GlobalAveragePooling1D()
        inputs = keras.Input((3,), dtype="int32")
        model = keras.Model(inputs, dense(1)(pool(table(inputs))))
        model.compile(keras.optimizers.Adam(0.01, epsilon=0.01), "mse")
        return model

    return _train_tables(make, ids, y, steps)


def recommend(sizes, width, steps, rows=8):
    """Returns what `look_up` does, of a model with several tables."""
    random = np.random.default_rng(2)
    ids = random.integers(0, max(sizes), (rows, len(sizes))).astype("int32")
    features = random.normal(size=(rows, FEATURES)).astype("float32")
    y = (np.arange(rows, dtype="float32") % 2)[:, None]

    def make():
        adam = keras.optimizers.Adam(0.01, epsilon=0.01)
        return make_recommender(sizes, adam, width, 16)

    return _train_tables(make, [ids, features], y, steps)


def _train_tables(make, x, y, steps):
    tables, kinds = [], []
    sharded = made(len(jax.devices()))
    for strategy in (sharded, ks.OneDeviceStrategy("cpu:0")):
        keras.utils.set_random_seed(1)
        with strategy.scope():
            model = make()
        if strategy is sharded:
            shapes = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (x, y)
            )
            program = strategy.compile_step(model, shapes)
            kinds = [kind for kind, n in program.collectives.items() if n]
        model.fit(
            *(x, y),
            batch_size=len(y),
            epochs=steps,
            shuffle=False,
            verbose=0,
        )
        weights = [v for v in model.weights if v.name == "embeddings"]
        tables.append(np.concatenate([np.asarray(v) for v in weights]))
    found, expected = tables
    error = float(np.abs(found - expected).max())
    return {"error": error, "kinds": kinds, "sum": float(found.sum())}

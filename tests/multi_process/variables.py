"""Models of which one process creates other variables than the others."""

import time

import jax
import keras
import numpy as np

import keras_strategies as ks
from keras_strategies.cluster.exchange.host_exchange import Agreement
from keras_strategies.spmd.identity import temporary_attribute

layers, optimizers = keras.layers, keras.optimizers
# What differs in process 1.
KINDS = (
    "optimizer",
    "momentum",
    "use_ema",
    "amsgrad",
    "schedule",
    "frozen",
    "variable of the chief",
    "built optimizer",
    "metric",
    "width",
    "dtype",
    "initializer",
    "number of layers",
    "order of layers",
    "dropout",
)


def make_optimizer(kind, is_other):
    if kind == "optimizer":
        return optimizers.Adam(0.1) if is_other else optimizers.SGD(0.1)
    if kind == "momentum":
        return optimizers.SGD(0.1, momentum=0.9 if is_other else 0.0)
    if kind == "use_ema":
        return optimizers.Adam(0.1, use_ema=is_other)
    if kind == "amsgrad":
        return optimizers.Adam(0.1, amsgrad=is_other)
    rate = optimizers.schedules.CosineDecay(0.1, 10)
    given = rate if kind == "schedule" and is_other else 0.1
    return optimizers.SGD(given, momentum=0.9)


def make_layers(kind, is_other):
    width = 8 if kind == "width" and is_other else 4
    dtype = "bfloat16" if kind == "dtype" and is_other else "float32"
    start = "zeros" if kind == "initializer" and is_other else "he_normal"
    yield layers.Dense(
        width, "tanh", dtype=dtype, kernel_initializer=start, name="first"
    )
    both = [layers.Dense(4, name="second"), layers.BatchNormalization()]
    if kind == "order of layers" and is_other:
        both.reverse()
    yield from both
    if kind == "number of layers" and is_other:
        yield layers.Dense(4, name="more")
    if kind == "dropout" and is_other:
        yield layers.Dropout(0.5, seed=1)
    yield layers.Dense(1, name="last")


def train(strategy, kind, is_other):
    """Makes a model and trains it for a step."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        if kind == "variable of the chief" and jax.process_index() == 0:
            keras.Variable(np.zeros(3, "float32"), name="extra")
        model = keras.Sequential(
            [keras.Input((4,)), *make_layers(kind, is_other)]
        )
        metrics = ["mae"] if kind == "metric" and is_other else []
        optimizer = make_optimizer(kind, is_other)
        model.compile(optimizer, "mse", metrics=metrics)
    with strategy.scope():
        if kind == "built optimizer" and is_other:
            optimizer.build(model.trainable_variables)
    if kind == "frozen" and is_other:
        model.layers[0].trainable = False
    x = np.ones((12, 4), "float32")
    model.fit(x, x[:, :1], batch_size=12, verbose=0, shuffle=False)


def differ(kinds):
    """Trains a model of each kind, and returns what was raised."""
    strategy = ks.MultiWorkerMirroredStrategy()
    found = []
    for kind in kinds:
        start = time.monotonic()
        try:
            train(strategy, kind, jax.process_index() == 1)
        except ValueError as error:
            found.append((str(error), time.monotonic() - start))
        else:
            found.append(("no error", 0))
    train(strategy, "nothing", is_other=False)
    return found


def fail(kind):
    """Lets the error end the process."""
    strategy = ks.MultiWorkerMirroredStrategy()
    train(strategy, kind, jax.process_index() == 1)


class WithLayout(keras.initializers.Initializer):
    def __call__(self, shape, dtype=None, layout=None):
        value = keras.random.normal(shape, dtype=dtype)
        return value if layout is None else jax.sharding.reshard(value, layout)


def has_chiefs_values():
    """Creates many variables, whose values are those of the chief."""
    strategy = ks.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(jax.process_index())
    with strategy.scope():
        if jax.process_index():
            # Names count layers; the counts may differ.
            layers.Dense(1)
        model = keras.Sequential(
            [keras.Input((4,)), *[layers.Dense(4) for _ in range(3)]]
        )
        model.add(layers.Dense(4, kernel_initializer=WithLayout()))
        model.compile(optimizers.Adam(0.5), "mse")
        extra = keras.Variable(keras.initializers.Constant(2.5), shape=(2,))
        with ks.abstract():
            without = keras.Sequential([keras.Input((4,)), layers.Dense(99)])
    strategy.attach(without)
    strategy.materialize(without)
    x = np.ones((8, 4), "float32")
    model.fit(x, x, batch_size=8, verbose=0, shuffle=False)
    values = [np.asarray(v).tolist() for v in model.variables]
    slots = [np.asarray(v).tolist() for v in model.optimizer.variables]
    later = [np.asarray(v).tolist() for v in without.variables]
    return [values, slots, np.asarray(extra).tolist(), later]


def count_waits(num_variables, size):
    """Creates variables of one kind, and counts how often the chief waits."""
    counts = []

    def exchange(self, text, *args):
        counts.append(text)
        return original(self, text, *args)

    original = Agreement.exchange
    strategy = ks.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(jax.process_index())
    with temporary_attribute(Agreement, "exchange", exchange), strategy.scope():
        variables = [
            keras.Variable("normal", shape=(size,), name="one")
            for _ in range(num_variables)
        ]
    values = [np.asarray(v)[:3].tolist() for v in variables]
    return len(counts), values


def draw_differently():
    """Process 1 draws other values from the same seed."""
    strategy = ks.MultiWorkerMirroredStrategy()
    is_partitionable = jax.process_index() != 1
    jax.config.update("jax_threefry_partitionable", is_partitionable)
    try:
        with strategy.scope():
            keras.Variable("normal", shape=(100, 100), name="drawn")
    except ValueError as error:
        return str(error)
    return "no error"


def create_between_steps(alone):
    """One process creates a variable between two steps of a loop."""
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        total = keras.Variable(np.zeros(2, "float32"), name="total")

    def step():
        total.assign_add(np.ones(2, "float32"))
        return total.value

    strategy.run(step)
    if jax.process_index() == alone:
        with strategy.scope():
            keras.Variable("normal", shape=(3,), name="extra")
    np.asarray(strategy.run(step))


def build_outside(alone):
    """One process builds an optimizer outside of every scope."""
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), layers.Dense(4)])
        model.compile(optimizers.Adam(0.1), "mse")
    if jax.process_index() == alone:
        model.optimizer.build(model.trainable_variables)
    x = np.ones((8, 4), "float32")
    model.fit(x, x, batch_size=8, verbose=0, shuffle=False)

"""Loops of one's own on several processes; see `run_processes`."""

import re

import jax
import keras
import numpy as np
from keras import ops

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.multi_process.scenarios import data
from tests.support.models import chain

SIZE = 8


def lists(value):
    return np.asarray(value).tolist()


def train(rows, strategy=None):
    """Two epochs with BatchNormalization, uneven tails and empty replicas."""
    strategy = strategy or ks.MultiWorkerMirroredStrategy()
    initial = keras.initializers.GlorotUniform
    with strategy.scope():
        model = chain(
            (3,),
            keras.layers.Dense(4, "tanh", kernel_initializer=initial(1)),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1, kernel_initializer=initial(2)),
        )
        # In a process with one device arrays that were just placed are odd.
        assert_replicated(model)
        bias = model.layers[0].bias.value
        own = strategy.num_replicas_in_sync // jax.process_count()
        assert len(ks.Mirrored(bias).values) == own
        # Adam enlarges the rounding of small gradients, past 1e-5.
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        error = keras.metrics.MeanSquaredError()
        seen = keras.Variable(0.0, aggregation="sum", trainable=False)
    arrays = strategy.experimental_make_numpy_dataset(data(rows))
    dataset = strategy.experimental_distribute_dataset(arrays.batch(SIZE))

    def step(x, y):
        def loss():
            predicted = model(x, training=True)
            error.update_state(y, predicted)
            losses = ops.mean((predicted - y) ** 2, axis=-1)
            return ks.compute_average_loss(losses, global_batch_size=SIZE)

        value, gradients = ks.value_and_grad(loss, model.trainable_variables)()
        optimizer.apply(gradients, model.trainable_variables)
        seen.assign_add(ops.cast(ops.shape(x)[0], "float32"))
        return value, x, ks.get_replica_context().replica_id_in_sync_group

    results = {"losses": [], "rows": [], "means": [], "sums": [], "ids": []}
    for _ in range(2):
        for batch in dataset:
            value, x, replica = strategy.run(step, args=batch)
            reduced = strategy.reduce("sum", value, axis=None)
            results["losses"].append(float(reduced))
            results["rows"].append(lists(strategy.gather(x, axis=0)))
            mean = strategy.reduce("mean", x, axis=0)
            results["means"].append(lists(mean))
            total = strategy.reduce("sum", x, axis=(0, 1))
            results["sums"].append(float(total))
            ids = strategy.reduce("sum", replica, axis=None)
            results["ids"].append(int(ids))
    assert_replicated(model, seen, *error.variables)
    return results | {
        "weights": [lists(v) for v in model.weights],
        "error": float(error.result()),
        "seen": float(seen.value),
    }


class Pieces:
    """An iterable of batches."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)


def values():
    """Values, datasets from functions, variables with copies, errors."""
    strategy = ks.MultiWorkerMirroredStrategy()
    count = strategy.num_replicas_in_sync
    made = strategy.experimental_distribute_values_from_function(
        lambda c: np.float32(c.replica_id_in_sync_group + 1)
    )
    doubled = strategy.run(lambda a: 2 * a, args=(made,))
    x = np.arange(40, dtype="float32")

    def count_in_process(context):
        i = context.input_pipeline_id
        assert context.num_replicas_in_sync == count
        stop = 6 + 4 * i
        return Pieces([x[k + i : k + i + 2] for k in range(0, stop, 2)])

    dataset = strategy.distribute_datasets_from_function(count_in_process)
    steps = [
        lists(strategy.gather(strategy.run(lambda a: a, args=(b,)), axis=0))
        for b in dataset
    ]
    with strategy.scope():
        copies = keras.Variable(
            1.0, synchronization="on_read", aggregation="sum", trainable=False
        )
    strategy.run(lambda: copies.assign_add(2.0))
    try:
        with strategy.debug():
            strategy.run(lambda: 0)
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    return {
        "unequal": unequal(strategy),
        "sum": float(strategy.reduce("sum", doubled, axis=None)),
        "local": lists(strategy.experimental_local_results(doubled)),
        "steps": steps,
        "copies": float(copies.value),
        "refused": refused,
    }


def unequal(strategy):
    """Values that differ in shape, or fail, in one process."""

    def longer(context):
        return {"a": np.zeros(2 + context.replica_id_in_sync_group // 2)}

    def failing(context):
        if context.replica_id_in_sync_group:
            raise OSError("no such value")
        return 1.0

    said = []
    for value_fn in (longer, failing):
        try:
            strategy.experimental_distribute_values_from_function(value_fn)
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def on_chief():
    """predict with rows in the chief alone; progress and loops' ends."""
    strategy = ks.MultiWorkerMirroredStrategy(predict_in="chief")
    x, y = data(13)
    with strategy.scope():
        model = chain((3,), keras.layers.Dropout(0.5), keras.layers.Dense(1))
        model.compile("adam", "mse")
    model.fit(x, y, batch_size=SIZE, epochs=2)
    assert_replicated(model)
    outputs = model.predict(x, batch_size=SIZE)
    logs = model.evaluate(x, y, return_dict=True)
    again = model.predict_on_batch(x)
    return {
        "shape": list(outputs.shape),
        "weights": [lists(w) for w in model.get_weights()],
        "logs": logs,
        "on batch": list(again.shape),
        "trained": model.train_on_batch(x[:5], y[:5], return_dict=True),
    }


def compile_marked(strategy, batch):
    """Builds a model whose equal blocks are computed in a loop."""
    x, y = batch
    with strategy.scope():
        blocks = [keras.layers.Dense(6, "tanh") for _ in range(5)]
        model = keras.Sequential(
            [
                keras.Input(x.shape[1:]),
                keras.layers.Dense(6),
                *blocks,
                keras.layers.Dense(y.shape[-1]),
            ]
        )
        ks.experimental.scan_blocks(model)
        model.compile("adam", "mse", metrics=["mae"])
    strategy.compile_step(model, batch)


def sent():
    """What a step sends to the other process: each all-reduce's operands."""
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        layers = [
            keras.Input((3,)),
            keras.layers.Dense(4, "tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential(layers)
        model.compile("adam", "mse", metrics=["mae", "mape"])
        optimizer = keras.optimizers.Adam()
        error = keras.metrics.MeanSquaredError()

    def step(x, y):
        def loss():
            predicted = model(x, training=True)
            losses = ops.mean((predicted - y) ** 2, axis=-1)
            return ks.compute_average_loss(losses), predicted

        (value, predicted), gradients = ks.value_and_grad(
            loss, model.trainable_variables, has_aux=True
        )()
        optimizer.apply(gradients, model.trainable_variables)
        error.update_state(y, predicted)
        return value

    batch = tuple(a[:16] for a in data(16))
    compile_marked(strategy, batch)
    programs = {
        "fit": strategy.compile_step(model, batch),
        "run": strategy.compile_run(step, batch),
    }
    return {
        name: [
            operands.count("%")
            for operands in re.findall(
                r" all-reduce\(([^)]*)\)", program.as_text()
            )
        ]
        for name, program in programs.items()
    }


def everything():
    return {
        "values": values(),
        "on_chief": on_chief(),
        "sent": sent(),
        "trained": train(21),
    }

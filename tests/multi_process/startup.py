"""What a process does in the tests of how a job starts."""

import json
import os
import time
import warnings

# How long to wait for others: who is not to come, and who is.
ALONE_S = 2.0
TOGETHER_S = 90.0


def meet_in_turn(me, cases):
    """Makes the strategy of each case, which fails before JAX starts.

    Args:
      me: Which of the test's processes this is.
      cases: For each, what its processes are told: {"index", "addresses"},
        and what is wrong with them.

    Returns:
      (what was raised, seconds) of each case; None where it takes no part.
    """
    import jax

    import keras_strategies as ks

    found = []
    for case in cases:
        told = case.get(str(me))
        if told is None:
            found.append(None)
            continue
        os.environ["TF_CONFIG"] = json.dumps(
            {
                "cluster": {"worker": told["addresses"]},
                "task": {"type": "worker", "index": told["index"]},
            }
        )
        if told.get("uses_devices"):
            jax.devices()
        kind = told.get("strategy", "MultiWorkerMirroredStrategy")
        made = type(kind, (ks.MultiWorkerMirroredStrategy,), {})
        start = time.monotonic()
        try:
            with version_of_keras(told.get("keras")):
                made(
                    startup_timeout_s=ALONE_S if len(case) == 1 else TOGETHER_S
                )
        except RuntimeError as error:
            found.append((str(error), time.monotonic() - start))
        else:
            found.append(("no error", 0))
    return found


class version_of_keras:  # noqa: N801
    """Has another version of Keras installed, as far as can be asked."""

    def __init__(self, version):
        from keras_strategies.names import versions

        self.version, self.module = version, versions
        self.real = versions.installed_version

    def __enter__(self):
        if self.version:
            self.module.installed_version = lambda name: (
                self.version if name == "keras" else self.real(name)
            )

    def __exit__(self, *_):
        self.module.installed_version = self.real


def train(me, config, environ):
    """Joins through the environment of a cluster, and trains."""
    os.environ.update(environ)
    if config is not None:
        os.environ["TF_CONFIG"] = json.dumps(config)
    import keras
    import numpy as np

    import keras_strategies as ks

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            strategy = ks.MultiWorkerMirroredStrategy()
        except ValueError as error:
            return {"error": str(error)}
    with strategy.scope():
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        model = keras.Sequential([keras.Input((2,)), dense])
        model.compile("sgd", "mse")
    x = np.arange(14, dtype="float32").reshape(7, 2) / 14
    history = model.fit(x, x[:, :1], batch_size=4, verbose=0, shuffle=False)
    resolver = strategy.cluster_resolver
    return {
        "replicas": strategy.num_replicas_in_sync,
        "task": [resolver.task_type, resolver.task_id],
        "loss": history.history["loss"],
        "weights": [w.ravel().tolist() for w in model.get_weights()],
        "warnings": [str(w.message) for w in caught],
    }


def train_and_differ(me, configs, address):
    """Trains, and then with programs that differ."""
    found = train(me, configs[me], {})
    return found | {"refused": different_programs(me, address)}


def different_programs(me, address):
    """One process has another loss, another constant and another order."""
    import keras
    import numpy as np

    import keras_strategies as ks

    strategy = ks.MultiWorkerMirroredStrategy(
        coordinator_address=address, num_processes=2, process_id=me
    )
    x = np.ones((4, 2), "float32")
    scale = np.full(3, 1.0 + me, "float32")

    def scaled(y, outputs):
        return keras.ops.sum((y - outputs) ** 2) * (2.0 if me else 1.0)

    def with_constant(y, outputs):
        return keras.ops.sum((y - outputs) ** 2 * keras.ops.array(scale))

    found = []
    for loss in (scaled, with_constant):
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
            model.compile("sgd", loss)
        before = model.get_weights()
        try:
            model.fit(x, np.ones((4, 3), "float32"), verbose=0)
        except RuntimeError as error:
            found.append(str(error))
        same = zip(before, model.get_weights(), strict=True)
        found.append(all(np.array_equal(a, b) for a, b in same))

    def double(value):
        return value * (1.0 + me)

    per_replica = strategy.experimental_distribute_values_from_function(
        lambda context: np.float32(context.replica_id_in_sync_group)
    )
    for _ in range(2):  # Who catches the error is refused again.
        try:
            strategy.run(double, args=(per_replica,))
        except RuntimeError as error:
            found.append(str(error))
    y = np.ones((4, 3), "float32")
    for eagerly in (me == 1, False):
        with strategy.scope():
            model.compile("sgd", "mse", run_eagerly=eagerly)
        try:
            model.fit(x, y, verbose=0)
        except ValueError as error:
            found.append(str(error))
    # As in scripts whose chief only writes logs.
    controllers = [keras.callbacks.LearningRateScheduler(lambda epoch: 0.1)]
    controllers.append(keras.callbacks.LambdaCallback())
    writers = [keras.callbacks.CSVLogger(os.devnull)]
    try:
        model.fit(x, y, verbose=0, callbacks=controllers if me else writers)
    except ValueError as error:
        found.append(str(error))
    model.fit(x, y, verbose=0, callbacks=controllers[1:] if me else writers)
    found.append("still usable")
    try:
        with strategy.scope():
            keras.Variable(1.0 + me, name="rate")
    except ValueError as error:
        found.append(str(error))
    return found

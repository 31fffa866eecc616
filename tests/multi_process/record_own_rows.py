"""The recorder of what tf's two processes read of rows of their own.

    python -m tests.multi_process.record_own_rows

writes `own_rows.json` beside this file: for each of `own_rows.CASES` and each
step the rows of both workers of a `tf.distribute.MultiWorkerMirroredStrategy`,
one replica each, of `experimental_distribute_dataset`. Where `tf_keras` can be
imported, which nothing else here needs, it asks `fit` as well, in some of the
cases, and keeps what differs there. Keras 3 cannot fit with that strategy (3.15
on tf 2.21: a `PerReplica` is no tensor).
"""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile

# Before tf, which imports Keras.
os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

from keras_strategies.cluster.addresses import find_free_ports
from tests.multi_process import own_rows

TABLE = pathlib.Path(__file__).with_name("own_rows.json")
_LIMIT_S = 1800
# `fit` compiles a model for each: a sixth of the cases.
_FITTED = [
    case
    for case in own_rows.CASES
    if case[1] in ("batch.map", "map.batch") and case[3] in ("FILE", "OFF")
]


def record():
    """Writes the table."""
    with tempfile.TemporaryDirectory() as directory:
        own_rows.write_files(directory)
        _run_workers(directory)
        one, other = (
            json.loads(pathlib.Path(directory, f"{index}.json").read_text())
            for index in (0, 1)
        )
    loops = {
        loop: {
            name: list(zip(steps, other[loop][name], strict=True))
            for name, steps in one[loop].items()
        }
        for loop in ("dataset", "fit")
    }
    lines = [
        f"{json.dumps(name)}: {json.dumps(steps)}"
        for name, steps in loops["dataset"].items()
    ]
    fit = {
        name: steps
        for name, steps in loops["fit"].items()
        if steps != loops["dataset"][name]
    }
    TABLE.write_text(
        f'{{"versions": {json.dumps(one["versions"])},\n'
        f'"fitted": {json.dumps(sorted(loops["fit"]))},\n'
        f'"where fit differs": {json.dumps(fit)},\n'
        '"steps": {\n' + ",\n".join(lines) + "\n}}\n"
    )


def _run_workers(directory):
    cluster = {"worker": [f"127.0.0.1:{port}" for port in find_free_ports(2)]}
    running = []
    try:
        for index in (0, 1):
            place = {"type": "worker", "index": index}
            told = json.dumps({"cluster": cluster, "task": place})
            running.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        __spec__.name,
                        directory,
                        str(index),
                    ],
                    env=os.environ | {"TF_CONFIG": told},
                )
            )
        for worker in running:
            assert worker.wait(timeout=_LIMIT_S) == 0
    finally:
        for worker in running:
            worker.kill()
            worker.wait()


def _work(directory, index):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    told = {
        "versions": {"tensorflow": tf.__version__},
        "dataset": {
            own_rows.name_case(*case): own_rows.read(strategy, directory, case)
            for case in own_rows.CASES
        },
        "fit": {},
    }
    if importlib.util.find_spec("tf_keras"):
        told["versions"]["tf_keras"] = importlib.metadata.version("tf_keras")
        told["fit"] = {
            own_rows.name_case(*case): _fit(strategy, directory, case)
            for case in _FITTED
        }
    pathlib.Path(directory, f"{index}.json").write_text(json.dumps(told))


def _fit(strategy, directory, case):
    import tf_keras

    steps = []

    def see(x):
        steps.append(own_rows.numbers(x))
        return np.float32(0)

    class Seeing(tf_keras.Sequential):
        def train_step(self, data):
            tf.numpy_function(see, [data[0]], tf.float32)
            return super().train_step(data)

    with strategy.scope():
        model = Seeing([tf_keras.Input((1,)), tf_keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(
        own_rows.dataset(directory, *case),
        steps_per_epoch=own_rows.STEPS
        if own_rows.is_infinite(case[1])
        else None,
        verbose=0,
    )
    return steps


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _work(sys.argv[1], int(sys.argv[2]))
    else:
        record()

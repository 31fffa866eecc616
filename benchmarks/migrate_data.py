"""Runs a ported script on random data, for `./run bench migrate`.

Data sets, and packages that are not about training, are stand-ins here.
"""

import runpy
import socket
import sys
import types
from unittest import mock

import keras_strategies as ks

# isort: split
import jax
import keras
import numpy as np
import tensorflow as tf

ROWS = 256
NUM_LOSSES = 3
MAX_EPOCHS, MAX_STEPS = 2, 3
SHAPES = {
    "mnist": (28, 28),
    "fashion_mnist": (28, 28),
    "cifar10": (32, 32, 3),
    "cifar100": (32, 32, 3),
}
RANDOM = np.random.default_rng(0)


class Losses(keras.callbacks.Callback):
    """Prints the first losses, on the first process."""

    num_printed = 0

    def on_train_batch_end(self, batch, logs=None):
        if Losses.num_printed < NUM_LOSSES and jax.process_index() == 0:
            Losses.num_printed += 1
            print(f"\nbatch loss: {float(logs['loss']):.8f}")


def make_rows(shape, rows, classes=10):
    x = RANDOM.integers(0, 256, (rows, *shape)).astype("uint8")
    return x, RANDOM.integers(0, classes, rows).astype("uint8")


def make_texts(rows):
    tokens = RANDOM.integers(1, 50, (rows, 20)).astype("int64")
    return tokens, RANDOM.integers(0, 2, rows).astype("int64")


def load_tfds(name, split=None, with_info=False, **_):
    """Returns random data sets, as tensorflow_datasets does."""
    is_mnist = "mnist" in name
    shape = (28, 28, 1) if is_mnist else (32, 32, 3)
    # Cats and dogs are resized, so that few are enough.
    classes, rows = (2, 8) if "cats" in name else (10, 64)

    def make():
        is_text = "imdb" in name
        data = make_texts(rows) if is_text else make_rows(shape, rows, classes)
        return tf.data.Dataset.from_tensor_slices(data)

    sets = {part: make() for part in ("train", "test", "validation")}
    encoder = types.SimpleNamespace(vocab_size=50)
    features = {"text": types.SimpleNamespace(encoder=encoder)}
    size = types.SimpleNamespace(num_examples=rows)
    splits = dict.fromkeys(sets, size)
    info = types.SimpleNamespace(features=features, splits=splits)
    found = sets if split is None else sets["train"]
    return (found, info) if with_info else found


def run_on_spark(context, function, args, *_, **__):
    """Calls the function of a job, as tensorflowonspark does."""
    function(args, types.SimpleNamespace(job_name="chief"))
    return mock.MagicMock()


class RayTrainer:
    """Calls a training function in this process, as Ray does in its workers."""

    def __init__(self, train_loop_per_worker, train_loop_config, **_):
        self.function, self.config = train_loop_per_worker, train_loop_config

    def fit(self):
        return self.function(self.config)


def add_modules():
    """Adds modules that are not installed."""
    ray = mock.MagicMock()
    ray.TensorflowTrainer = RayTrainer
    ray.ReportCheckpointCallback = keras.callbacks.Callback
    tfds = types.ModuleType("tensorflow_datasets")
    tfds.load, tfds.disable_progress_bar = load_tfds, lambda: None
    tfds.Split = types.SimpleNamespace(TRAIN="train", TEST="test")
    addons = types.ModuleType("tensorflow_addons")
    addons.optimizers, addons.activations = keras.optimizers, keras.activations
    spark = mock.MagicMock()
    spark.TFCluster.run = run_on_spark
    conf = spark.SparkContext.return_value._conf
    conf.get.return_value = 2
    sys.modules |= {
        "tensorflow_datasets": tfds,
        "tensorflow_addons": addons,
        "pyspark": spark,
        "pyspark.context": spark,
        "pyspark.conf": spark,
        "tensorflowonspark": spark,
        "ray": ray,
        "ray.air.integrations.keras": ray,
        "ray.train": ray,
        "ray.train.tensorflow": ray,
        "submarine": mock.MagicMock(),
        "polyaxon": make_polyaxon(),
        "polyaxon.tracking": mock.MagicMock(),
        "polyaxon.tracking.contrib": mock.MagicMock(),
        "polyaxon.tracking.contrib.keras": make_polyaxon(),
    }


def make_polyaxon():
    """Returns a module whose callbacks do nothing."""
    module = mock.MagicMock()
    module.tracking.get_tensorboard_path.return_value = "logs"
    for name in ("PolyaxonKerasCallback", "PolyaxonKerasModelCheckpoint"):
        call = getattr(module, name)
        call.side_effect = lambda **_: keras.callbacks.Callback()
    return module


def replace_data():
    """Replaces the data sets of Keras and scipy; forbids downloads."""
    for name, shape in SHAPES.items():
        module = getattr(keras.datasets, name)
        module.load_data = lambda shape=shape: (
            make_rows(shape, ROWS),
            make_rows(shape, ROWS // 2),
        )
    try:
        import scipy.io
    except ImportError:
        pass
    else:
        x, y = make_rows((32, 32, 3), 192)
        matrix = {"X": np.moveaxis(x, 0, 3), "y": y[:, None]}
        scipy.io.loadmat = lambda *_: {k: v.copy() for k, v in matrix.items()}
    find = socket.getaddrinfo

    def find_here(host, *args, **kwargs):
        is_here = host in (None, "localhost", "127.0.0.1", "::1", "0.0.0.0")
        if not is_here and host != socket.gethostname():
            raise OSError(f"no network in this benchmark: {host}")
        return find(host, *args, **kwargs)

    socket.getaddrinfo = find_here


def shorten():
    """Cuts epochs and steps, and prints the losses."""

    def fit_shortly(self, *args, **kwargs):
        kwargs["epochs"] = min(kwargs.get("epochs", 1), MAX_EPOCHS)
        for word in ("steps_per_epoch", "validation_steps"):
            if kwargs.get(word):
                kwargs[word] = min(kwargs[word], MAX_STEPS)
        callbacks = [*(kwargs.pop("callbacks", None) or ()), Losses()]
        # As an override of `fit` does, which a strategy's scope sees.
        parent = super(keras.Model, self)
        return parent.fit(*args, callbacks=callbacks, **kwargs)

    keras.Model.fit = fit_shortly


def equalize():
    """Leaves out devices, and what differs between numbers of replicas."""
    mirrored = ks.MirroredStrategy
    ks.MirroredStrategy = lambda devices=None, **words: mirrored(**words)
    options = ks.experimental.CommunicationOptions
    ks.experimental.CommunicationOptions = lambda **_: options()
    keras.layers.Dropout.call = lambda self, inputs, training=False: inputs
    normalize = keras.layers.BatchNormalization.call

    def normalize_alike(self, inputs, training=None, mask=None):
        return normalize(self, inputs, training=False, mask=mask)

    keras.layers.BatchNormalization.call = normalize_alike
    keras.utils.set_random_seed(0)
    tf.random.set_seed(0)


def main():
    script = sys.argv[1]
    add_modules()
    replace_data()
    shorten()
    equalize()
    sys.path.insert(0, ".")
    sys.argv = [script]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()

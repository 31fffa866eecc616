"""What the examples of docstrings take for granted: data, models, steps."""

import jax
import keras
import numpy as np
import tensorflow as tf

import keras_strategies as ks
from tests.docs.public_names import list_names, public_modules

ROWS = 256


def names_for(path, directory):
    """The names for the example of a dotted name, run in a directory."""
    modules = public_modules()
    place = path
    while place not in modules:
        place = place.rpartition(".")[0]
    module = modules[place]
    names = {name: getattr(module, name) for name in list_names(module)}
    names |= common_names()
    if place.startswith("keras_strategies.estimator"):
        names |= estimator_names(names["strategy"])
    if place == "keras_strategies.data":
        (directory / "train").mkdir()
        for part in range(2):
            rows = {"x": names["x"], "y": names["y"]}
            np.savez(directory / "train" / f"{part}.npz", **rows)
    return names


def make_model(params=None):
    model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    return model


def rows():
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, 32)).astype("float32")
    return x, x[:, :1]


def batches():
    return tf.data.Dataset.from_tensor_slices(rows()).batch(64)


def common_names():
    """A strategy of all devices, a model in it, rows and steps."""
    keras.utils.set_random_seed(0)
    x, y = rows()
    strategy = ks.MirroredStrategy()
    with strategy.scope():
        model = make_model()
        optimizer = keras.optimizers.SGD(0.01)
        model.compile(optimizer, "mse")
    data = strategy.experimental_distribute_dataset(batches())

    def loss_of(y_true, y_pred):
        return ks.compute_average_loss((y_true - y_pred) ** 2)

    def train_step(x, y):
        loss, gradients = ks.value_and_grad(
            lambda: loss_of(y, model(x, training=True)),
            model.trainable_variables,
        )()
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    def step(*batch):
        return sum(map(keras.ops.sum, jax.tree.leaves(batch)))

    iterator = iter(data)
    return {
        **{"jax": jax, "keras": keras, "ks": ks},
        **{"strategy": strategy, "model": model, "optimizer": optimizer},
        **{"x": x, "y": y, "x_val": x, "y_val": y, "x_test": x, "y_test": y},
        **{"dataset": batches(), "batch": next(iter(data))},
        **{"iterator": iterator, "step": step, "train_step": train_step},
        "loss_of": loss_of,
        "make_model": make_model,
        "checkpoint": ks.checkpoint.Checkpoint(model=model, data=iterator),
    }


def estimator_names(strategy):
    """A model_fn, its input_fns, and an Estimator on a strategy."""

    def model_fn(features, labels, mode, params):
        model = make_model(params)
        model.compile("adam", "mse")
        return model

    def train_input_fn():
        return batches().repeat()

    config = ks.estimator.RunConfig("estimator", train_distribute=strategy)
    return {
        **{"model_fn": model_fn, "input_fn": batches},
        **{"train_input_fn": train_input_fn, "eval_input_fn": batches},
        "model_dir": "models",
        "estimator": ks.estimator.Estimator(model_fn, config=config),
    }

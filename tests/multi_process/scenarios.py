"""What the processes of these tests run; see `run_processes`.

Each function returns numbers by name, which are compared between processes
and with those of one process on as many devices.
"""

import warnings

import keras
import numpy as np

import keras_strategies as ks
from keras_strategies.testing import assert_replicated

warnings.filterwarnings("ignore", "Your input ran out of data")
warnings.filterwarnings("ignore", ".shuffle=True. was passed")


def data(rows):
    random = np.random.default_rng(0)
    x = random.normal(size=(rows, 3)).astype("float32")
    y = random.normal(size=(rows, 1)).astype("float32")
    return x, y


class Batches(keras.utils.PyDataset):
    def __init__(self, rows, size, **kwargs):
        super().__init__(**kwargs)
        self.x, self.y = data(rows)
        self.size = size

    def __len__(self):
        return -(-len(self.x) // self.size)

    def __getitem__(self, index):
        rows = slice(index * self.size, (index + 1) * self.size)
        return self.x[rows], self.y[rows]


def generator(rows, size):
    x, y = data(rows)
    for start in range(0, rows, size):
        yield x[start : start + size], y[start : start + size]


def tf_dataset(rows, size):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(data(rows)).batch(size)


def grain_dataset(rows, size):
    import grain

    x, y = data(rows)
    items = [(x[i], y[i]) for i in range(rows)]
    return grain.MapDataset.source(items).batch(size)


def torch_loader(rows, size):
    import torch

    dataset = torch.utils.data.TensorDataset(*map(torch.tensor, data(rows)))
    return torch.utils.data.DataLoader(dataset, batch_size=size)


def arrays(rows, size):
    del size
    return data(rows)


SOURCES = {
    "arrays": arrays,
    "PyDataset": Batches,
    "generator": generator,
    "tf.data": tf_dataset,
    "grain": grain_dataset,
    "torch": torch_loader,
}


def build(strategy):
    with strategy.scope():
        # Seeds differ between processes, so the chief's values are needed.
        model = keras.Sequential(
            [
                keras.layers.Dense(
                    4,
                    activation="tanh",
                    kernel_initializer=keras.initializers.GlorotUniform(1),
                ),
                keras.layers.Dense(
                    1, kernel_initializer=keras.initializers.GlorotUniform(2)
                ),
            ]
        )
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"]
        )
    return model


def fit_arguments(name, rows, size):
    given = SOURCES[name](rows, size)
    if name == "arrays":
        return {
            "x": given[0],
            "y": given[1],
            "batch_size": size,
            "shuffle": False,
        }
    return {"x": given, "shuffle": False}


def loops(names, cases, strategy=None):
    """fit, evaluate and predict from each source."""
    strategy = strategy or ks.MultiWorkerMirroredStrategy()
    results = {}
    for name in names:
        for rows, size, steps in cases:
            model = build(strategy)
            model.steps_per_execution = steps
            epochs = 1 if name == "generator" else 2
            history = model.fit(
                **fit_arguments(name, rows, size), epochs=epochs, verbose=0
            ).history
            arguments = fit_arguments(name, rows, size)
            del arguments["shuffle"]
            logs = model.evaluate(**arguments, verbose=0, return_dict=True)
            arguments = fit_arguments(name, rows, size)
            del arguments["shuffle"]
            if name == "arrays":
                del arguments["y"]
            outputs = model.predict(**arguments, verbose=0)
            assert_replicated(model)
            key = f"{name} {rows}/{size} K={steps}"
            results[key] = {
                "history": history,
                "evaluate": logs,
                "predict": outputs.tolist(),
                "weights": [w.tolist() for w in model.get_weights()],
            }
    return results


def stateful():
    """A recurrent layer that keeps each row's state, built in its loops."""
    strategy = ks.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = build_stateful()
    found = fit_stateful(model, from_tf_data=False)
    with strategy.scope():
        model = build_stateful()
    return [found, fit_stateful(model, from_tf_data=True)]


def build_stateful():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((2, 3), batch_size=8),
            keras.layers.SimpleRNN(2, stateful=True, unroll=True),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def fit_stateful(model, *, from_tf_data):
    random = np.random.default_rng(0)
    x = random.normal(size=(16, 2, 3)).astype("float32")
    y = random.normal(size=(16, 1)).astype("float32")
    given = {"x": x, "y": y, "batch_size": 8}
    if from_tf_data:
        import tensorflow as tf

        given = {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(8)}
    history = model.fit(**given, shuffle=False, verbose=0).history
    evaluated = model.evaluate(**given, verbose=0)
    model.predict(x, batch_size=8, verbose=0)
    model.train_on_batch(x[:8], y[:8])
    weights = [weight.tolist() for weight in model.get_weights()]
    return [history, evaluated, weights]

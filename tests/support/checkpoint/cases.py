"""The fits that are interrupted in `test_resuming`, as a table."""

import keras
import numpy as np

from tests.support.checkpoint.runs import (
    Case,
    Counting,
    Looking,
    Stopping,
    X,
    Y,
    adam,
    mlp,
    usual,
)
from tests.support.models import chain

layers = keras.layers


class Batches(keras.utils.PyDataset):
    def __init__(self, size=8, **kwargs):
        super().__init__(**kwargs)
        self.size = size

    def __len__(self):
        return -(-len(X) // self.size)

    def __getitem__(self, index):
        rows = slice(index * self.size, (index + 1) * self.size)
        return X[rows], Y[rows]


def subclassed():
    return Own(mlp())


class Own(keras.Model):
    """A step of its own, metrics and noise of its own."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.noise = keras.random.SeedGenerator(4)
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, inputs, training=False):
        if training:
            inputs = inputs + 0.1 * keras.random.normal(
                keras.ops.shape(inputs), seed=self.noise
            )
        return self.inner(inputs, training=training)


class OwnFit(keras.Model):
    """Calls fit in its own way."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def call(self, inputs, training=False):
        return self.inner(inputs, training=training)

    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)


def of(**changes):
    """What gives `fit` these arguments instead of some of the usual ones."""
    usual_ones = {"x": X, "y": Y, "batch_size": 8}
    return lambda: {
        k: v for k, v in (usual_ones | changes).items() if v is not None
    }


def pydataset():
    return {"x": Batches(workers=2), "shuffle": True}


def grain_dataset():
    import grain

    rows = [(X[i], Y[i]) for i in range(len(X))]
    return {"x": grain.MapDataset.source(rows).seed(3).shuffle().batch(8)}


def tf_dataset():
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((X, Y))
    return {"x": dataset.shuffle(len(X)).batch(8)}


def tf_filtered():
    import tensorflow as tf

    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(9)
    return {"x": dataset.filter(lambda x, y: x[0] > -0.5).batch(6)}


def torch_loader():
    import torch

    dataset = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return {
        "x": torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True)
    }


class Factory:
    """Batches of which nobody knows how many."""

    def __iter__(self):
        for start in range(0, len(X), 6):
            yield X[start : start + 6], Y[start : start + 6]


def generator():
    """One pass, of infinite data."""

    def batches():
        while True:
            yield from Factory()

    return {"x": batches(), "steps_per_epoch": 3}


def with_optimizer(make, **more):
    return lambda k: adam(k) | {"optimizer": make()} | more


def mixed():
    policy = "mixed_float16"
    return chain(
        (4,),
        layers.Dense(5, activation="tanh", dtype=policy),
        layers.Dropout(0.3, seed=2, dtype=policy),
        layers.Dense(1, dtype=policy),
    )


def nested():
    one = keras.Input((4,), name="one")
    two = keras.Input((4,), name="two")
    x = layers.Dense(3, name="both")(layers.Concatenate()([one, two]))
    x = layers.Dropout(0.2, seed=1)(x)
    return keras.Model(
        {"one": one, "two": two},
        {"a": layers.Dense(1, name="a")(x), "b": layers.Dense(1, name="b")(x)},
    )


def masked():
    return chain(
        (4,),
        layers.Reshape((4, 1)),
        layers.Masking(),
        layers.SimpleRNN(3, recurrent_dropout=0.2, seed=4),
        layers.Dense(1),
    )


def unnumbered():
    """Layers that Keras names, with numbers of the process."""
    return chain(
        (4,),
        layers.Dense(3),
        layers.Dense(3),
        layers.Dropout(0.1, seed=1),
        layers.Dense(1),
    )


def bare(directory):
    return [keras.callbacks.CSVLogger(directory / "log.csv")]


def looking(directory):
    return [*usual(directory), Looking()]


def stopping(directory):
    return [*bare(directory), Counting(), Stopping()]


def scheduled(directory):
    return [
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
        *usual(directory),
    ]


def validated(directory):
    return [
        keras.callbacks.EarlyStopping(
            patience=1, min_delta=9.0, restore_best_weights=True
        ),
        keras.callbacks.ReduceLROnPlateau(patience=0, min_delta=9.0),
        keras.callbacks.ModelCheckpoint(
            str(directory / "best.weights.h5"),
            save_best_only=True,
            save_weights_only=True,
        ),
        keras.callbacks.CSVLogger(directory / "log.csv"),
        Counting(),
    ]


VALIDATION = (X[:12], Y[:12])

CASES = [
    Case("usual"),
    Case("K 2", k=2),
    Case("K 3", k=3),
    Case("K 2 then 3", k=2, then=3, is_exact=False, callbacks=bare),
    Case("K 1 then 2", k=1, then=2, is_exact=False, callbacks=bare),
    Case("K 3 then 1", k=3, then=1, is_exact=False, callbacks=bare),
    Case("validation", data=of(validation_data=VALIDATION)),
    Case(
        "validation of every other epoch",
        data=of(validation_data=VALIDATION, validation_freq=2),
    ),
    Case(
        "stops early", data=of(validation_data=VALIDATION), callbacks=validated
    ),
    Case("validation split", data=of(validation_split=0.25)),
    Case(
        "part of the validation data",
        data=of(
            validation_data=VALIDATION,
            validation_steps=2,
            validation_batch_size=4,
        ),
    ),
    Case("steps divide a pass", data=of(steps_per_epoch=2)),
    Case("steps do not divide a pass", data=of(steps_per_epoch=3), epochs=4),
    Case("more steps than a pass", data=of(steps_per_epoch=6), epochs=2),
    Case(
        "K 2, steps do not divide a pass",
        data=of(steps_per_epoch=3),
        epochs=4,
        k=2,
    ),
    Case(
        "K 2, the last batch of a pass left out",
        data=of(x=X[:24], y=Y[:24], batch_size=4, steps_per_epoch=3),
        epochs=4,
        k=2,
    ),
    Case("generator", data=generator),
    Case("PyDataset", data=pydataset),
    Case("grain", data=grain_dataset),
    Case("tf.data", data=tf_dataset),
    Case("filtered tf.data", data=tf_filtered, k=2),
    Case("torch", data=torch_loader),
    *(
        Case(
            f"uneven rows, {replicas} replicas",
            data=of(x=X[:13], y=Y[:13], batch_size=4),
            replicas=replicas,
        )
        for replicas in (1, 2, 3, 8)
    ),
    Case(
        "uneven rows, K 3",
        data=of(x=X[:13], y=Y[:13], batch_size=4),
        replicas=3,
        k=3,
    ),
    Case("eager", compiled=lambda k: adam(k) | {"run_eagerly": True}),
    Case("own step", make=subclassed),
    Case("own fit", make=OwnFit),
    Case(
        "mixed precision",
        make=mixed,
        compiled=with_optimizer(
            lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.Adam(0.01), dynamic_growth_steps=3
            )
        ),
    ),
    Case(
        "moving average",
        compiled=with_optimizer(
            lambda: keras.optimizers.SGD(
                0.05,
                momentum=0.9,
                use_ema=True,
                ema_momentum=0.8,
                ema_overwrite_frequency=3,
            )
        ),
    ),
    Case(
        # The runs that go on are saved more seldom; a save sums accumulators.
        "accumulation",
        compiled=with_optimizer(
            lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3)
        ),
        is_exact=False,
        callbacks=bare,
    ),
    Case(
        "schedule",
        compiled=with_optimizer(
            lambda: keras.optimizers.Adam(
                keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
            )
        ),
        callbacks=bare,
    ),
    Case("multiplied rate", callbacks=scheduled),
    Case("evaluates", callbacks=looking),
    Case("stops in an epoch", callbacks=stopping),
    Case(
        "class weights",
        data=of(y=(Y > 0).astype("int32"), class_weight={0: 1.0, 1: 3.0}),
        compiled=lambda k: adam(k) | {"loss": "binary_crossentropy"},
    ),
    Case(
        "sample weights",
        data=of(sample_weight=np.linspace(0, 2, len(X), dtype="float32")),
        compiled=lambda k: adam(k) | {"weighted_metrics": ["mse"]},
    ),
    Case(
        "nested data",
        make=nested,
        data=of(x={"one": X, "two": X * 2}, y={"a": Y, "b": Y * 3}),
        compiled=lambda k: adam(k) | {"metrics": {"a": ["mae"]}},
    ),
    Case("masks", make=masked, data=of(x=np.where(X > 0, X, 0))),
    Case(
        "no metrics",
        make=unnumbered,
        compiled=lambda k: {
            "optimizer": "sgd",
            "loss": "mse",
            "steps_per_execution": k,
        },
        callbacks=bare,
    ),
]

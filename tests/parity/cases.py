"""What must give one device's numbers: a model, its data, a tolerance.

Tolerances: 1e-5 unless a case says otherwise. Half precision rounds every
product, and the order of sums differs between one device and several, so
bfloat16 (8 bits, 2**-8 relative) and float16 (2**-11) get multiples of their
rounding. Optimizers that divide by a gradient's size (Adam, Muon) amplify
the last bit of a gradient near zero up to the learning rate.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras import layers, losses, metrics, optimizers, regularizers

from tests.parity import models
from tests.parity.models import rows_of
from tests.support.models import chain

FEATURES, CLASSES = 6, 3
# Of the layers in the middle, and of each step of a sequence.
HIDDEN, STEP_FEATURES = 8, 4


@dataclasses.dataclass(frozen=True)
class Case:
    """One model to be trained on one device and on several."""

    build: Callable[[], keras.Model]
    data: Callable[[int], tuple[Any, Any]]
    _: dataclasses.KW_ONLY
    weight: Callable[[int], Any] = lambda rows: None
    fit: dict[str, Any] = dataclasses.field(default_factory=dict)
    tolerance: float = 1e-5
    warns: str | None = None


def glorot(seed):
    return keras.initializers.GlorotUniform(seed)


def classified(rows):
    x = rows_of(rows, FEATURES)
    y = np.random.default_rng(rows).integers(0, CLASSES, rows)
    return x, y.astype("int32")


def one_hot(rows):
    x, y = classified(rows)
    return x, np.eye(CLASSES, dtype="float32")[y]


def regressed(rows):
    x = rows_of(rows, FEATURES)
    return x, np.tanh(x[:, :CLASSES]).astype("float32")


def weights(rows):
    weight = np.random.default_rng(rows).uniform(size=rows)
    weight[: rows // 4] = 0
    return weight.astype("float32")


def net(
    *middle, cls=keras.Model, out=CLASSES, activation=None, dtype=None, **dense
):
    """Input, Dense, the middle layers, Dense."""
    inputs = keras.Input((FEATURES,))
    value = layers.Dense(
        HIDDEN,
        activation="tanh",
        kernel_initializer=glorot(1),
        dtype=dtype,
        **dense,
    )(inputs)
    for layer in middle:
        value = layer(value)
    value = layers.Dense(
        out, kernel_initializer=glorot(2), activation=activation, dtype=dtype
    )(value)
    return cls(inputs, value)


def compiled(
    model=None, optimizer=None, loss=None, measured=("accuracy",), **kwargs
):
    model = model or net()
    if loss is None:
        loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = optimizer or optimizers.SGD(0.1)
    model.compile(optimizer, loss, metrics=list(measured), **kwargs)
    return model


def by_optimizer(make, **kwargs):
    return Case(lambda: compiled(optimizer=make()), classified, **kwargs)


def by_loss(make, data=one_hot, activation=None, **kwargs):
    return Case(
        lambda: compiled(
            net(activation=activation), loss=make(), measured=["mae"]
        ),
        data,
        **kwargs,
    )


def by_metrics(make, data, activation=None, loss="mse", **kwargs):
    return Case(
        lambda: compiled(
            net(activation=activation), loss=loss, measured=make()
        ),
        data,
        **kwargs,
    )


def by_step(cls):
    return Case(
        lambda: compiled(net(cls=cls), loss=losses.MeanSquaredError()),
        regressed,
    )


def embedding():
    model = net()
    return keras.Model(
        model.inputs, layers.UnitNormalization()(model.outputs[0])
    )


def head(value):
    """Layers of widths that 8 and 3 divide, for variables divided so."""
    value = layers.Dense(24, "tanh", kernel_initializer=glorot(7))(value)
    return layers.Dense(CLASSES, kernel_initializer=glorot(2))(value)


def masked(**compile_arguments):
    inputs = keras.Input((5,), dtype="int32")
    value = layers.Embedding(
        9,
        STEP_FEATURES,
        mask_zero=True,
        embeddings_initializer=keras.initializers.RandomUniform(seed=1),
    )(inputs)
    value = head(value)
    return compiled(keras.Model(inputs, value), **compile_arguments)


def tokens(rows):
    random = np.random.default_rng(rows)
    x = random.integers(1, 9, (rows, 5)).astype("int32")
    for row in range(rows):
        x[row, random.integers(1, 6) :] = 0
    return x, random.integers(0, CLASSES, (rows, 5)).astype("int32")


def sequence_net(layer):
    inputs = keras.Input((5, STEP_FEATURES))
    value = layer(inputs)
    value = head(value)
    return compiled(keras.Model(inputs, value), loss="mse", measured=["mae"])


def sequences(rows):
    x = rows_of(rows, 5, STEP_FEATURES)
    return x, np.tanh(x[:, 0, :CLASSES])


def ragged(rows):
    x, y = sequences(rows)
    for row in range(rows):
        x[row, 1 + row % 5 :] = 0
    return x, np.repeat(y[:, None], 5, axis=1)


def transformer():
    inputs = keras.Input((5, STEP_FEATURES))
    attended = layers.MultiHeadAttention(
        2, 2, kernel_initializer=glorot(3), dropout=0.0, seed=4
    )(inputs, inputs, use_causal_mask=True)
    value = layers.LayerNormalization()(layers.Add()([inputs, attended]))
    value = layers.GlobalAveragePooling1D()(value)
    value = head(value)
    return compiled(keras.Model(inputs, value), loss="mse", measured=["mae"])


def convolution():
    inputs = keras.Input((6, 6, 2))
    value = layers.Conv2D(4, 3, kernel_initializer=glorot(1))(inputs)
    value = layers.MaxPooling2D()(layers.ReLU()(value))
    value = layers.Dense(CLASSES, kernel_initializer=glorot(2))(
        layers.Flatten()(value)
    )
    return compiled(keras.Model(inputs, value))


def pictures(rows):
    return rows_of(rows, 6, 6, 2), classified(rows)[1]


def synchronized(data_masked=False, **kwargs):
    norm = layers.BatchNormalization(synchronized=True, momentum=0.9, **kwargs)
    if not data_masked:
        return compiled(net(norm), loss="mse", measured=["mae"])
    inputs = keras.Input((5, STEP_FEATURES))
    value = norm(layers.Masking()(inputs))
    value = head(value)
    return compiled(keras.Model(inputs, value), loss="mse", measured=["mae"])


def two_outputs():
    inputs = keras.Input((FEATURES,))
    value = layers.Dense(8, "tanh", kernel_initializer=glorot(1))(inputs)
    first = layers.Dense(CLASSES, kernel_initializer=glorot(2), name="first")
    second = layers.Dense(1, kernel_initializer=glorot(3), name="second")
    model = keras.Model(
        inputs, {"first": first(value), "second": second(value)}
    )
    model.compile(
        optimizers.SGD(0.1),
        loss={"first": "mse", "second": losses.Huber()},
        loss_weights={"first": 0.3, "second": 2.0},
        metrics={"first": ["mae"], "second": ["mse"]},
        weighted_metrics={"first": ["mae"]},
    )
    return model


def two_targets(rows):
    x, y = regressed(rows)
    return x, {"first": y, "second": y[:, :1] * 2}


def frozen():
    model = compiled(net(layers.Dense(4, kernel_initializer=glorot(7))))
    model.layers[1].trainable = False
    return model


def gan():
    model = models.TwoOptimizers(
        chain(
            (FEATURES,), layers.Dense(8, "tanh", kernel_initializer=glorot(1))
        ),
        chain((8,), layers.Dense(CLASSES, kernel_initializer=glorot(2))),
    )
    model.build((None, FEATURES))
    model.compile(optimizers.Adam(1e-2), "mse")
    model.optimizer.build(model.second.trainable_variables)
    return model


def loss_scaled(scale=2.0**15, **kwargs):
    return optimizers.LossScaleOptimizer(
        optimizers.SGD(0.1, **kwargs),
        initial_scale=scale,
        dynamic_growth_steps=2,
    )


def rated(schedule):
    return optimizers.SGD(schedule, momentum=0.9, nesterov=True)


OPTIMIZERS = {
    "sgd": by_optimizer(lambda: optimizers.SGD(0.1)),
    "adam": by_optimizer(lambda: optimizers.Adam(1e-2), tolerance=5e-5),
    "adamw": by_optimizer(
        lambda: optimizers.AdamW(1e-2, weight_decay=0.1), tolerance=5e-5
    ),
    "muon": by_optimizer(lambda: optimizers.Muon(1e-2), tolerance=2e-4),
    "schedule": by_optimizer(
        lambda: rated(optimizers.schedules.ExponentialDecay(0.1, 3, 0.5))
    ),
    "clipvalue": by_optimizer(lambda: optimizers.SGD(0.5, clipvalue=0.02)),
    "clipnorm": by_optimizer(lambda: optimizers.SGD(0.5, clipnorm=0.05)),
    "global_clipnorm": by_optimizer(
        lambda: optimizers.SGD(0.5, global_clipnorm=0.1)
    ),
    "accumulation": by_optimizer(
        lambda: optimizers.SGD(0.1, gradient_accumulation_steps=3)
    ),
    "ema": by_optimizer(
        lambda: optimizers.SGD(
            0.5, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2
        )
    ),
    "loss_scale_factor": by_optimizer(
        lambda: optimizers.SGD(0.1, loss_scale_factor=128.0)
    ),
    "loss_scale_optimizer": by_optimizer(
        lambda: loss_scaled(global_clipnorm=0.3)
    ),
    "loss_scale_overflow": by_optimizer(lambda: loss_scaled(2.0**127)),
    "two_optimizers": Case(gan, regressed, tolerance=5e-5),
}

LOSSES = {
    "sum": Case(
        lambda: compiled(
            net(),
            loss=losses.MeanSquaredError(reduction="sum"),
            measured=["mae"],
            # A sum over 64 rows diverges at the other cases' rate.
            optimizer=optimizers.SGD(0.002),
        ),
        regressed,
    ),
    "mean_with_sample_weight": by_loss(
        lambda: losses.MeanSquaredError(reduction="mean_with_sample_weight"),
        regressed,
        weight=weights,
    ),
    "sample_weight": by_loss(
        lambda: losses.MeanSquaredError(), regressed, weight=weights
    ),
    "dice": by_loss(lambda: losses.Dice(), activation="softmax"),
    "dice_by_name": by_loss(lambda: "dice", activation="softmax"),
    "tversky": by_loss(lambda: losses.Tversky(), activation="softmax"),
    "circle": Case(
        lambda: compiled(embedding(), loss=losses.Circle(), measured=[]),
        classified,
        # Its scale of 80 multiplies rounding: 3e-4 in one weight of 48, on
        # three replicas, which sum 70 rows in another order.
        tolerance=5e-4,
    ),
    "marked": by_loss(lambda: models.spread_loss, regressed),
    "function_of_rows": by_loss(
        lambda: lambda y, p: keras.ops.mean((y - p) ** 4, -1), regressed
    ),
    "scalar_function": by_loss(lambda: models.scalar_loss, regressed),
    "mask": Case(masked, tokens),
    "mask_and_weight": Case(
        masked,
        tokens,
        weight=lambda rows: np.repeat(weights(rows)[:, None], 5, axis=1),
    ),
    "mask_sum": Case(
        lambda: masked(
            loss=losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="sum"
            ),
            optimizer=optimizers.SGD(0.01),
        ),
        tokens,
    ),
    "class_weight": Case(
        compiled, classified, fit={"class_weight": {0: 0.5, 1: 2.0, 2: 1.0}}
    ),
    "kernel_regularizer": Case(
        lambda: compiled(net(kernel_regularizer=regularizers.L2(0.1))),
        classified,
    ),
    "activity_regularizer": Case(
        lambda: compiled(net(activity_regularizer=regularizers.L2(0.1))),
        classified,
    ),
    "add_loss": Case(lambda: compiled(net(models.AddsLosses())), classified),
    "two_outputs": Case(two_outputs, two_targets),
    "own_compute_loss": Case(
        lambda: compiled(
            net(cls=models.OwnComputeLoss), loss="mse", measured=["mae"]
        ),
        regressed,
    ),
}

METRICS = {
    "keras_binary": by_metrics(
        lambda: [
            metrics.AUC(name="auc"),
            metrics.Precision(name="precision"),
            metrics.Recall(thresholds=[0.2, 0.5], name="recall"),
            metrics.F1Score(average="macro", name="f1"),
            metrics.BinaryIoU(name="iou"),
            metrics.TopKCategoricalAccuracy(2, name="top"),
            metrics.CategoricalCrossentropy(name="entropy"),
            metrics.RecallAtPrecision(0.5, name="at"),
        ],
        one_hot,
        activation="softmax",
        loss="categorical_crossentropy",
    ),
    "keras_regression": by_metrics(
        lambda: [
            metrics.R2Score(name="r2"),
            metrics.RootMeanSquaredError(name="rmse"),
            metrics.CosineSimilarity(name="cosine"),
            metrics.LogCoshError(name="logcosh"),
            "mape",
        ],
        regressed,
        tolerance=1e-4,  # mape is of the order of 100.
    ),
    "not_additive": by_metrics(
        lambda: [
            models.MaxPrediction(),
            models.MovingPrediction(),
            models.SawLarge(),
        ],
        regressed,
        warns="not shown to add a sum",
    ),
    "function_that_mixes_rows": by_metrics(
        lambda: [models.spread_metric], regressed
    ),
    "weighted": Case(
        lambda: compiled(
            loss="sparse_categorical_crossentropy",
            model=net(activation="softmax"),
            weighted_metrics=["accuracy"],
        ),
        classified,
        weight=weights,
    ),
    "masked": Case(lambda: masked(measured=["accuracy"]), tokens),
}

STEPS = {
    "own_train_step": by_step(models.OwnTrainStep),
    "own_apply_gradients": by_step(models.OwnApplyGradients),
    "own_trackers": by_step(models.TrackedLoss),
    "beside_optimizer": by_step(models.BesideOptimizer),
    "without_optimizer": by_step(models.WithoutOptimizer),
    "counters": Case(lambda: compiled(net(models.Counters())), classified),
    "frozen_after_compile": Case(frozen, classified),
    "steps_per_execution": Case(
        lambda: compiled(steps_per_execution=3), classified
    ),
    "run_eagerly": Case(lambda: compiled(run_eagerly=True), classified),
    "jit_compile_false": Case(
        lambda: compiled(jit_compile=False),
        classified,
        warns="jit_compile=False",
    ),
}

LAYERS = {
    "synchronized": Case(synchronized, regressed, tolerance=2e-5),
    "synchronized_masked": Case(
        lambda: synchronized(True), ragged, tolerance=2e-5
    ),
    "synchronized_renorm": Case(
        lambda: synchronized(renorm=True), regressed, tolerance=5e-5
    ),
    "lstm": Case(
        lambda: sequence_net(
            layers.LSTM(
                STEP_FEATURES,
                kernel_initializer=glorot(4),
                recurrent_initializer=keras.initializers.Orthogonal(seed=5),
                seed=6,
            )
        ),
        sequences,
    ),
    "transformer": Case(transformer, sequences),
    "sort": Case(lambda: sequence_net(models.SortedSteps()), sequences),
    "convolution": Case(convolution, pictures),
    "bfloat16": Case(
        lambda: compiled(
            net(dtype="mixed_bfloat16"), loss="mse", measured=["mae"]
        ),
        regressed,
        tolerance=2e-2,
    ),
    "float16": Case(
        lambda: compiled(
            net(dtype="mixed_float16"),
            loss="mse",
            measured=["mae"],
            # Far from float16's largest value: near it, the rows of one
            # replica may overflow later than the rows of all.
            optimizer=loss_scaled(2.0**6),
        ),
        regressed,
        tolerance=2e-3,
    ),
}

CASES = OPTIMIZERS | LOSSES | METRICS | STEPS | LAYERS

# What they do is in another case or file of the default run, too.
_TOLD_ELSEWHERE = {
    *("adamw", "schedule", "clipvalue", "loss_scale_factor", "dice_by_name"),
    *("function_of_rows", "tversky", "mask_sum", "keras_regression"),
    *("run_eagerly", "jit_compile_false", "synchronized"),
}

BY_DEFAULT = [name for name in CASES if name not in _TOLD_ELSEWHERE]

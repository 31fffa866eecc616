"""Layers defined per replica, against a loop over replicas by hand.

BatchNormalization without `synchronized` and Dropout see the rows of their
replica. A batch that the replicas cannot share evenly is computed as one, so
there such a layer sees the whole batch, as on one device.
"""

import jax
import keras
import numpy as np
import pytest
from keras import layers

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from tests.parity.cases import glorot, regressed

PAIRS = ((64, 16), (70, 16), (250, 64), (10, 4), (3, 8), (13, 5))


def build():
    inputs = keras.Input((6,))
    value = layers.Dense(8, kernel_initializer=glorot(1))(inputs)
    value = layers.BatchNormalization(momentum=0.9)(value)
    value = layers.Dropout(0.5, seed=11)(layers.Activation("tanh")(value))
    value = layers.Dense(3, kernel_initializer=glorot(2))(value)
    model = keras.Model(inputs, value)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


def hashed(replica):
    """The documented hash of a replica's id; replica 0's is 0."""
    value = (replica * 0x9E3779B9) & 0xFFFFFFFF
    value = ((value ^ (value >> 15)) * 0x85EBCA6B) & 0xFFFFFFFF
    return value ^ (value >> 13)


def train_by_hand(model, x, y, batch_size, replicas, epochs=2):
    """Trains `replicas` copies in a Python loop; returns the state."""
    trainable = [v.value for v in model.trainable_variables]
    other = [v.value for v in model.non_trainable_variables]
    optimizer = [v.value for v in model.optimizer.variables]
    seeds = [
        i
        for i, v in enumerate(model.non_trainable_variables)
        if v.name == "seed_generator_state"
    ]

    def loss_fn(trainable, other, x, y):
        y_pred, other = model.stateless_call(trainable, other, x, training=True)
        return keras.ops.mean((y - y_pred) ** 2), other

    gradient = jax.jit(jax.grad(loss_fn, has_aux=True))
    for _ in range(epochs):
        for start in range(0, len(x), batch_size):
            batch = x[start : start + batch_size], y[start : start + batch_size]
            count = 1 if len(batch[0]) % replicas else replicas
            parts = []
            for replica, rows in enumerate(
                np.split(np.arange(len(batch[0])), count)
            ):
                own = list(other)
                for i in seeds:
                    own[i] = (
                        own[i].at[0].set(own[i][0] ^ np.uint32(hashed(replica)))
                    )
                parts.append(
                    gradient(trainable, own, batch[0][rows], batch[1][rows])
                )
            grads = [
                sum(g) / count for g in zip(*(p[0] for p in parts), strict=True)
            ]
            merged = [
                sum(o) / count for o in zip(*(p[1] for p in parts), strict=True)
            ]
            for i in seeds:
                merged[i] = other[i].at[1].set(parts[0][1][i][1])
            other = merged
            trainable, optimizer = model.optimizer.stateless_apply(
                optimizer, grads, trainable
            )
    return [np.asarray(v) for v in (*trainable, *other, *optimizer)]


@pytest.mark.parametrize(
    ("replicas", "pairs"),
    [
        (3, ((10, 4), (3, 8))),
        *(pytest.param(n, PAIRS, marks=pytest.mark.slow) for n in (2, 3, 8)),
    ],
)
def test_equals_a_loop_over_replicas(replicas, pairs):
    with ks.MirroredStrategy(jax.devices()[:replicas]).scope():
        model = build()
    first = [np.array(v.value) for v in _state(model)]
    by_hand = build()
    for rows, batch_size in pairs:
        x, y = regressed(rows)
        for variable, value in zip(_state(model), first, strict=True):
            variable.assign(value)
        expected = train_by_hand(by_hand, x, y, batch_size, replicas)
        model.fit(
            x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0
        )
        assert_replicated(model)
        for variable, value in zip(_state(model), expected, strict=True):
            np.testing.assert_allclose(
                np.asarray(variable.value),
                value,
                rtol=1e-5,
                atol=1e-5,
                err_msg=f"{variable.path} of {rows}/{batch_size}",
            )


def test_masks_differ_between_replicas_and_seeds_stay_replicated():
    class Masks(keras.layers.Layer):
        def build(self, shape):
            self.dropout = layers.Dropout(0.5, seed=3)
            self.masks = self.add_weight(
                shape=(8, 64), initializer="zeros", trainable=False
            )
            self.masks = ks.merge(self.masks, "sum")
            self.scale = self.add_weight(shape=(), initializer="ones")

        def call(self, inputs, training=None):
            dropped = self.dropout(inputs * 0 + 1, training=training)
            # Each replica writes its mask into the row its data names.
            row = keras.ops.one_hot(keras.ops.cast(inputs[:1, 0], "int32"), 8)
            self.masks.assign_add(keras.ops.transpose(row) * dropped[:1])
            return inputs * self.scale

    with ks.MirroredStrategy().scope():
        model = keras.Sequential([keras.Input((64,)), Masks()])
        model.compile("sgd", "mse")
    x = np.repeat(np.arange(8, dtype="float32")[:, None], 64, axis=1)
    model.fit(x, x, batch_size=8, verbose=0)
    masks = np.asarray(model.layers[0].masks.value)
    assert len({mask.tobytes() for mask in masks}) == 8
    assert 0.3 < (masks > 0).mean() < 0.7
    assert_replicated(model)
    seed = np.asarray(model.layers[0].dropout.seed_generator.state.value)
    assert seed.tolist() == [3, 1]


def _state(model):
    return [
        *model.trainable_variables,
        *model.non_trainable_variables,
        *model.optimizer.variables,
    ]

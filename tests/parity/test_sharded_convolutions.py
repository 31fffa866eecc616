"""Convolutions of sharded variables give the numbers of one device.

XLA's partitioner computes some sharded convolutions wrongly, without an error
(docs/upstream.md), so what users vary is combined at random: ranks, groups,
strides, dilations, transposed kernels, the sharded dimension of the kernel, the
number of shards, and the program that a batch or a loss leads to.
"""

import contextlib
import dataclasses
import functools
import random

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks
from keras_strategies.testing import assert_replicated
from keras_strategies.variables.model_variables import (
    all_variables,
)
from tests.support.combinations import combine
from tests.support.models import chain
from tests.support.strategies import cores_strategy, make_strategy, take_devices

COUNT = 200
# Those that were wrong before convolutions were constrained, and a few others.
BY_DEFAULT = {
    *(6, 9, 12, 27, 34, 35, 48, 102, 109, 129, 139, 153, 170, 187, 189, 195),
    *(4, 66, 154, 167),
}
CONVOLUTIONS = {
    1: (layers.Conv1D, layers.Conv1DTranspose, layers.DepthwiseConv1D),
    2: (layers.Conv2D, layers.Conv2DTranspose, layers.DepthwiseConv2D),
    3: (layers.Conv3D, layers.Conv3DTranspose, layers.Conv3D),
}
CHANNELS = 24
"""A multiple of each number of shards."""


def mixes_rows(y, outputs):
    """Leads to a step over the global batch."""
    return ops.sqrt(ops.mean(ops.square(y - outputs)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Combination:
    """A model with convolutions, and how its variables are sharded."""

    rank: int
    kind: int
    groups: int
    strides: int
    dilation: int
    padding: str
    tail: str
    activation: str
    shards: int
    dim: int
    route: str

    def __str__(self):
        kind = CONVOLUTIONS[self.rank][self.kind].__name__
        steps = f"{self.groups}-{self.strides}-{self.dilation}"
        places = f"{self.tail}-{self.activation}-{self.dim}-{self.shards}"
        return f"{kind}-{steps}-{self.padding}-{places}-{self.route}"

    def make_model(self):
        make = CONVOLUTIONS[self.rank][self.kind]
        options = {
            "strides": self.strides,
            "padding": self.padding,
            "activation": self.activation,
        }
        if make in (layers.DepthwiseConv1D, layers.DepthwiseConv2D):
            first = make(self.size, depth_multiplier=2, **options)
        elif self.kind == 1:
            first = make(CHANNELS, self.size, **options)
        else:
            options |= {"groups": self.groups, "dilation_rate": self.dilation}
            first = make(CHANNELS, self.size, **options)
        convolve = CONVOLUTIONS[self.rank][0]
        inner = [convolve(CHANNELS, 1), first]
        if self.tail == "conv":
            inner.append(convolve(CHANNELS, 2, padding="same"))
        elif self.tail == "pool":
            inner.append(_POOLS[self.rank](2, padding="same"))
        inner += [layers.Flatten(), layers.Dense(1)]
        return keras.Sequential([keras.Input(self.shape), *inner])

    @property
    def size(self):
        """The size of the kernel: a multiple of few shards."""
        return self.shards if self.shards in (2, 3, 4) else 2

    @property
    def shape(self):
        return (*[6, 6, 4][: self.rank], 3)

    def choose_dim(self, path, shape, dtype):
        """Returns the dimension to shard: the given one, or another."""
        sizes = dict(enumerate(shape))
        dims = [self.dim % len(shape), *reversed(sizes)] if shape else []
        divided = [d for d in dims if sizes[d] % self.shards == 0]
        return divided[0] if divided else None

    def make_strategy(self):
        if self.route == "cores":
            outputs = *[None] * (self.rank + 1), "model"
            inputs = *[None] * self.rank, "model", None
            specs = {
                ".*/conv.*/kernel": outputs,
                ".*dense.*/kernel": ("model", None),
            }
            if "Depthwise" in str(self):
                specs[".*depthwise.*/kernel"] = inputs
            replicas = 2 if self.shards == 4 else 1
            return cores_strategy(replicas, self.shards, specs)
        return ks.MirroredStrategy(
            take_devices(self.shards), variable_partitioner=self.choose_dim
        )

    def train(self, strategy=None):
        rows = 7 if self.route in ("indivisible", "cores") else 24
        shapes = (rows, *self.shape), (rows, 1)
        return train(self.make_model, shapes, self.route, strategy)


def train(make, shapes, route, strategy=None, optimizer=None):
    """Returns the numbers of one step, and those of a prediction.

    Args:
      make: Makes the model.
      shapes: The shapes of the inputs and the targets.
      route: The program that the batch or the loss leads to.
      strategy: The strategy; None for one device.
      optimizer: Makes the optimizer; None for SGD with momentum.
    """
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=shape).astype("float32") for shape in shapes)
    falls_back = route == "falls_back"
    keras.utils.set_random_seed(3)
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = make()
        loss = mixes_rows if falls_back else "mse"
        optimizer = optimizer or functools.partial(
            keras.optimizers.SGD, 0.05, 0.9
        )
        model.compile(optimizer(), loss)
    warning = contextlib.nullcontext()
    if strategy and falls_back:
        warning = pytest.warns(UserWarning, match="global batch")
    with warning:
        fit = model.fit(x, y, batch_size=len(x), shuffle=False, verbose=0)
    if strategy:
        assert_replicated(model)
    return {
        "loss": fit.history["loss"],
        "state": [np.asarray(v) for v in all_variables(model)],
        "predict": model.predict(x, batch_size=len(x), verbose=0),
    }


_POOLS = {
    1: layers.MaxPooling1D,
    2: layers.AveragePooling2D,
    3: layers.MaxPooling3D,
}


def draw(seed):
    """Draws a combination that Keras accepts."""
    choose = random.Random(seed).choice
    rank = choose([1, 1, 2, 2, 2, 3])
    strides = choose([1, 1, 2])
    dilation = 1 if strides > 1 else choose([1, 2])
    return Combination(
        rank=rank,
        kind=choose([0, 0, 1, 2]),
        groups=choose([1, 1, 2, CHANNELS]),
        strides=strides,
        dilation=dilation,
        padding="same" if dilation > 1 else choose(["valid", "same"]),
        tail=choose(["flatten", "flatten", "flatten", "conv", "pool"]),
        activation=choose(["linear", "linear", "linear", "gelu"]),
        shards=choose([2, 3, 4, 4, 4, 8]),
        dim=choose(range(rank + 2)),
        route=choose(["indivisible", "indivisible", "falls_back", "even"])
        if seed % 4
        else "cores",
    )


COMBINATIONS = [
    pytest.param(
        combination,
        id=f"{seed}-{combination}",
        marks=() if seed in BY_DEFAULT else pytest.mark.slow,
    )
    for seed, combination in enumerate(map(draw, range(COUNT)))
]


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_convolutions_equal_one_device(combination):
    expected = combination.train()
    found = combination.train(combination.make_strategy())
    check(found, expected)


def make_autoencoder():
    return chain(
        (6, 6, 3),
        layers.Conv2D(8, 3, padding="same"),
        layers.Flatten(),
        layers.Dense(10),
        layers.Dense(288),
        layers.Reshape((6, 6, 8)),
        layers.Conv2DTranspose(3, 3, padding="same"),
    )


def make_generator():
    return chain(
        (10,),
        layers.Dense(288),
        layers.Reshape((6, 6, 8)),
        layers.Conv2DTranspose(8, 4, strides=2, padding="same"),
        layers.LeakyReLU(0.2),
        layers.Conv2D(3, 4, padding="same", activation="tanh"),
    )


def make_normalized():
    return chain(
        (6, 6, 3),
        layers.SpectralNormalization(layers.Conv2D(8, 3, padding="same")),
        layers.Flatten(),
        layers.Dense(1),
    )


MODELS = {
    "autoencoder": (make_autoencoder, (6, 6, 3), (6, 6, 3)),
    "generator": (make_generator, (10,), (12, 12, 3)),
    "normalized": (make_normalized, (6, 6, 3), (1,)),
}


@pytest.mark.parametrize(
    ("name", "route", "strategy"),
    combine(
        MODELS,
        ["indivisible", "falls_back", "even"],
        ["sharded4", "sharded8"],
        every=4,
    ),
)
def test_models_equal_one_device(name, route, strategy):
    make, *shapes = MODELS[name]
    rows = 7 if route == "indivisible" else 8
    shapes = [(rows, *shape) for shape in shapes]
    expected = train(make, shapes, route)
    found = train(make, shapes, route, make_strategy(strategy))
    check(found, expected)


class Correlating(keras.optimizers.SGD):
    """Convolves gradients, which XLA shards in an update, with weights."""

    def update_step(self, gradient, variable, learning_rate):
        if len(variable.shape) == 2:
            padded = ops.pad(gradient, ((2, 2), (2, 2)))[None, ..., None]
            kernel = ops.convert_to_tensor(variable)[:, :, None, None]
            total = ops.sum(ops.conv(padded, kernel))
            gradient += 0.01 * total * ops.ones_like(gradient)
        super().update_step(gradient, variable, learning_rate)


def test_convolutions_of_an_optimizer_equal_one_device():
    """With groups, XLA shards variables over some of the devices only."""
    shapes = (24, 6), (24, 8)

    def make():
        return chain((6,), layers.Dense(24), layers.Dense(8))

    optimizer = functools.partial(Correlating, 0.05, 0.9)
    partitioner = ks.experimental.FullySharded(2, min_size=1)
    strategy = ks.MirroredStrategy(
        take_devices(4), variable_partitioner=partitioner
    )
    expected = train(make, shapes, "even", optimizer=optimizer)
    found = train(make, shapes, "even", strategy, optimizer)
    check(found, expected)


def check(found, expected):
    """Compares arrays in units of their largest entry."""

    def compare(path, got, want):
        size = np.abs(want).max(initial=0)
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(
            got, want, rtol=0, atol=3e-5 * max(size, 1e-3), err_msg=name
        )

    jax.tree_util.tree_map_with_path(compare, found, expected)

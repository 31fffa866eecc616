"""Steps of models that are planned by shorter ones."""

import random

import jax
import keras
import pytest
from keras import layers

import keras_strategies as ks
from keras_strategies.planning.compile.fit_step import FitStep
from tests.support.combinations import combine


def make_model():
    x = tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(16, 8)(x)
    for _ in range(8):
        x = layers.Add()([x, layers.Dense(8)(layers.LayerNormalization()(x))])
    model = keras.Model(tokens, layers.Dense(16)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    return model


class Block(layers.Layer):
    """A block that does something when it trains."""

    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs)
        self.kind = kind
        self.wide = layers.Dense(256, activation="gelu")
        self.narrow = layers.Dense(32)
        self.dropout = layers.Dropout(0.1)
        self.normalization = layers.BatchNormalization()

    def build(self, shape):
        self.wide.build(shape)
        self.narrow.build((*shape[:-1], self.wide.units))
        self.normalization.build(shape)

    def call(self, x, training=None):
        y = self.narrow(self.wide(x))
        if self.kind == "dropout":
            y = self.dropout(y)
        elif self.kind == "dropout, training":
            y = self.dropout(y, training=training)
        elif self.kind == "normalization":
            y = self.normalization(y, training=training)
        elif self.kind == "loss":
            self.add_loss(keras.ops.mean(y))
        return x + y


@pytest.mark.parametrize(
    "kind", ["dropout", "dropout, training", "normalization", "loss"]
)
def test_blocks_that_keras_cannot_rematerialize_are_planned(kind):
    def make_model():
        x = inputs = keras.Input((32,))
        for _ in range(4):
            x = Block(kind)(x)
        model = keras.Model(inputs, x)
        model.compile("sgd", "mse")
        return model

    strategy = ks.MirroredStrategy(jax.devices("cpu")[:2])
    rows = jax.ShapeDtypeStruct((4096, 32), "float32")
    (step,) = strategy.plan(
        make_model, (rows, rows), strategies="replicated"
    ).steps
    assert step.error is None
    # So a plan tries to rematerialize them.
    assert step.memory["activations"] > step.bytes_in_all / 2
    assert "RematScope" not in step.advice


def test_after_a_plan_seeds_and_names_are_what_they_would_have_been():
    strategy = ks.MirroredStrategy(jax.devices("cpu")[:1])
    tokens = jax.ShapeDtypeStruct((4, 32), "int32")
    keras.utils.set_random_seed(3)
    drawn = random.random()
    number = keras.backend.get_uid("dense")
    keras.utils.set_random_seed(3)
    strategy.plan(make_model, (tokens, tokens))
    assert random.random() == drawn
    assert keras.backend.get_uid("dense") == number + 1


def test_integers_of_a_model_without_an_embedding_are_no_tokens():
    def make():
        model = keras.Sequential(
            [keras.Input((6,), dtype="int32"), layers.Dense(2)]
        )
        model.compile("sgd", "mse")
        return model

    strategy = ks.MirroredStrategy(jax.devices("cpu")[:1])
    x = jax.ShapeDtypeStruct((4, 6), "int32")
    y = jax.ShapeDtypeStruct((4, 2), "float32")
    (step,) = strategy.plan(make, (x, y)).steps[:1]
    assert step.error is None
    assert step.tokens is None


@pytest.mark.parametrize("has_convolution", combine([False, True], every=2))
def test_steps_of_an_execution_bring_their_batches(has_convolution):
    def bytes_of(steps):
        def make():
            shape = (8, 8, 3)
            first = layers.Conv2D(4, 3) if has_convolution else layers.Dense(4)
            model = keras.Sequential(
                [keras.Input(shape), first, layers.Flatten(), layers.Dense(2)]
            )
            model.compile("sgd", "mse", steps_per_execution=steps)
            return model

        strategy = ks.MirroredStrategy(jax.devices("cpu")[:2])
        x = jax.ShapeDtypeStruct((32, 8, 8, 3), "float32")
        y = jax.ShapeDtypeStruct((32, 2), "float32")
        given = {"strategies": "replicated"}
        (step,) = strategy.plan(make, (x, y), **given).steps
        assert step.error is None
        return step.memory["other"]

    # Steps of convolutions are not one program on CPUs.
    more = 0 if has_convolution else 9 * 4 * 16 * (8 * 8 * 3 + 2)
    assert bytes_of(10) - bytes_of(1) == pytest.approx(more, abs=100)


class WithoutConfig(keras.optimizers.SGD):
    def __init__(self, rate, other):
        super().__init__(rate)
        self.other = other


def count_flops(*parts, rows=8):
    """Returns a model's operations, in products of (8, 16) by (16, 16)."""
    strategy = ks.MirroredStrategy(jax.devices("cpu")[:2])
    with strategy.scope(), ks.abstract():
        model = keras.Sequential([keras.Input((16,)), *(p() for p in parts)])
        model.compile("sgd", "mse")
    batch = jax.ShapeDtypeStruct((rows, 16), "float32")
    flops = FitStep(model, strategy, (batch, batch)).model_flops(rows)
    return flops and flops * 2 / (2 * 8 * 16 * 16)


def dense():
    return layers.Dense(16)


def frozen():
    return layers.Dense(16, trainable=False)


def rematerialized():
    with keras.RematScope("full"):
        return layers.Dense(16)


class Sampler(layers.Layer):
    """Multiplies by its weights until the result is large."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(16, 16))

    def call(self, x):
        return jax.lax.while_loop(
            lambda y: y.sum() < 9, lambda y: y @ self.scale.value, x
        )


@pytest.mark.parametrize(
    ("parts", "products"),
    [
        ([dense, dense], 2 + 2 + 1),
        ([frozen, dense], 2 + 1),
        # The gradient of the first layer's weights passes the second.
        ([dense, frozen], 2 + 1 + 1),
        ([frozen, frozen], 2),
        ([dense, rematerialized], 2 + 2 + 1),
        # A loop of unknown length has no gradients.
        ([dense, Sampler], None),
    ],
)
def test_operations_of_a_model_are_those_of_its_gradients(parts, products):
    assert count_flops(*parts) == products


class WithoutMode(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(8)

    def call(self, inputs):
        return self.dense(inputs)


class WithoutCall(WithoutMode):
    """A model whose train step does not use its `call`."""

    call = keras.Model.call

    def train_step(self, state, data):
        weights, others, slots, metrics = state
        x, y = data

        def loss_of(weights):
            outputs, _ = self.dense.stateless_call(weights, [], x)
            return keras.ops.mean((outputs - y) ** 2)

        loss, grads = jax.value_and_grad(loss_of)(weights)
        weights, slots = self.optimizer.stateless_apply(slots, grads, weights)
        return {"loss": loss}, (weights, others, slots, metrics)


def step_of(make, *args):
    """The step of a subclassed model for 32 rows of 16 numbers."""
    strategy = ks.MirroredStrategy(jax.devices("cpu")[:1])
    with strategy.scope(), ks.abstract():
        model = make()
        model.dense.build((None, 16))
        model.built = True
        model.compile("sgd", *args)
    batch = [jax.ShapeDtypeStruct((32, n), "float32") for n in (16, 8)]
    return FitStep(model, strategy, tuple(batch))


def test_operations_of_a_model_whose_call_takes_no_mode_are_counted():
    step = step_of(WithoutMode, "mse")
    # Two for each entry of the kernel, row, and product of two.
    assert step.model_flops(32) == 2 * 2 * 16 * 8 * 32


class OfTwoInputs(WithoutCall):
    def call(self, inputs, times):
        return self.dense(inputs * times)


@pytest.mark.parametrize("make", [WithoutCall, OfTwoInputs])
def test_operations_of_a_model_without_such_a_call_are_unknown(make):
    step = step_of(make)
    assert step.model_flops(32) is None
    assert "dot_general" in step.lower(32).as_text()

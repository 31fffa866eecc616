"""Models without `call`, whose step applies two optimizers, as in a GAN."""

import warnings

import jax
import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_strategies as ks
from keras_strategies.step.in_place_step import find_other_variables
from tests.support.combinations import combine

SIZE = 4
IMAGES = np.random.default_rng(5).random((48, 6, 6, 1)).astype("float32")


class Adversarial(keras.Model):
    """A GAN as in the guides of Keras: its step is in TensorFlow's form."""

    def __init__(self, draws):
        super().__init__()
        self.draws = draws
        # It is built by the first step.
        self.discriminator = keras.Sequential(
            [
                layers.Conv2D(4, 3, strides=2, padding="same"),
                layers.LeakyReLU(0.2),
                layers.Flatten(),
                layers.Dense(1),
            ]
        )
        self.generator = keras.Sequential(
            [
                layers.Dense(36),
                layers.LeakyReLU(0.2),
                layers.Reshape((3, 3, 4)),
                layers.Conv2DTranspose(2, 4, strides=2, padding="same"),
                layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
            ]
        )
        self.seeds = keras.random.SeedGenerator(3)

    def compile(self, d_optimizer, g_optimizer, loss_fn, **options):
        super().compile(**options)
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.loss_fn = loss_fn
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def draw(self, images):
        if self.draws:
            shape = (ops.shape(images)[0], SIZE)
            return keras.random.normal(shape, seed=self.seeds)
        return images[:, 0, :SIZE, 0]

    def train_step(self, data):
        count = ops.shape(data)[0]
        fake = self.generator(self.draw(data))
        both = ops.concatenate([fake, data], axis=0)
        labels = ops.concatenate(
            [ops.ones((count, 1)), ops.zeros((count, 1))], axis=0
        )
        with ks.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        gradients = tape.gradient(d_loss, weights)
        self.d_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        with ks.GradientTape() as tape:
            fake = self.generator(self.draw(data))
            g_loss = self.loss_fn(
                ops.zeros((count, 1)), self.discriminator(fake)
            )
        weights = self.generator.trainable_weights
        gradients = tape.gradient(g_loss, weights)
        self.g_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {metric.name: metric.result() for metric in self.metrics}


def make(replicas, draws=False, partitioner=None, cls=Adversarial, **options):
    keras.utils.set_random_seed(1)
    strategy = ks.MirroredStrategy(
        devices=jax.devices()[:replicas], variable_partitioner=partitioner
    )
    with strategy.scope():
        model = cls(draws)
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.optimizers.SGD(0.05, momentum=0.5),
            keras.losses.BinaryCrossentropy(from_logits=True),
            **options,
        )
    return model


def fit(model, rows=48, epochs=2, **options):
    data = IMAGES[:rows]
    return model.fit(
        data, batch_size=16, epochs=epochs, shuffle=False, verbose=0, **options
    ).history


def train(replicas, rows=48, callbacks=(), **options):
    model = make(replicas, **options)
    history = [fit(model, rows, callbacks=list(callbacks)) for _ in range(2)]
    return history, *map(read, (model, model.d_optimizer, model.g_optimizer))


def read(owner):
    return [np.asarray(variable.value) for variable in owner.variables]


def compare(found, expected):
    jax.tree.map(
        lambda one, two: np.testing.assert_allclose(
            one, two, rtol=2e-4, atol=1e-5
        ),
        found,
        expected,
    )


@pytest.mark.parametrize(
    ("rows", "replicas"), combine([48, 44], [2, 3, 8], every=1)
)
def test_equals_one_device(rows, replicas):
    compare(train(replicas, rows), train(1, rows))


def test_equals_one_device_with_sharded_variables():
    sharded = ks.experimental.FullySharded(min_size=1)
    compare(train(2, partitioner=sharded), train(1))


def test_equals_one_device_with_several_steps_in_an_execution():
    compare(train(2, steps_per_execution=2), train(1))


@pytest.mark.parametrize("draws", [False, True])
def test_the_step_is_mapped(draws):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="This step runs over")
        history, _, discriminator, _ = train(2, draws=draws)
    assert np.isfinite(history[1]["g_loss"]).all()
    # 2 fits of 2 epochs of 3 steps.
    assert int(discriminator[0]) == 12


def test_callbacks_read_and_write_the_optimizers():
    class Halve(keras.callbacks.Callback):
        """Halves a rate in each epoch, and keeps an array of the optimizer."""

        kept = ()

        def on_train_batch_end(self, batch, logs=None):
            optimizer = self.model.g_optimizer
            Halve.kept = (*Halve.kept, optimizer.variables[2].value)

        def on_epoch_end(self, epoch, logs=None):
            rate = self.model.g_optimizer.learning_rate
            rate.assign(rate / 2)

    found = train(2, callbacks=[Halve()])
    kept = [np.asarray(array) for array in Halve.kept]
    compare(found, train(1, callbacks=[Halve()]))
    assert not np.allclose(kept[-1], kept[0])
    # In 2 fits of 2 epochs.
    assert float(found[-1][1]) == pytest.approx(0.05 / 16)


class Shared(Adversarial):
    """Its parts are compiled with its optimizers, so each is there twice."""

    def compile(self, d_optimizer, g_optimizer, loss_fn, **options):
        super().compile(d_optimizer, g_optimizer, loss_fn, **options)
        self.discriminator.compile(d_optimizer)
        self.generator.compile(g_optimizer)


def test_parts_may_have_the_same_optimizers():
    def train_shared(replicas):
        model = make(replicas, cls=Shared)
        history = [fit(model) for _ in range(2)]
        others = find_other_variables(model, "train")
        assert len(others) == len(set(map(id, others)))
        return history, *map(
            read, (model, model.d_optimizer, model.g_optimizer)
        )

    compare(train_shared(2), train(1))


class Unpacks(Adversarial):
    def train_step(self, data):
        if isinstance(data, tuple):
            data, *_ = data
        return super().train_step(data)


# Keras warns of every generator.
@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_batches_of_a_generator_are_used_once():
    def train_on(data, **options):
        model = make(2, cls=Unpacks)
        history = model.fit(data, shuffle=False, verbose=0, **options).history
        return history, read(model), read(model.d_optimizer)

    batches = ((IMAGES[i : i + 16],) for i in range(0, 48, 16))
    found = train_on(batches)
    compare(found, train_on(IMAGES, batch_size=16))
    assert int(found[-1][0]) == 3
    model = make(2, cls=Unpacks)
    logs = [
        model.train_on_batch(IMAGES[i : i + 16], return_dict=True)
        for i in range(0, 48, 16)
    ]
    compare(read(model), found[1])
    assert float(logs[-1]["g_loss"]) > 0


def test_a_fit_resumes_with_the_optimizers(tmp_path):
    expected = make(1)
    fit(expected, epochs=4)
    for replicas, epochs in ((2, 2), (3, 4)):
        model = make(replicas)
        checkpoint = ks.callbacks.Checkpoint(tmp_path / "run")
        fit(model, epochs=epochs, callbacks=[checkpoint])
    compare(
        [read(model), read(model.d_optimizer), read(model.g_optimizer)],
        [
            read(expected),
            read(expected.d_optimizer),
            read(expected.g_optimizer),
        ],
    )


def test_a_plan_needs_no_targets():
    def create():
        model = Adversarial(draws=False)
        model.compile(
            keras.optimizers.Adam(0.01),
            keras.optimizers.SGD(0.05, momentum=0.5),
            keras.losses.BinaryCrossentropy(from_logits=True),
        )
        return model

    strategy = ks.MirroredStrategy(devices=jax.devices()[:2])
    batch = jax.ShapeDtypeStruct((16, 6, 6, 1), "float32")
    plan = strategy.plan(create, (batch, None), strategies="replicated")
    memory = plan.steps[0].memory
    model = make(1)
    fit(model)
    sizes = [
        sum(weight.size for weight in part.get_weights())
        for part in (model.discriminator, model.generator)
    ]
    # Adam has two slots for each weight, SGD's momentum one. These and
    # the model's own, which is not used, have an iteration and a rate.
    assert memory["weights"] == 4 * (sum(sizes) + model.seeds.state.shape[0])
    assert memory["slots"] == 4 * (2 * sizes[0] + sizes[1] + 6)


class Extra(keras.Model):
    """Its step has an argument that nothing passes."""

    def __init__(self):
        super().__init__()
        self.layer = layers.Dense(1)

    def call(self, x):
        return self.layer(x)

    def train_step(self, data, scale=1.0):
        with ks.GradientTape() as tape:
            loss = scale * ops.mean(self(data) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"square": loss}


def test_other_arguments_of_a_step_have_defaults():
    def train(replicas):
        keras.utils.set_random_seed(1)
        with ks.MirroredStrategy(devices=jax.devices()[:replicas]).scope():
            model = Extra()
            model.compile("sgd")
        x = IMAGES.reshape((48, 36))
        history = model.fit(x, batch_size=16, shuffle=False, verbose=0).history
        return history, model.get_weights()

    compare(train(2), train(1))

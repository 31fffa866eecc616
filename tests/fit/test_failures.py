"""What fails in the middle of a loop: the error arrives, no weight is lost."""

import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.step.train_program import StepProgram
from tests.support.combinations import combine, few
from tests.support.mistakes import (
    X,
    Y,
    assert_text,
    assert_usable,
    compiled,
    make_iter,
)
from tests.support.plain_keras import assert_same, dense, mirrored, no_shuffle


@pytest.fixture
def model():
    return compiled(mirrored(2))


def then(other, *, epoch):
    """Two epochs of three batches; `other` in the middle of one of them."""
    good = (X[:4], Y[:4])
    batches = [good] * 6
    batches[3 * epoch + 1] = other
    return make_iter(*batches)


@no_shuffle
def test_a_wrong_number_of_features_leaves_the_model_usable(model):
    wrong = (np.zeros((4, 5), "float32"), Y[:4])
    with pytest.raises(ValueError, match="incompatible with the layer"):
        model.fit(then(wrong, epoch=0), steps_per_epoch=3, verbose=0)
    assert int(model.optimizer.iterations) == 1
    assert_usable(model)


class Trouble(Exception):
    """The user's own."""


@no_shuffle
@pytest.mark.parametrize(("steps", "epoch"), combine([1, 2], [0, 1], every=2))
def test_a_users_exception_arrives_unchanged(epoch, steps):
    model = compiled(mirrored(2))
    model.steps_per_execution = steps
    trouble = Trouble("disk on fire")

    def data():
        for _ in range(3 + 3 * epoch):
            yield X[:4], Y[:4]
        raise trouble

    with pytest.raises(Trouble) as caught:
        model.fit(data(), epochs=3, steps_per_epoch=4, verbose=0)
    assert caught.value is trouble
    assert int(model.optimizer.iterations) > 0
    assert_usable(model)


@no_shuffle
@pytest.mark.parametrize("loop", combine(["evaluate", "predict"], every=2))
def test_a_users_exception_arrives_unchanged_elsewhere_too(loop, model):
    before = model.get_weights()

    def data():
        for _ in range(3):
            yield X[:4], Y[:4]
        raise Trouble("disk on fire")

    with pytest.raises(Trouble):
        getattr(model, loop)(data(), verbose=0)
    assert_same(before, model.get_weights(), tolerance=0)
    assert_usable(model)


def failing(event):
    def fail(*args, **kwargs):
        raise Trouble(event)

    callback = keras.callbacks.Callback()
    setattr(callback, event, fail)
    return callback


@pytest.mark.parametrize(
    "event",
    combine(
        ["on_train_batch_begin", "on_train_batch_end", "on_epoch_end"], every=2
    ),
)
def test_a_callbacks_exception_leaves_the_model_usable(model, event):
    with pytest.raises(Trouble):
        model.fit(X, Y, batch_size=8, callbacks=[failing(event)], verbose=0)
    assert_usable(model)


@pytest.mark.parametrize(
    ("loop", "event"),
    few(
        [
            ("evaluate", "on_test_batch_begin"),
            ("evaluate", "on_test_batch_end"),
            ("predict", "on_predict_batch_begin"),
            ("predict", "on_predict_batch_end"),
        ],
        every=2,
    ),
)
def test_a_callbacks_exception_keeps_the_weights(model, loop, event):
    before = model.get_weights()
    data = (X, Y) if loop == "evaluate" else (X,)
    with pytest.raises(Trouble):
        getattr(model, loop)(*data, callbacks=[failing(event)], verbose=0)
    assert_same(before, model.get_weights(), tolerance=0)
    assert_usable(model)


def test_an_exception_in_the_models_code_leaves_it_usable():
    class Faulty(keras.Model):
        fails = True

        def __init__(self):
            super().__init__()
            self.dense = dense(1)

        def call(self, inputs, training=False):
            if training and self.fails:
                raise Trouble("in call")
            return self.dense(inputs)

    model = compiled(mirrored(2), Faulty)
    with pytest.raises(Trouble):
        model.fit(X, Y, batch_size=8, verbose=0)
    model.fails = False
    assert_usable(model)


def test_an_interrupt_between_the_steps_of_an_execution_keeps_them(monkeypatch):
    """Gradients of convolutions run step by step on CPU, not as one program."""
    images = np.random.default_rng(0).normal(size=(16, 6, 6, 1))
    labels = np.arange(16.0)[:, None]

    def make():
        kernel = keras.initializers.GlorotUniform(seed=3)
        convolution = keras.layers.Conv2D(2, 3, kernel_initializer=kernel)
        layers = [keras.Input((6, 6, 1)), convolution, keras.layers.Flatten()]
        return keras.Sequential([*layers, dense(1)])

    def fit(model, rows):
        data = images[:rows], labels[:rows]
        model.fit(*data, batch_size=4, shuffle=False, verbose=0)

    plain = make()
    plain.compile("adam", "mse")
    fit(plain, 8)
    with mirrored(2).scope():
        model = make()
        model.compile("adam", "mse", steps_per_execution=4)
    run = StepProgram._run
    num_steps = 0

    def interrupted(program, state, segment):
        nonlocal num_steps
        if segment.steps == 1:
            num_steps += 1
            if num_steps == 3:
                raise KeyboardInterrupt
        return run(program, state, segment)

    monkeypatch.setattr(StepProgram, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit(model, 16)
    assert num_steps == 3
    assert int(model.optimizer.iterations) == 2
    assert_same(plain.get_weights(), model.get_weights())
    fit(model, 16)


class Freeze(keras.callbacks.Callback):
    """Freezes the first layer at one time of the second epoch."""

    def __init__(self, hook):
        super().__init__()
        self.epoch = 0
        setattr(self, hook, self.freeze)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def freeze(self, index, logs=None):
        if self.epoch == 1 or index == 1:
            self.model.layers[0].trainable = False


@pytest.mark.parametrize("options", [{}, {"min_size": 1}], ids=str)
@pytest.mark.parametrize(
    "hook", ["on_epoch_begin", "on_train_batch_begin", "on_train_batch_end"]
)
def test_a_layer_frozen_by_a_callback_is_refused(hook, options):
    strategy = mirrored(2)
    if options:
        strategy = ks.MirroredStrategy(
            strategy.mesh.devices,
            variable_partitioner=ks.experimental.FullySharded(**options),
        )

    def build():
        # Layers of one shape: the values of one could be written to the next.
        return keras.Sequential(
            [keras.Input((3,)), *(dense(3, seed=i) for i in range(3)), dense(1)]
        )

    model = compiled(strategy, build)
    model.optimizer.learning_rate = 0.0
    weights = model.get_weights()
    with pytest.raises(ValueError, match="`trainable` must not") as caught:
        model.fit(
            X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[Freeze(hook)]
        )
    assert_text(caught, model.layers[0].kernel.path, "compile the model again")
    model.layers[0].trainable = True
    assert_same(weights, model.get_weights(), tolerance=0)
    model.layers[0].trainable = False
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    assert_usable(model)
    assert_same(weights[:2], model.get_weights()[:2], tolerance=0)

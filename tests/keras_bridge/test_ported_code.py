"""Code that was written for TensorFlow: errors that name its replacement."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import keras_strategies as ks
from tests.support.mistakes import X, Y, assert_text, assert_usable, compiled
from tests.support.plain_keras import dense, mirrored


def start():
    """A strategy, a model of it with an optimizer, and a batch."""
    strategy = mirrored(2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), dense(1)])
        model.optimizer = keras.optimizers.SGD(0.1)
        model.optimizer.build(model.trainable_variables)
    dataset = strategy.experimental_distribute_dataset(iter([X[:8]]))
    return strategy, model, next(iter(dataset))


def tape(model, x):
    with tf.GradientTape() as tape:
        loss = ops.mean(model(x))
    return tape.gradient(loss, model.trainable_variables)


def operation(model, x):
    return tf.reduce_mean(model(x))


def minimize(model, x):
    variables = model.trainable_variables
    model.optimizer.minimize(lambda: ops.mean(model(x)), variables)


STEPS = {
    "tape": (
        tape,
        TypeError,
        ("`tf.GradientTape`", "tape.gradient(loss", "`ks.GradientTape`"),
    ),
    "operation": (operation, TypeError, ("tf.reduce_mean", "`keras.ops`")),
    "minimize": (minimize, AttributeError, ("SGD", "`optimizer.apply(")),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_of_tensorflow_are_refused_in_run(name):
    (step, error, parts), (strategy, model, batch) = STEPS[name], start()
    with pytest.raises(error, match="`run`|minimize") as caught:
        strategy.run(lambda x: step(model, x), args=(batch,))
    assert_text(caught, *parts, "docs/migration.md")
    losses = strategy.run(lambda x: ops.mean(model(x)), args=(batch,))
    assert len(losses.values) == 2


def test_other_errors_in_run_stay_as_they_are():
    strategy, model, batch = start()
    with pytest.raises(TypeError, match="cannot read the values") as caught:
        strategy.run(lambda x: float(ops.mean(model(x))), args=(batch,))
    assert "TensorFlow" not in str(caught.value)
    with pytest.raises(AttributeError, match="no attribute 'minimise'"):
        strategy.run(lambda x: model.optimizer.minimise(x), args=(batch,))


def test_run_in_a_tf_function_is_refused():
    strategy, model, batch = start()

    @tf.function
    def train():
        return strategy.run(lambda x: ops.mean(model(x)), args=(batch,))

    with pytest.raises(RuntimeError, match=r"`run`.*`tf.function`") as caught:
        train()
    assert_text(caught, "ks.function")
    with pytest.raises(ValueError, match="A PerReplica must") as caught:
        tf.function(lambda batch: batch)(batch)
    assert_text(caught, "@ks.function")


def square(target, output):
    return tf.reduce_mean(tf.square(target - output))


@pytest.mark.parametrize(
    "arguments",
    [{"loss": square}, {"loss": "mse", "metrics": [square]}],
    ids=["loss", "metric"],
)
def test_compiled_functions_of_tensorflow_are_refused(arguments):
    model = compiled(mirrored(2))
    model.compile("sgd", **arguments)
    with pytest.raises(TypeError, match="TensorFlow's operations") as caught:
        model.fit(X, Y, verbose=0)
    assert_text(caught, "tf.square(target", "`keras.ops`")
    model.compile("sgd", "mse", metrics=[])
    assert_usable(model)


class TapedModel(keras.Sequential):
    """A model whose train step computes gradients with TensorFlow."""

    def train_step(self, data):
        return {"loss": tape(self, data[0])}


def test_a_train_step_of_tensorflow_is_named():
    model = compiled(mirrored(2), lambda: TapedModel([dense(1)]))
    with pytest.raises(TypeError, match="that `train_step` runs") as caught:
        model.fit(X, Y, verbose=0)
    assert_text(caught, "tape.gradient(loss", "`ks.GradientTape`")


class OtherModel(keras.Model):
    """A model whose steps are written for no Keras."""

    def __init__(self):
        super().__init__()
        self.layer = dense(1)

    def call(self, inputs):
        return self.layer(inputs)

    def train_step(self, data, more, rest):
        raise NotImplementedError

    test_step = predict_step = train_step


@pytest.mark.parametrize("loop", ["fit", "evaluate", "predict"])
def test_steps_of_other_forms_are_refused(loop):
    model = compiled(mirrored(2), OtherModel)
    data = (X,) if loop == "predict" else (X, Y)
    with pytest.raises(TypeError, match="_step` must accept") as caught:
        getattr(model, loop)(*data, verbose=0)
    assert_text(caught, "OtherModel.", "(data, more, rest)")
    assert_text(caught, "docs/migration.md")


def test_a_scope_of_tensorflow_is_warned_of():
    theirs = tf.distribute.OneDeviceStrategy("/cpu:0")
    with (
        theirs.scope(),
        pytest.warns(UserWarning, match="scope of `tf.distribute`") as caught,
    ):
        model = compiled(mirrored(2))
    assert "OneDeviceStrategy" in str(caught[0].message)
    with theirs.scope(), pytest.warns(UserWarning, match="no effect"):
        model.fit(X, Y, verbose=0)
    assert np.isfinite(model.get_weights()[0]).all()


def test_old_names_of_strategies_are_suggested():
    for name in ("CollectiveAllReduceStrategy", "MirroredStrategyV1"):
        with pytest.raises(AttributeError, match="TensorFlow name") as caught:
            getattr(ks, name)
        assert "docs/migration.md" in str(caught.value)

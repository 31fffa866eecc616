"""Mistakes: one clear error each, before any step, and a usable model.

A text says what failed and the rule, what was received, and the fix.
"""

import gc

import jax
import keras
import numpy as np
import pytest

import keras_strategies as ks
from keras_strategies.fit.binding import find_binding
from tests.support import plain_keras
from tests.support.combinations import few
from tests.support.mistakes import (
    X,
    Y,
    assert_refused,
    assert_text,
    assert_usable,
    compiled,
    make_iter,
    not_built,
    one_input,
)


@pytest.fixture
def model():
    return compiled(plain_keras.mirrored(2))


# Strategies.


@pytest.mark.parametrize("name", ["gpu:0", "cpu:8", "nonsense"])
@pytest.mark.parametrize(
    "make",
    [lambda name: ks.MirroredStrategy([name]), ks.OneDeviceStrategy],
    ids=["mirrored", "one device"],
)
def test_an_unknown_device_lists_what_exists(make, name):
    with pytest.raises(ValueError, match="Unknown device") as caught:
        make(name)
    assert_text(caught, name, "cpu:0", "cpu:7")


@pytest.mark.parametrize("thing", [[0], [None], [1.5], [keras.Input((1,))]])
def test_a_device_of_another_kind_is_refused(thing):
    with pytest.raises(TypeError) as caught:
        ks.MirroredStrategy(thing)
    assert_text(caught, "device", "cpu:0")


@pytest.mark.parametrize("thing", [0, 3.5])
def test_devices_that_are_no_sequence_are_refused(thing):
    with pytest.raises(TypeError) as caught:
        ks.MirroredStrategy(thing)
    assert_text(caught, "device", repr(thing))


def test_a_device_given_twice_is_refused():
    for devices in (["cpu:1", "/CPU:1"], ["cpu:0", jax.devices()[0]]):
        with pytest.raises(
            ValueError, match="must not contain duplicates"
        ) as caught:
            ks.MirroredStrategy(devices)
        assert_text(caught, "cpu", "Pass each device once")


def test_no_devices_are_refused():
    with pytest.raises(ValueError, match="at least one device") as caught:
        ks.MirroredStrategy([])
    assert_text(caught, "Omit `devices`")


def test_cross_device_ops_are_refused():
    with pytest.raises(ValueError, match="cross_device_ops") as caught:
        ks.MirroredStrategy(cross_device_ops="nccl")
    assert_text(caught, "nccl", "Leave it out")


@pytest.mark.parametrize(
    "argument", ["tpu_cluster_resolver", "device_assignment"]
)
def test_tpu_arguments_of_another_type_are_refused(argument):
    with pytest.raises(TypeError, match=argument) as caught:
        ks.TPUStrategy(**{argument: 3})
    assert_text(caught, "int" if "resolver" in argument else "3")


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.attach("model"),
        lambda s: s.attach(keras.layers.Dense(1)),
        lambda s: s.attach(None),
        lambda s: s.detach("model"),
        lambda s: s.detach(None),
        lambda s: s.extended.variable_created_in_scope(3),
        lambda s: s.extended.variable_created_in_scope(np.zeros(2)),
        lambda s: ks.merge(3, "sum"),
        lambda s: ks.merge(np.zeros(3), "sum"),
        lambda s: s.describe("model"),
    ],
)
def test_an_argument_of_another_type_is_refused(call):
    with pytest.raises(TypeError) as caught:
        call(plain_keras.mirrored(2))
    assert_text(caught)


def test_an_unknown_merge_rule_lists_the_known_ones():
    with pytest.raises(ValueError, match="known rules") as caught:
        ks.merge(keras.Variable(1.0), "median")
    assert_text(caught, "median", "mean", "sum", "first")


def test_detach_takes_a_model_of_this_strategy(model):
    with pytest.raises(ValueError, match="bound to this strategy") as caught:
        plain_keras.mirrored(3).detach(model)
    assert_text(caught, model.name)
    with pytest.raises(ValueError, match="bound to this strategy"):
        plain_keras.mirrored(3).detach(one_input())
    assert_usable(model)


# Data.


def nothing():
    if False:
        yield


class Empty(keras.utils.PyDataset):
    """Has no batches."""

    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError(index)


def empty_tf_data():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y)).take(0).batch(4)


def empty_tf_data_of_unknown_length():
    import tensorflow as tf

    data = tf.data.Dataset.from_tensor_slices((X, Y))
    return data.filter(lambda x, y: False).batch(4)


NO_ROWS = {
    "arrays": lambda: (X[:0], Y[:0]),
    "a generator": lambda: (nothing(), None),
    "a PyDataset": lambda: (Empty(), None),
    "tf.data": lambda: (empty_tf_data(), None),
    "filtered tf.data": lambda: (empty_tf_data_of_unknown_length(), None),
    "an empty batch": lambda: (make_iter((X[:0], Y[:0])), None),
}


@plain_keras.no_shuffle
@pytest.mark.filterwarnings("error:Your input ran out of data:UserWarning")
@pytest.mark.parametrize(
    ("build", "kind", "loop"),
    few(
        [
            (build, kind, loop)
            for loop in ("fit", "evaluate", "predict")
            for build, kind in [
                *[(one_input, kind) for kind in NO_ROWS],
                # Others tell their length before the model is built.
                (not_built, "filtered tf.data"),
                (not_built, "an empty batch"),
                (not_built, "a generator"),
            ]
        ],
        every=2,
    ),
)
def test_no_rows_are_refused(loop, build, kind):
    model = compiled(plain_keras.mirrored(2), build)

    def act():
        x, y = NO_ROWS[kind]()
        if loop == "predict":
            model.predict(x, verbose=0)
        else:
            getattr(model, loop)(x, y, verbose=0)

    if kind == "a generator":
        # Keras's own text, at the same place.
        with pytest.raises(ValueError, match="at least one batch"):
            act()
        assert_usable(model)
    else:
        assert_refused(model, act, ValueError, "at least one row")


def test_no_rows_are_refused_on_batch_too(model):
    for act in (
        lambda: model.train_on_batch(X[:0], Y[:0]),
        lambda: model.test_on_batch(X[:0], Y[:0]),
        lambda: model.predict_on_batch(X[:0]),
    ):
        with pytest.raises(ValueError, match="at least one row") as caught:
            act()
        assert_text(caught)
    assert_usable(model)


def test_empty_validation_data_are_refused_before_the_first_step(model):
    def act():
        model.fit(X, Y, validation_data=(X[:0], Y[:0]), verbose=0)

    assert_refused(model, act, ValueError, "at least one row")


@pytest.mark.parametrize("loop", ["fit", "evaluate"])
def test_arrays_of_different_length_are_refused(model, loop):
    before = model.get_weights()
    # Keras's own text: it reads the arrays.
    with pytest.raises(ValueError, match="cardinality") as caught:
        getattr(model, loop)(X, Y[:20], verbose=0)
    assert "22" in str(caught.value)
    assert "20" in str(caught.value)
    plain_keras.assert_same(before, model.get_weights(), tolerance=0)
    assert_usable(model)


@plain_keras.no_shuffle
def test_a_batch_of_different_lengths_is_refused(model):
    for act in (
        lambda: model.fit(make_iter((X[:4], Y[:3])), verbose=0),
        lambda: model.evaluate(make_iter((X[:4], Y[:3])), verbose=0),
        lambda: model.train_on_batch(X[:4], Y[:3]),
        lambda: model.test_on_batch(X[:4], Y[:3]),
    ):
        with pytest.raises(ValueError, match="same number of rows") as caught:
            act()
        assert_text(caught, "4", "3")
    assert int(model.optimizer.iterations) == 0
    assert_usable(model)


def two_inputs():
    a, b = keras.Input((3,), name="a"), keras.Input((), name="b")
    joined = keras.layers.concatenate([a, keras.layers.Reshape((1,))(b)])
    return keras.Model({"a": a, "b": b}, plain_keras.dense(1)(joined))


@plain_keras.no_shuffle
@plain_keras.no_data_left
def test_a_leaf_without_rows_is_refused():
    model = compiled(plain_keras.mirrored(2), two_inputs)
    good = {"a": X, "b": X[:, 0]}
    bad = {"a": X, "b": np.float32(3)}

    def fit():
        model.fit(make_iter((bad, Y)), verbose=0)

    assert_refused(model, fit, ValueError, "rank 0", "'b'", "Repeat", x=good)
    for act in (
        lambda: model.train_on_batch(bad, Y),
        lambda: model.test_on_batch(bad, Y),
        lambda: model.predict_on_batch(bad),
        lambda: model.predict(make_iter((bad,)), verbose=0),
    ):
        with pytest.raises(ValueError, match="rank 0"):
            act()
    assert_usable(model, good)


@plain_keras.no_shuffle
@pytest.mark.parametrize(
    "strings",
    [
        np.array([["a"] * 3] * 22),
        np.array([["a"] * 3] * 22, object),
        np.array([[b"a"] * 3] * 22),
    ],
    ids=["str", "object", "bytes"],
)
def test_strings_are_refused(model, strings):
    def act():
        model.fit(strings, Y, verbose=0)

    assert_refused(model, act, TypeError, "numbers", "Encode")
    for act in (
        lambda: model.predict(strings, verbose=0),
        lambda: model.train_on_batch(strings, Y),
        lambda: model.fit(make_iter((strings, Y)), verbose=0),
    ):
        with pytest.raises(TypeError, match="numbers"):
            act()
    assert_usable(model)


def test_strings_of_tf_data_are_refused(model):
    import tensorflow as tf

    def act():
        strings = tf.constant([["a", "b", "c"]] * 4)
        data = tf.data.Dataset.from_tensor_slices((strings, Y[:4])).batch(2)
        model.fit(data, verbose=0, shuffle=False)

    assert_refused(model, act, TypeError, "numbers")


# Strategies that are mixed.


def test_fit_in_another_strategys_scope_is_refused(model):
    other = plain_keras.mirrored(3)

    def act():
        with other.scope():
            model.fit(X, Y, verbose=0)

    assert_refused(model, act, RuntimeError, "Mixing")
    for call in (
        lambda: model.evaluate(X, Y, verbose=0),
        lambda: model.predict(X, verbose=0),
        lambda: model.train_on_batch(X, Y),
        lambda: model.test_on_batch(X, Y),
        lambda: model.predict_on_batch(X),
    ):
        with other.scope(), pytest.raises(RuntimeError, match="Mixing"):
            call()
    assert_usable(model)


def test_compile_again_in_another_strategys_scope_is_refused(model):
    other = plain_keras.mirrored(3)
    with (
        other.scope(),
        pytest.raises(ValueError, match="another strategy") as caught,
    ):
        model.compile("sgd", "mse")
    assert_text(caught, model.name, "detach")
    # `compile` had taken effect in Keras: it is to be called again.
    model.compile(keras.optimizers.SGD(0.1), "mse")
    assert_usable(model)


def test_a_model_made_in_another_strategys_scope_is_refused():
    one, other = plain_keras.mirrored(3), plain_keras.mirrored(2)
    with one.scope():
        model = one_input()
    weights = model.get_weights()
    with (
        other.scope(),
        pytest.raises(ValueError, match="must be placed on") as caught,
    ):
        model.compile(keras.optimizers.SGD(0.1), "mse")
    assert_text(caught, "kernel", "Create the model")
    assert find_binding(model) is None
    assert not model.compiled
    assert not ks.has_strategy()
    plain_keras.assert_same(weights, model.get_weights(), tolerance=0)
    with one.scope():
        model.compile(keras.optimizers.SGD(0.1), "mse")
    assert_usable(model)


def test_an_attached_model_is_not_attached_elsewhere(model):
    with pytest.raises(ValueError, match="another strategy") as caught:
        plain_keras.mirrored(3).attach(model)
    assert_text(caught, model.name, "detach")
    assert_usable(model)


def test_a_model_of_a_keras_distribution_is_refused():
    devices = [f"cpu:{i}" for i in range(4)]
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(
        keras.distribution.DataParallel(devices=devices)
    )
    try:
        model = one_input()
    finally:
        keras.distribution.set_distribution(before)
    weights = model.get_weights()
    with pytest.raises(ValueError, match="must be placed on") as caught:
        plain_keras.mirrored(2).attach(model)
    assert_text(caught, "kernel")
    plain_keras.assert_same(weights, model.get_weights(), tolerance=0)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    assert_usable(model)


def test_variables_that_moved_after_compile_are_refused_before_a_step():
    # Loaded from elsewhere under a keras.distribution, say.
    model = compiled(plain_keras.mirrored(2))
    layout = keras.distribution.DataParallel(
        devices=[f"cpu:{i}" for i in range(4)]
    )
    before = keras.distribution.distribution()
    keras.distribution.set_distribution(layout)
    try:
        model.optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        model.optimizer.build(model.trainable_variables)
    finally:
        keras.distribution.set_distribution(before)
    weights = model.get_weights()
    with pytest.raises(ValueError, match="must be placed on") as caught:
        model.fit(X, Y, verbose=0)
    assert_text(caught, "Create the model")
    plain_keras.assert_same(weights, model.get_weights(), tolerance=0)


@pytest.mark.parametrize("loop", ["fit", "evaluate"])
def test_a_model_that_is_not_compiled_is_refused(loop):
    model = plain_keras.mirrored(2).attach(one_input())
    with pytest.raises(ValueError, match="compile"):
        getattr(model, loop)(X, Y, verbose=0)
    with pytest.raises(ValueError, match="compile"):
        model.train_on_batch(X, Y)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    assert_usable(model)


def test_unknown_arguments_are_refused_as_by_keras(model):
    with pytest.raises(TypeError, match="batchsize"):
        model.fit(X, Y, batchsize=8)
    assert_usable(model)


@pytest.mark.parametrize("fraction", [-0.5, 1.0, 1.5])
def test_a_validation_split_that_is_no_fraction_is_refused(model, fraction):
    with pytest.raises(ValueError, match="validation_split") as caught:
        model.fit(X, Y, validation_split=fraction, verbose=0)
    assert_text(caught, str(fraction), "0.2")
    assert_usable(model)


def test_both_weights_are_refused(model):
    with pytest.raises(ValueError, match="class_weight") as caught:
        model.train_on_batch(
            X, Y, sample_weight=np.ones(22), class_weight={0: 1.0}
        )
    assert_text(caught, "sample_weight")
    with pytest.raises(ValueError, match="class_weight"):
        model.fit(
            X, Y, sample_weight=np.ones(22), class_weight={0: 1.0}, verbose=0
        )
    assert_usable(model)


@plain_keras.no_shuffle
def test_what_failed_holds_no_data():
    # A failed fit must not keep the user's arrays alive.
    import weakref

    model = compiled(plain_keras.mirrored(2))
    array = np.zeros((4, 3), "float32")
    watched = weakref.ref(array)
    with pytest.raises(ValueError, match="same number"):
        model.train_on_batch(array, Y[:3])
    del array
    gc.collect()
    assert watched() is None
    assert_usable(model)

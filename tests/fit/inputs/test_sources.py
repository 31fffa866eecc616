"""Every kind of data trains as it does with plain Keras."""

import functools
import itertools

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import ops

from keras_strategies.keras_bridge.keras_names import BUILDS_FIRST
from tests.fit.inputs.sources import (
    CLASSES,
    LABELS,
    NO_LOSS,
    REGRESSION,
    ROWS,
    TWO_OUTPUTS,
    X2,
    Y2,
    Pairs,
    W,
    X,
    Y,
    batches_of,
    classifier,
    dict_in_dict_out,
    dict_inputs,
    dict_tf_data,
    fit,
    infinite,
    list_inputs,
    not_built,
    one_input,
    reusing_its_buffer,
    tf_data,
    tuple_inputs,
    without_targets,
)
from tests.support.combinations import combine, cover, some
from tests.support.models import compiled_in
from tests.support.plain_keras import (
    assert_same,
    check_same,
    dense,
    mirrored,
    no_data_left,
    no_shuffle,
    run_both,
)

ARRAYS = {
    "numpy": (one_input, REGRESSION, {"x": X, "y": Y, "batch_size": 8}),
    "not built yet": (not_built, REGRESSION, {"x": X, "y": Y}),
    "jax": (
        one_input,
        REGRESSION,
        {"x": lambda: jnp.array(X), "y": lambda: jnp.array(Y)},
    ),
    "list": (list_inputs, REGRESSION, {"x": [X, X2], "y": Y}),
    "tuple": (tuple_inputs, REGRESSION, {"x": (X, X2), "y": Y}),
    "dict": (dict_inputs, REGRESSION, {"x": {"a": X, "b": X2}, "y": Y}),
    "dict of jax and numpy": (
        dict_inputs,
        REGRESSION,
        {"x": {"a": X, "b": jnp.array(X2)}, "y": Y},
    ),
    "two outputs": (
        dict_in_dict_out,
        TWO_OUTPUTS,
        {"x": {"a": X, "b": X2}, "y": {"p": Y, "q": Y2}, "batch_size": 8},
    ),
    "a sample weight for each output": (
        dict_in_dict_out,
        TWO_OUTPUTS,
        {
            "x": {"a": X, "b": X2},
            "y": {"p": Y, "q": Y2},
            "sample_weight": {"p": W, "q": W[::-1].copy()},
            "batch_size": 8,
        },
    ),
    "one sample weight for two outputs": (
        dict_in_dict_out,
        TWO_OUTPUTS,
        {"x": {"a": X, "b": X2}, "y": {"p": Y, "q": Y2}, "sample_weight": W},
    ),
    "y is None": (without_targets, NO_LOSS, {"x": X, "batch_size": 8}),
    "sample_weight": (
        one_input,
        REGRESSION,
        {"x": X, "y": Y, "sample_weight": W, "batch_size": 8},
    ),
    "class_weight": (
        classifier,
        CLASSES,
        {
            "x": X,
            "y": LABELS,
            "class_weight": {0: 0.5, 1: 2.0},
            "batch_size": 8,
        },
    ),
    "float64": (
        one_input,
        REGRESSION,
        {"x": X.astype("float64"), "y": Y.astype("float64")},
    ),
    "shuffle=False": (
        one_input,
        REGRESSION,
        {"x": X, "y": Y, "shuffle": False, "batch_size": 8},
    ),
    "shuffle=batch": (
        one_input,
        REGRESSION,
        {"x": X, "y": Y, "shuffle": "batch", "batch_size": 8},
    ),
    "initial_epoch": (
        one_input,
        REGRESSION,
        {"x": X, "y": Y, "initial_epoch": 2, "epochs": 4, "batch_size": 8},
    ),
    "steps_per_epoch divides the data": (
        one_input,
        REGRESSION,
        {"x": X, "y": Y, "steps_per_epoch": 2, "epochs": 2},
    ),
}


# The others differ from one of these by little.
ARRAYS_BY_DEFAULT = {
    *("numpy", "dict", "dict of jax and numpy", "two outputs", "y is None"),
    *("a sample weight for each output", "class_weight", "not built yet"),
    *("float64", "shuffle=batch", "initial_epoch"),
}


@pytest.mark.parametrize("name", some(ARRAYS, ARRAYS_BY_DEFAULT))
def test_fit_on_arrays_equals_plain_keras(name):
    build, compile_args, data = ARRAYS[name]
    replicas = 3 if name in ("numpy", "two outputs") else 2
    check_same(
        build,
        fit(**data),
        replicas=replicas,
        is_fresh=name in ("numpy", "not built yet"),
        **compile_args,
    )


PY_DATASETS = {
    "workers=1": lambda: Pairs(X, Y),
    "workers=2": lambda: Pairs(X, Y, workers=2),
    "sample weights": lambda: Pairs(X, Y, W),
}


@pytest.mark.parametrize("name", PY_DATASETS)
def test_fit_on_a_py_dataset_equals_plain_keras(name):
    seen = []

    def act(model):
        dataset = PY_DATASETS[name]()
        seen.append(dataset)
        return model.fit(dataset, epochs=3, verbose=0).history

    check_same(one_input, act, **REGRESSION)
    plain, ours = seen
    assert (ours.begun, ours.ended) == (plain.begun, plain.ended)
    assert ours.ended >= 3


def test_a_py_dataset_of_an_unbuilt_model_is_told_the_same():
    seen = []

    def act(model):
        dataset = Pairs(X, Y)
        seen.append(dataset)
        return model.fit(dataset, epochs=2, verbose=0).history

    check_same(not_built, act, is_fresh=True, **REGRESSION)
    plain, ours = seen
    # Keras 3.16 reads a batch to build on without beginning an epoch.
    assert ours.begun == plain.begun + BUILDS_FIRST
    assert ours.ended == plain.ended


def test_class_weight_applies_to_a_py_dataset():
    act = fit(x=lambda: Pairs(X, LABELS), class_weight={0: 0.5, 1: 2.0})
    check_same(classifier, act, **CLASSES)


def test_evaluate_and_predict_on_a_py_dataset_equal_plain_keras():
    def act(model):
        return model.evaluate(Pairs(X, Y), verbose=0), model.predict(
            Pairs(X, Y, workers=2), verbose=0
        )

    check_same(one_input, act, **REGRESSION)


def in_turn():
    """Types that are one on the devices."""
    dtypes = itertools.cycle(["float32", "float64"])
    for (x, y), dtype in zip(infinite(X, Y), dtypes, strict=False):
        yield x.astype(dtype), y


GENERATORS = {
    "pairs": (one_input, REGRESSION, lambda: infinite(X, Y)),
    "weighted": (one_input, REGRESSION, lambda: infinite(X, Y, W)),
    "only x": (without_targets, NO_LOSS, lambda: infinite(X)),
    "reusing its buffer": (one_input, REGRESSION, reusing_its_buffer),
    "float32 and float64 in turn": (one_input, REGRESSION, in_turn),
}


@no_shuffle
@pytest.mark.parametrize("name", GENERATORS)
def test_fit_on_a_generator_equals_plain_keras(name):
    build, compile_args, make = GENERATORS[name]
    check_same(build, fit(x=make, steps_per_epoch=3), **compile_args)


@no_shuffle
def test_a_generators_arrays_are_read_before_it_goes_on():
    def fitted(is_shared):
        model = compiled_in(
            mirrored(2), one_input, "adam", "mse", steps_per_execution=3
        )
        make = functools.partial(reusing_its_buffer, is_shared=is_shared)
        return fit(x=make, steps_per_epoch=3)(model), model.get_weights()

    assert_same(fitted(False), fitted(True), tolerance=0)


@no_shuffle
@no_data_left
def test_a_generator_that_ends_is_one_epoch():
    check_same(
        one_input, fit(x=lambda: batches_of(X, Y), epochs=1), **REGRESSION
    )


@no_shuffle
@no_data_left
def test_a_generator_that_ends_early_stops_as_plain_keras_does():
    act = fit(x=lambda: batches_of(X, Y), epochs=2, steps_per_epoch=2)
    check_same(one_input, act, **REGRESSION)


@no_shuffle
@no_data_left
def test_evaluate_and_predict_on_a_generator_equal_plain_keras():
    def act(model):
        return (
            model.evaluate(batches_of(X, Y, W), verbose=0),
            model.evaluate(infinite(X, Y), steps=2, verbose=0),
            model.predict(batches_of(X), verbose=0),
            model.predict(infinite(X, Y), steps=2, verbose=0),
        )

    check_same(one_input, act, **REGRESSION)


def distributed(model, batches):
    """Batches for a model: of its strategy, if it has one."""
    strategy = getattr(model, "distribute_strategy", None)
    if strategy is None:
        return batches
    return strategy.experimental_distribute_dataset(batches)


@no_shuffle
@no_data_left
@pytest.mark.parametrize(
    ("replicas", "is_built", "steps"),
    cover((1, 2, 3, 8), (True, False), (1, 2)),
)
def test_no_batch_of_a_distributed_generator_is_lost(replicas, is_built, steps):
    def build():
        model = one_input()
        if not is_built:
            layers = [
                layer.__class__.from_config(layer.get_config())
                for layer in model.layers
            ]
            model = keras.Sequential(layers)
        return model

    def act(model):
        given = distributed(model, batches_of(X, Y))
        history = model.fit(given, verbose=0).history
        counted = int(model.optimizer.iterations)
        evaluated = model.evaluate(
            distributed(model, batches_of(X, Y)), verbose=0
        )
        outputs = model.predict(distributed(model, batches_of(X)), verbose=0)
        return history, counted, evaluated, outputs

    changes = {"steps_per_execution": steps, "is_fresh": True}
    check_same(build, act, replicas=replicas, **REGRESSION, **changes)


def shuffled(seed=None):
    import tensorflow as tf

    tf.random.set_seed(7)
    return tf_data(X, Y).shuffle(30, seed=seed).batch(8)


TF_DATA = {
    "uneven tail": (lambda: tf_data(X, Y).batch(8), {}),
    "even": (lambda: tf_data(X[:16], Y[:16]).batch(8), {}),
    "weighted": (lambda: tf_data(X, Y, W).batch(8), {}),
    "infinite": (
        lambda: tf_data(X, Y).batch(8).repeat(),
        {"steps_per_epoch": 2, "epochs": 3},
    ),
    "of unknown length": (
        lambda: tf_data(X, Y).filter(lambda x, y: True).batch(8),
        {},
    ),
    "shuffled": (lambda: shuffled(seed=3), {}),
    "shuffled by the global seed": (
        lambda: shuffled().repeat(),
        {"steps_per_epoch": 2, "epochs": 3},
    ),
}


@no_shuffle
@no_data_left
@pytest.mark.parametrize("name", TF_DATA)
def test_fit_on_tf_data_equals_plain_keras(name):
    make, arguments = TF_DATA[name]
    check_same(one_input, fit(x=make, **arguments), **REGRESSION)


@no_shuffle
@pytest.mark.parametrize("begins_with", ["fit", "evaluate"])
@pytest.mark.parametrize("build", [one_input, not_built])
def test_shuffled_tf_data_has_kerass_order_in_each_loop(build, begins_with):
    # Keras builds the model with an iterator, which draws an order.
    def act(model):
        data, found = shuffled(), []
        if begins_with == "evaluate":
            found.append(model.evaluate(data, verbose=0, return_dict=True))
        for epochs in (2, 1):
            found.append(model.fit(data, epochs=epochs, verbose=0).history)
        return found, model.predict(X, verbose=0)

    check_same(build, act, **REGRESSION)


@no_shuffle
def test_dict_elements_of_tf_data_equal_plain_keras():
    def act(model):
        history = model.fit(dict_tf_data(), epochs=2, verbose=0).history
        return (
            history,
            model.evaluate(dict_tf_data(), verbose=0, return_dict=True),
            model.predict(dict_tf_data(), verbose=0),
        )

    check_same(dict_in_dict_out, act, **TWO_OUTPUTS)


@no_shuffle
def test_class_weight_applies_to_tf_data():
    # Keras asks for all classes here.
    act = fit(
        x=lambda: tf_data(X, LABELS).batch(8),
        class_weight={0: 0.5, 1: 2.0, 2: 1.0},
    )
    check_same(classifier, act, **CLASSES)


VALIDATION = {
    "split": {"validation_split": 0.3, "batch_size": 8},
    "split with weights": {"validation_split": 0.3, "sample_weight": W},
    "x and y": {"validation_data": (X[:7], Y[:7]), "batch_size": 5},
    "x, y and weights": {"validation_data": (X[:7], Y[:7], W[:7])},
    "a PyDataset": {"validation_data": lambda: Pairs(X, Y, batch=5)},
    "a generator": {
        "validation_data": lambda: infinite(X, Y, batch=5),
        "validation_steps": 2,
    },
    "tf.data": {"validation_data": lambda: tf_data(X, Y).batch(5)},
    "infinite tf.data": {
        "validation_data": lambda: tf_data(X, Y).batch(5).repeat(),
        "validation_steps": 3,
    },
    "validation_steps of arrays": {
        "validation_data": (X, Y),
        "validation_steps": 2,
        "validation_batch_size": 4,
    },
    "validation_freq": {"validation_data": (X, Y), "validation_freq": 2},
    "validation_freq, a list": {
        "validation_data": (X, Y),
        "validation_freq": [1, 3],
        "epochs": 3,
    },
    "validation_batch_size": {
        "validation_data": (X, Y),
        "validation_batch_size": 5,
    },
}


@no_data_left
@pytest.mark.parametrize("name", combine(VALIDATION, every=2))
def test_validation_equals_plain_keras(name):
    act = fit(x=X, y=Y, **VALIDATION[name])
    check_same(one_input, act, **REGRESSION)


def test_validation_of_two_outputs_from_a_split():
    act = fit(x={"a": X, "b": X2}, y={"p": Y, "q": Y2}, validation_split=0.25)
    check_same(dict_in_dict_out, act, **TWO_OUTPUTS)


class Order(keras.layers.Layer):
    """Remembers, in order, the sums of the batches it has seen."""

    def build(self, shape):
        self.seen = self.add_weight(
            shape=(12,), initializer="zeros", trainable=False
        )

    def call(self, inputs):
        total = ops.sum(inputs)
        self.seen.assign(ops.concatenate([self.seen[1:], total[None]]))
        return inputs


@pytest.mark.parametrize(
    ("shuffle", "is_built"),
    combine([True, "batch", False], [True, False], every=2),
)
def test_the_order_of_the_rows_is_plain_keras_own(is_built, shuffle):
    # One replica: the layer's state then sees the whole batch. The weights
    # are exact sums of integers, so any other order shows.
    def build():
        layers = [Order(), dense(1)]
        return keras.Sequential([keras.Input((1,)), *layers][1 - is_built :])

    rows = np.arange(ROWS, dtype="float32")[:, None] ** 2

    def act(model):
        model.fit(rows, Y, batch_size=3, shuffle=shuffle, verbose=0)
        return np.asarray(model.layers[0].seen)

    (plain, _), (ours, _) = run_both(build, act, replicas=1, **REGRESSION)
    np.testing.assert_array_equal(ours, plain)


def test_global_random_numbers_are_drawn_as_often_as_in_plain_keras():
    def act(model):
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
        return np.random.random()

    for build in (one_input, not_built):
        check_same(build, act, is_fresh=True, **REGRESSION)


@no_data_left
def test_steps_per_epoch_smaller_than_the_data_continues_in_it():
    # 6 batches of 4 rows: epochs of 2 steps see 0-1, 2-3, 4-5.
    act = fit(x=X, y=Y, batch_size=4, steps_per_epoch=2, epochs=4)
    check_same(one_input, act, **REGRESSION)


@no_data_left
def test_steps_per_epoch_that_does_not_divide_the_data():
    act = fit(x=X, y=Y, batch_size=4, steps_per_epoch=4, epochs=3)
    check_same(one_input, act, **REGRESSION)


@pytest.mark.parametrize("name", ["torch", "grain"])
def test_class_weights_of_datasets_are_those_of_arrays(name):
    """Plain Keras refuses them there."""
    random = np.random.default_rng(0)
    x = random.normal(size=(10, 3)).astype("float32")
    y = random.integers(0, 2, (10,)).astype("int32")
    if name == "torch":
        import torch

        rows = torch.utils.data.TensorDataset(*map(torch.from_numpy, (x, y)))
        data = torch.utils.data.DataLoader(rows, batch_size=4)
    else:
        import grain

        data = grain.MapDataset.source(list(zip(x, y, strict=True))).batch(4)
    weights = []
    for given in ({"x": data}, {"x": x, "y": y, "batch_size": 4}):
        model = compiled_in(
            mirrored(2),
            lambda: keras.Sequential([keras.Input((3,)), dense()]),
            keras.optimizers.SGD(0.1),
            "mse",
        )
        model.fit(
            **given, class_weight={0: 1.0, 1: 5.0}, shuffle=False, verbose=0
        )
        weights.append(np.asarray(model.get_weights()[0]))
    np.testing.assert_allclose(weights[0], weights[1], rtol=1e-5)


def test_a_dataset_without_batches_is_told_to_make_them():
    import tensorflow as tf

    rows = (np.ones((6, 5), "float32"), np.ones((6, 1), "float32"))
    model = compiled_in(
        mirrored(2),
        lambda: keras.Sequential([keras.Input((5,)), dense()]),
        "sgd",
        "mse",
    )
    with pytest.raises(ValueError, match=r"\.batch\(global_batch_size\)"):
        model.fit(
            tf.data.Dataset.from_tensor_slices(rows), shuffle=False, verbose=0
        )

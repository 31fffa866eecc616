"""Every kind of data gives plain Keras's numbers."""

import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from keras import ops

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.keras_bridge.adapter import make_feed
from tests.plain_keras import (
    check_same,
    dense,
    mirrored,
    run_both,
)

ROWS = 22
_random = np.random.default_rng(0)
X = _random.normal(size=(ROWS, 3)).astype("float32")
X2 = _random.normal(size=(ROWS, 2)).astype("float32")
Y = _random.normal(size=(ROWS, 1)).astype("float32")
Y2 = _random.normal(size=(ROWS, 2)).astype("float32")
W = _random.uniform(0.1, 2, size=ROWS).astype("float32")
LABELS = _random.integers(0, 3, size=ROWS)

REGRESSION = {
    "optimizer": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "loss": "mse",
    "metrics": lambda: ["mae"],
    "weighted_metrics": lambda: ["mse"],
}
CLASSES = REGRESSION | {
    "loss": "sparse_categorical_crossentropy",
    "metrics": lambda: ["accuracy"],
    "weighted_metrics": lambda: ["accuracy"],
}
NO_LOSS = {"optimizer": REGRESSION["optimizer"]}
TWO_OUTPUTS = {
    "optimizer": REGRESSION["optimizer"],
    "loss": {"p": "mse", "q": "mae"},
    "metrics": lambda: {"p": ["mae"], "q": ["mse"]},
}

no_data_left = pytest.mark.filterwarnings(
    "ignore:Your input ran out of data:UserWarning"
)
no_shuffle = pytest.mark.filterwarnings(
    "ignore:.shuffle=True. was passed:UserWarning"
)


def one_input():
    return keras.Sequential(
        [keras.Input((3,)), dense(4, activation="tanh"), dense(1, seed=2)]
    )


def not_built():
    return keras.Sequential([dense(4, activation="tanh"), dense(1, seed=2)])


def classifier():
    return keras.Sequential(
        [keras.Input((3,)), dense(3, activation="softmax")]
    )


def _two_inputs(wrap):
    a = keras.Input((3,), name="a")
    b = keras.Input((2,), name="b")
    joined = keras.layers.concatenate([a, b])
    return keras.Model(wrap(a, b), dense(1)(joined))


def list_inputs():
    return _two_inputs(lambda a, b: [a, b])


def tuple_inputs():
    return _two_inputs(lambda a, b: (a, b))


def dict_inputs():
    return _two_inputs(lambda a, b: {"a": a, "b": b})


def dict_in_dict_out():
    a = keras.Input((3,), name="a")
    b = keras.Input((2,), name="b")
    joined = keras.layers.concatenate([a, b])
    outputs = {
        "p": dense(1, name="p")(joined),
        "q": dense(2, seed=2, name="q")(joined),
    }
    return keras.Model({"a": a, "b": b}, outputs)


@keras.saving.register_keras_serializable("tests")
class OwnLoss(keras.layers.Layer):
    """Adds the mean square of its input as a loss."""

    def call(self, inputs):
        self.add_loss(ops.mean(ops.square(inputs - 1)))
        return inputs


def without_targets():
    return keras.Sequential([keras.Input((3,)), dense(2), OwnLoss()])


class Pairs(keras.utils.PyDataset):
    """Batches of rows of arrays; counts the calls Keras makes."""

    def __init__(self, *arrays, batch=8, **kwargs):
        super().__init__(**kwargs)
        self.arrays = arrays
        self.batch = batch
        self.begun = 0
        self.ended = 0

    def __len__(self):
        return -(-len(self.arrays[0]) // self.batch)

    def __getitem__(self, index):
        rows = slice(index * self.batch, (index + 1) * self.batch)
        return tuple(a[rows] for a in self.arrays)

    def on_epoch_begin(self):
        self.begun += 1

    def on_epoch_end(self):
        self.ended += 1


def batches_of(*arrays, batch=8):
    for start in range(0, len(arrays[0]), batch):
        yield tuple(a[start : start + batch] for a in arrays)


def endless(*arrays, batch=8):
    while True:
        yield from batches_of(*arrays, batch=batch)


def reusing_its_buffer():
    x, y = np.empty((8, 3), "float32"), np.empty((8, 1), "float32")
    while True:
        for start in (0, 8, 14):
            x[:] = X[start : start + 8]
            y[:] = Y[start : start + 8]
            yield x, y


def tf_data(*arrays):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(arrays)


def dict_tf_data():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(
        ({"a": X, "b": X2}, {"p": Y, "q": Y2})
    ).batch(8)


def fit(**factories):
    """Fits on fresh data and returns the history, by name."""

    def act(model):
        arguments = {
            key: value() if callable(value) else value
            for key, value in factories.items()
        }
        arguments.setdefault("epochs", 2)
        return model.fit(verbose=0, **arguments).history

    return act


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
        {
            "x": {"a": X, "b": X2},
            "y": {"p": Y, "q": Y2},
            "sample_weight": W,
        },
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


@pytest.mark.parametrize("name", ARRAYS)
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
    assert (ours.begun, ours.ended) == (plain.begun, plain.ended)


def test_class_weight_applies_to_a_py_dataset():
    act = fit(x=lambda: Pairs(X, LABELS), class_weight={0: 0.5, 1: 2.0})
    check_same(classifier, act, **CLASSES)


def test_evaluate_and_predict_on_a_py_dataset_equal_plain_keras():
    def act(model):
        return model.evaluate(Pairs(X, Y), verbose=0), model.predict(
            Pairs(X, Y, workers=2), verbose=0
        )

    check_same(one_input, act, **REGRESSION)


GENERATORS = {
    "pairs": (one_input, REGRESSION, lambda: endless(X, Y)),
    "weighted": (one_input, REGRESSION, lambda: endless(X, Y, W)),
    "only x": (without_targets, NO_LOSS, lambda: endless(X)),
    "reusing its buffer": (one_input, REGRESSION, reusing_its_buffer),
}


@no_shuffle
@pytest.mark.parametrize("name", GENERATORS)
def test_fit_on_a_generator_equals_plain_keras(name):
    build, compile_args, make = GENERATORS[name]
    check_same(build, fit(x=make, steps_per_epoch=3), **compile_args)


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
            model.evaluate(endless(X, Y), steps=2, verbose=0),
            model.predict(batches_of(X), verbose=0),
            model.predict(endless(X, Y), steps=2, verbose=0),
        )

    check_same(one_input, act, **REGRESSION)


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
}


@no_shuffle
@no_data_left
@pytest.mark.parametrize("name", TF_DATA)
def test_fit_on_tf_data_equals_plain_keras(name):
    make, arguments = TF_DATA[name]
    check_same(one_input, fit(x=make, **arguments), **REGRESSION)


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
        "validation_data": lambda: endless(X, Y, batch=5),
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
@pytest.mark.parametrize("name", VALIDATION)
def test_validation_equals_plain_keras(name):
    act = fit(x=X, y=Y, **VALIDATION[name])
    check_same(one_input, act, **REGRESSION)


def test_validation_of_two_outputs_from_a_split():
    act = fit(
        x={"a": X, "b": X2}, y={"p": Y, "q": Y2}, validation_split=0.25
    )
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


@pytest.mark.parametrize("is_built", [True, False])
@pytest.mark.parametrize("shuffle", [True, "batch", False])
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


def test_on_batch_calls_equal_plain_keras():
    def act(model):
        return [
            model.train_on_batch(X[:8], Y[:8]),
            model.train_on_batch(X[:7], Y[:7], sample_weight=W[:7]),
            model.train_on_batch(X, Y, return_dict=True),
            model.train_on_batch(jnp.array(X[:3]), jnp.array(Y[:3])),
            model.test_on_batch(X[:5], Y[:5], sample_weight=W[:5]),
            model.test_on_batch(X[:1], Y[:1], return_dict=True),
            model.predict_on_batch(X[:6]),
            model.predict_on_batch(X[:5]),
            model.predict_on_batch(X[:1]),
        ]

    check_same(one_input, act, replicas=3, **REGRESSION)


def test_on_batch_calls_take_nests_and_class_weights():
    def nests(model):
        x, y = {"a": X, "b": X2}, {"p": Y, "q": Y2}
        return [
            model.train_on_batch(x, y, return_dict=True),
            model.test_on_batch(x, y, return_dict=True),
            model.predict_on_batch(x),
        ]

    check_same(dict_in_dict_out, nests, **TWO_OUTPUTS)

    def weighted(model):
        return model.train_on_batch(
            X, LABELS, class_weight={0: 0.5, 2: 3.0}, return_dict=True
        )

    check_same(classifier, weighted, **CLASSES)


def test_on_batch_calls_build_a_model():
    def act(model):
        return model.predict_on_batch(X), model.train_on_batch(X, Y)

    check_same(not_built, act, is_fresh=True, **REGRESSION)


def test_predict_builds_a_model_that_was_never_compiled():
    strategy = mirrored(2)
    model = strategy.attach(not_built())
    np.testing.assert_allclose(
        model.predict(X, verbose=0, batch_size=5),
        not_built().predict(X, verbose=0, batch_size=5),
        rtol=1e-5,
    )


@no_data_left
def test_predict_with_steps_equals_plain_keras():
    def act(model):
        return [
            model.predict(X, batch_size=5, steps=2, verbose=0),
            model.predict(X, steps=3, verbose=0),
            model.predict(tf_data(X).batch(5), verbose=0),
            model.predict(tf_data(X).batch(5).repeat(), steps=6, verbose=0),
            model.predict(X[:1], verbose=0),
        ]

    check_same(one_input, act, replicas=3, **REGRESSION)


@pytest.mark.parametrize("replicas", [2, 3])
def test_predict_keeps_the_nest_of_the_outputs(replicas):
    def build():
        x = keras.Input((3,))
        one, two = dense(2)(x), dense(1, seed=2)(x)
        return keras.Model(x, {"a": [one, two], "b": {"c": two}})

    def act(model):
        return (
            model.predict(X, batch_size=5, verbose=0),
            model.predict_on_batch(X[:4]),
        )

    check_same(build, act, replicas=replicas)


class Repeat(keras.layers.Layer):
    """Three entries for each row."""

    def call(self, inputs):
        return ops.repeat(inputs, 3, axis=0)

    def compute_output_shape(self, shape):
        return (None, *shape[1:])


@pytest.mark.parametrize("replicas", [2, 3])
def test_predict_returns_several_entries_a_row_in_order(replicas):
    def build():
        return keras.Sequential([keras.Input((3,)), Repeat(), dense(2)])

    def act(model):
        return (
            model.predict(X, batch_size=5, verbose=0),
            model.predict_on_batch(X[:4]),
        )

    result, _ = check_same(build, act, replicas=replicas)
    assert len(result[0]) == 3 * ROWS


class Cast(keras.layers.Layer):
    """Adds all its inputs up, whatever their types."""

    def __init__(self):
        super().__init__(autocast=False)

    def call(self, inputs):
        parts = [ops.cast(inputs[key], "float32") for key in sorted(inputs)]
        return sum(parts)


MIXED = {
    "int32": np.arange(ROWS, dtype="int32")[:, None],
    "uint8": np.arange(ROWS, dtype="uint8")[:, None] * 11,
    "int64": np.arange(ROWS)[:, None] - 5,
    "float64": X[:, :1].astype("float64"),
    "float16": X[:, 1:2].astype("float16"),
    "bfloat16": X[:, :1].astype(ml_dtypes.bfloat16),
    "bool": X[:, :1] > 0,
}


@no_shuffle
def test_mixed_types_equal_plain_keras():
    def build():
        inputs = {
            # Keras warns of 64 bits, which JAX cuts to 32.
            key: keras.Input((1,), dtype=key.replace("64", "32"), name=key)
            for key in MIXED
        }
        scaled = keras.layers.Rescaling(0.01)(Cast()(inputs))
        return keras.Model(inputs, dense(1)(scaled))

    def act(model):
        return (
            model.fit(MIXED, Y, batch_size=8, verbose=0).history,
            model.predict(MIXED, batch_size=8, verbose=0),
            model.train_on_batch(MIXED, Y),
            model.fit(endless_mixed(), steps_per_epoch=3, verbose=0).history,
        )

    def endless_mixed():
        while True:
            for start in (0, 8, 16):
                rows = slice(start, start + 8)
                yield {k: v[rows] for k, v in MIXED.items()}, Y[rows]

    check_same(build, act, **REGRESSION)


@no_data_left
@no_shuffle
def test_batches_may_differ_in_rows_and_in_another_dimension():
    shapes = [(8, 3), (5, 7), (8, 4), (2, 1)]
    random = np.random.default_rng(1)
    tokens = [random.integers(0, 9, size=shape) for shape in shapes]
    targets = [random.normal(size=(s[0], 1)) for s in shapes]

    def build():
        embed = keras.layers.Embedding(
            9,
            2,
            embeddings_initializer=keras.initializers.RandomNormal(seed=3),
        )
        return keras.Sequential(
            [
                keras.Input((None,), dtype="int32"),
                embed,
                keras.layers.GlobalAveragePooling1D(),
                dense(1),
            ]
        )

    def act(model):
        return (
            model.fit(
                (pair for pair in zip(tokens, targets, strict=True)),
                verbose=0,
            ).history,
            model.evaluate(
                (pair for pair in zip(tokens, targets, strict=True)),
                verbose=0,
            ),
            model.predict(((t,) for t in tokens), verbose=0),
        )

    check_same(build, act, replicas=3, **REGRESSION)


@pytest.mark.parametrize("batch", [8, 5])
@pytest.mark.parametrize("kind", ["numpy", "jax", "generator", "tf.data"])
def test_a_batch_goes_to_the_devices_in_one_hop(kind, batch):
    mesh = ReplicaMesh(devices=tuple(jax.devices()[:4]))
    data = {
        "numpy": lambda: (X, Y),
        "jax": lambda: (jnp.array(X), jnp.array(Y)),
        "generator": lambda: (batches_of(X, Y, batch=batch), None),
        "tf.data": lambda: (tf_data(X, Y).batch(batch), None),
    }[kind]
    x, y = data()
    size = batch if y is not None else None
    feed = make_feed(mesh, x=x, y=y, batch_size=size)
    for leaf in jax.tree.leaves(next(feed.get_numpy_iterator())):
        assert type(leaf) is np.ndarray
    x, y = data()
    feed = make_feed(mesh, x=x, y=y, batch_size=size)
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        executions = list(feed.get_jax_iterator())
    for execution in executions:
        (segment,) = execution.segments
        for leaf in jax.tree.leaves(segment.data):
            assert isinstance(leaf.sharding, NamedSharding)
            assert leaf.sharding == mesh.split
            assert len(leaf.addressable_shards) == 4
            assert all(
                shard.data.shape[0] == leaf.shape[0] // 4
                for shard in leaf.addressable_shards
            )
    total = [s.rows for e in executions for s in e.segments]
    assert sum(total) == ROWS


def test_arrays_that_lie_on_another_mesh_are_accepted():
    elsewhere = ReplicaMesh(devices=tuple(jax.devices()[4:8]))
    x = jax.device_put(X[:16], elsewhere.split)
    y = jax.device_put(Y[:16], elsewhere.whole)

    def act(model):
        return (
            model.fit(x, y, batch_size=8, verbose=0).history,
            model.train_on_batch(x, y),
            model.predict(x, verbose=0),
        )

    check_same(one_input, act, **REGRESSION)

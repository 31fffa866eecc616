"""Single batches, predictions and types are those of plain Keras."""

import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from keras import ops

from keras_strategies.fit.inputs.feed import make_feed
from keras_strategies.spmd.mesh import ReplicaMesh
from tests.fit.inputs.sources import (
    CLASSES,
    LABELS,
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
    not_built,
    one_input,
    tf_data,
)
from tests.support.combinations import combine
from tests.support.plain_keras import (
    assert_same,
    check_same,
    dense,
    mirrored,
    no_data_left,
    no_shuffle,
)


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


def predicted(model):
    whole = model.predict(X, batch_size=5, verbose=0)
    return whole, model.predict_on_batch(X[:4])


@pytest.mark.parametrize("replicas", combine([2, 3], every=2))
def test_predict_keeps_the_nest_of_the_outputs(replicas):
    def build():
        x = keras.Input((3,))
        one, two = dense(2)(x), dense(1, seed=2)(x)
        return keras.Model(x, {"a": [one, two], "b": {"c": two}})

    check_same(build, predicted, replicas=replicas)


class Repeat(keras.layers.Layer):
    """Three entries for each row."""

    def call(self, inputs):
        return ops.repeat(inputs, 3, axis=0)

    def compute_output_shape(self, shape):
        return (None, *shape[1:])


@pytest.mark.parametrize("replicas", combine([2, 3], every=2))
def test_predict_returns_several_entries_a_row_in_order(replicas):
    def build():
        return keras.Sequential([keras.Input((3,)), Repeat(), dense(2)])

    result, _ = check_same(build, predicted, replicas=replicas)
    assert len(result[0]) == 3 * ROWS


class Cast(keras.layers.Layer):
    """Adds all its inputs up, whatever their types."""

    def __init__(self):
        super().__init__(autocast=False)

    def call(self, inputs):
        parts = [ops.cast(inputs[key], "float32") for key in sorted(inputs)]
        return sum(parts)


class Mirror(keras.layers.Layer):
    """Two entries for each row, all first ones before all second ones."""

    def call(self, inputs):
        return ops.concatenate([inputs, -inputs], axis=0)

    def compute_output_shape(self, shape):
        return (None, *shape[1:])


class Moments(keras.layers.Layer):
    """Three entries for each batch."""

    def call(self, inputs):
        highest = ops.max(inputs)
        return ops.stack([ops.mean(inputs), ops.var(inputs), highest])

    def compute_output_shape(self, shape):
        return (3,)


@pytest.mark.parametrize(
    ("layer", "steps"), combine([Mirror, Moments], [1, 2], every=2)
)
def test_predict_returns_entries_that_are_no_rows_as_plain_keras(layer, steps):
    def build():
        return keras.Sequential([keras.Input((3,)), dense(2), layer()])

    def act(model):
        model.steps_per_execution = steps
        return model.predict(X, batch_size=5, verbose=0)

    check_same(build, act, replicas=3)


@pytest.mark.parametrize("workers", combine([1, 2], every=2))
def test_predict_tells_a_py_dataset_of_its_epochs(workers):
    def predict(model):
        dataset = Pairs(X, Y, workers=workers)
        result = model.predict(dataset, verbose=0)
        return result, dataset.begun, dataset.ended

    for build in (not_built, one_input):
        plain = build()
        outputs, *told = predict(mirrored(2).attach(build()))
        assert told == list(predict(plain)[1:])
        # With workers, what Keras read to build the model may come again.
        assert_same(plain.predict(X, verbose=0), outputs)


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
            model.fit(infinite_mixed(), steps_per_epoch=3, verbose=0).history,
        )

    def infinite_mixed():
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
            9, 2, embeddings_initializer=keras.initializers.RandomNormal(seed=3)
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

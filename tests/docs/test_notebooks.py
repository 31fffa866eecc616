"""The calls of tf's notebooks on distribution, in their order.

docs/migration.md has a table of what a port of each changes. Every test does on
eight replicas, or on two processes, what it does on one device, and compares.
"""

import json
import os

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_strategies as ks
from tests.multi_process import epochs_with_manager
from tests.multi_process.test_through_launch import launch
from tests.support.plain_keras import mirrored

pytestmark = [
    pytest.mark.slow,
    # jax 0.10.2's own, when Keras 3.15 exports a model.
    pytest.mark.filterwarnings(
        "ignore:The `native_serialization:DeprecationWarning"
    ),
]

ROWS, SIZE, LABELS = 200, 48, 3
_random = np.random.default_rng(0)
CENTERS = _random.normal(size=(LABELS, 8, 8, 1)).astype("float32")
Y = _random.integers(0, LABELS, ROWS)
X = CENTERS[Y] + _random.normal(size=(ROWS, 8, 8, 1)).astype("float32")


def batches(x=X, y=Y):
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(SIZE)


def cnn():
    keras.utils.set_random_seed(3)
    regularizer = keras.regularizers.L2(1e-3)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(4, 3, kernel_regularizer=regularizer),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(LABELS, kernel_regularizer=regularizer),
        ]
    )


def compiled_cnn(strategy):
    with strategy.scope():
        model = cnn()
        model.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=keras.optimizers.SGD(0.05),
            metrics=[keras.metrics.SparseCategoricalAccuracy()],
        )
    return model


def make_train_step(model, optimizer, loss_of_rows, accuracy=None):
    """A tape's step, as docs/migration.md writes it."""

    def train_step(inputs):
        x, y = inputs

        def loss_fn():
            predicted = model(x, training=True)
            loss = ks.compute_average_loss(loss_of_rows(y, predicted))
            if model.losses:
                loss += ks.scale_regularization_loss(sum(model.losses))
            return loss, predicted

        (loss, predicted), gradients = ks.value_and_grad(
            loss_fn, model.trainable_variables, has_aux=True
        )()
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        if accuracy is not None:
            accuracy.update_state(y, predicted)
        return loss

    return train_step


def custom_training(replicas, directory):
    """Epochs of steps, iterators, and epochs as a function; checkpoints."""
    strategy = mirrored(replicas)
    keras.utils.set_random_seed(0)
    shuffled = batches().unbatch().shuffle(ROWS).batch(SIZE)
    train_data = strategy.experimental_distribute_dataset(shuffled)
    test_data = strategy.experimental_distribute_dataset(
        batches(X[:70], Y[:70])
    )
    with strategy.scope():
        loss_of_rows = keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="none"
        )
        test_loss = keras.metrics.Mean()
        accuracy, test_accuracy = (
            keras.metrics.SparseCategoricalAccuracy() for _ in range(2)
        )
        model, optimizer = cnn(), keras.optimizers.SGD(0.05, momentum=0.9)
        checkpoint = ks.checkpoint.Checkpoint(optimizer=optimizer, model=model)
    train_step = make_train_step(model, optimizer, loss_of_rows, accuracy)

    def test_step(inputs):
        x, y = inputs
        predicted = model(x, training=False)
        test_loss.update_state(loss_of_rows(y, predicted))
        test_accuracy.update_state(y, predicted)

    @ks.function
    def distributed_step(inputs):
        losses = strategy.run(train_step, args=(inputs,))
        return strategy.reduce(ks.ReduceOp.SUM, losses, axis=None)

    @ks.function
    def distributed_epoch(data):
        return sum(distributed_step(inputs) for inputs in data)

    seen = []
    metrics = (accuracy, test_loss, test_accuracy)
    for epoch in range(3):
        seen += [distributed_step(inputs) for inputs in train_data]
        for inputs in test_data:
            strategy.run(test_step, args=(inputs,))
        if epoch % 2 == 0:
            checkpoint.save(os.path.join(directory, "ckpt"))
        seen += [metric.result() for metric in metrics]
        for metric in metrics:
            metric.reset_state()
    last = float(seen[-1])

    seen.append(restored_accuracy(directory))
    assert seen[-1] == pytest.approx(last, abs=1e-6)
    iterator = iter(train_data)
    seen += [distributed_step(next(iterator)) for _ in range(2)]
    seen.append(distributed_epoch(train_data))
    return [float(value) for value in seen]


def restored_accuracy(directory):
    """Of a new model without a strategy, in a plain loop over `tf.data`."""
    model, optimizer = cnn(), keras.optimizers.SGD(momentum=0.9)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    checkpoint = ks.checkpoint.Checkpoint(optimizer=optimizer, model=model)
    checkpoint.restore(ks.checkpoint.latest_checkpoint(directory))
    for x, y in batches(X[:70], Y[:70]):
        accuracy(y, model(x, training=False))
    return accuracy.result()


def test_custom_training(tmp_path):
    several = custom_training(8, tmp_path / "8")
    one = custom_training(1, tmp_path / "1")
    np.testing.assert_allclose(several, one, rtol=1e-5, atol=1e-6)
    assert several[-3] < several[0]


def distributed_training(replicas):
    """fit on a dataset and on arrays, evaluate, then a loop of one's own."""

    def line():
        keras.utils.set_random_seed(3)
        regularizer = keras.regularizers.L2(1e-4)
        dense = keras.layers.Dense(1, kernel_regularizer=regularizer)
        return keras.Sequential([keras.Input((1,)), dense])

    strategy = mirrored(replicas)
    rows = tf.data.Dataset.from_tensors(([1.0], [1.0]))
    with strategy.scope():
        model = line()
        model.compile(loss="mse", optimizer="sgd")
    data = rows.repeat(100).batch(10)
    ones = np.ones((100, 1))
    seen = list(
        model.fit(data, epochs=2, shuffle=False, verbose=0).history["loss"]
    )
    seen.append(model.evaluate(data, verbose=0))
    fitted = model.fit(ones, ones, epochs=2, batch_size=10, verbose=0)
    seen += fitted.history["loss"]

    per_replica = 40 // strategy.num_replicas_in_sync
    size = per_replica * strategy.num_replicas_in_sync
    with strategy.scope():
        model, optimizer = line(), keras.optimizers.SGD()
    loss_of_rows = keras.losses.BinaryCrossentropy(
        from_logits=True, reduction="none"
    )
    step = make_train_step(model, optimizer, loss_of_rows)
    data = strategy.experimental_distribute_dataset(
        rows.repeat(500).batch(size)
    )
    iterator = iter(data)
    for inputs in [*data, *(next(iterator) for _ in range(10))]:
        losses = strategy.run(step, args=(inputs,))
        seen.append(strategy.reduce(ks.ReduceOp.SUM, losses, axis=None))
    return [float(value) for value in seen]


def test_distributed_training():
    several, one = distributed_training(8), distributed_training(1)
    assert len(several) == 5 + 13 + 10
    np.testing.assert_allclose(several, one, rtol=1e-5)
    default = ks.get_strategy()
    assert float(default.reduce("SUM", 1.0, axis=None)) == 1.0
    with default.scope():
        assert float(keras.Variable(1.0).value) == 1.0
    # It asks for what XLA decides.
    with pytest.raises(ValueError, match="cross_device_ops"):
        ks.MirroredStrategy(cross_device_ops=object())


def list_outputs(strategy, value):
    """The rows of all replicas, in order."""
    parts = strategy.experimental_local_results(value)
    return np.concatenate([np.asarray(part) for part in parts]).tolist()


def pairs(size):
    data = tf.data.Dataset.from_tensors(([1.0], [1.0]))
    return data.repeat(100).batch(size)


def test_input_of_datasets():
    strategy = mirrored(2)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    data = strategy.experimental_distribute_dataset(
        pairs(16).with_options(options)
    )

    @ks.function
    def step(inputs):
        features, labels = inputs
        return labels - 0.3 * features

    plain = [np.asarray(step(inputs)) for inputs in pairs(16)]
    found = [strategy.run(step, args=(inputs,)) for inputs in data]
    assert len(found) == 7
    for ours, theirs in zip(found, plain, strict=True):
        np.testing.assert_allclose(list_outputs(strategy, ours), theirs)
    iterator = iter(data)
    for _ in range(5):
        doubled = strategy.run(
            lambda inputs: 2 * inputs, args=(next(iterator),)
        )
        assert len(doubled) == 4

    dataset = tf.data.Dataset.range(24).enumerate().batch(6)
    result = {}
    for index, inputs in strategy.experimental_distribute_dataset(dataset):
        keys, values = strategy.run(
            lambda index, inputs: (index, 2 * inputs), args=(index, inputs)
        )
        rows = zip(
            list_outputs(strategy, keys),
            list_outputs(strategy, values),
            strict=True,
        )
        result.update(rows)
    assert result == {i: 2 * i for i in range(24)}


def test_input_that_ends_or_never_does():
    strategy = mirrored(2)
    ended = iter(
        strategy.experimental_distribute_dataset(
            tf.data.Dataset.range(9).batch(4)
        )
    )
    found = []
    for _ in range(5):
        batch = ended.get_next_as_optional()
        if not batch.has_value():
            break
        same = strategy.run(lambda x: x, args=(batch.get_value(),))
        found.append(list_outputs(strategy, same))
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]

    drawn = np.random.default_rng(1).random((4, 4), "float32")
    infinite = tf.data.Dataset.from_generator(
        lambda: (drawn[i % 4] for i in range(10**9)),
        output_types=tf.float32,
        output_shapes=tf.TensorShape([4]),
    )
    iterator = iter(strategy.experimental_distribute_dataset(infinite))
    for row in drawn:
        same = strategy.run(lambda x: x, args=(next(iterator),))
        np.testing.assert_array_equal(list_outputs(strategy, same), row)


def test_input_of_functions():
    strategy = mirrored(2)
    with strategy.scope():
        layer = keras.layers.StringLookup(vocabulary=["a", "b", "c", "d", "f"])

    def dataset_fn(context):
        size = context.get_per_replica_batch_size(4)
        data = tf.data.Dataset.from_tensor_slices(["a", "c", "e"]).repeat()
        data = data.batch(size).shard(
            context.num_input_pipelines, context.input_pipeline_id
        )
        return data.map(layer).prefetch(2)

    iterator = iter(strategy.distribute_datasets_from_function(dataset_fn))
    found = [list_outputs(strategy, next(iterator)) for _ in range(3)]
    assert found == [[1, 3, 0, 1], [3, 0, 1, 3], [0, 1, 3, 0]]

    values = strategy.experimental_distribute_values_from_function(
        lambda context: tf.constant([context.replica_id_in_sync_group])
    )
    same = strategy.run(lambda x: x, args=(values,))
    assert list_outputs(strategy, same) == [0, 1]


def save_and_load(replicas, directory):
    """Saved and loaded by Keras and as a SavedModel; trained in between."""
    strategy, seen = mirrored(replicas), []

    def trained(model):
        seen.extend(
            model.fit(batches(), epochs=2, shuffle=False, verbose=0).history[
                "loss"
            ]
        )

    model = compiled_cnn(strategy)
    trained(model)
    path = os.path.join(directory, "model.keras")
    model.save(path)
    trained(keras.models.load_model(path))
    another = ks.OneDeviceStrategy("/cpu:0")
    with another.scope():
        trained(keras.models.load_model(path))

    model = compiled_cnn(strategy)
    exported = os.path.join(directory, "exported")
    model.export(exported, verbose=False)
    # TensorFlow runs it, without a strategy and without Keras.
    serve = tf.saved_model.load(exported).signatures["serving_default"]
    (answer,) = serve(tf.constant(X[:SIZE])).values()
    model.save(path)
    another = mirrored(replicas)
    with another.scope():
        loaded = keras.models.load_model(path)
    data = batches().map(lambda x, y: x).take(1)
    for x in another.experimental_distribute_dataset(data):
        found = list_outputs(another, another.run(loaded, args=(x,)))
    np.testing.assert_allclose(found, answer, rtol=1e-5, atol=1e-5)
    with another.scope():
        inputs = keras.Input((8, 8, 1))
        wrapped = keras.Model(inputs, keras.models.load_model(path)(inputs))
        wrapped.compile(
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            optimizer=keras.optimizers.SGD(0.05),
        )
    trained(wrapped)
    return seen


def test_save_and_load(tmp_path):
    several = save_and_load(8, tmp_path)
    one = save_and_load(1, tmp_path)
    np.testing.assert_allclose(several, one, rtol=1e-5)
    assert len(several) == 8
    # The same run went on three times, and one began anew.
    np.testing.assert_allclose(several[2:4], several[4:6], rtol=1e-5)
    np.testing.assert_allclose(several[6:], several[:2], rtol=1e-5)


def test_a_model_of_ones_own_is_called_before_it_is_exported(tmp_path):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(5)

        def call(self, inputs):
            return self.dense(inputs)

    model = Own()
    with pytest.raises(ValueError, match="extension"):
        model.save(tmp_path / "saved")
    with pytest.raises(ValueError, match="built"):
        model.export(tmp_path / "saved", verbose=False)
    x = np.arange(20, dtype="float32").reshape(4, 5)
    expected = np.asarray(model(x))
    model.export(tmp_path / "saved", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "saved")
    (answer,) = loaded.signatures["serving_default"](tf.constant(x)).values()
    np.testing.assert_allclose(answer, expected, rtol=1e-5)


def controlled(directory, processes, devices, *, killed_in=None):
    """How a job of `epochs_with_manager` ended, and its lines."""
    told = json.dumps({"directory": str(directory), "killed_in": killed_in})
    ended = launch(processes, devices, "epochs_with_manager", told)
    lines = [line for line in ended.stdout.splitlines() if line[:1] == "{"]
    return ended, [json.loads(line) for line in lines]


def test_multi_worker_with_a_loop_of_ones_own(tmp_path):
    last = epochs_with_manager.EPOCHS - 1
    whole, one = controlled(tmp_path / "one", 1, 1)
    assert whole.returncode == 0, whole.stderr
    assert [line["epoch"] for line in one] == list(range(last + 1))
    killed, before = controlled(tmp_path / "two", 2, 2, killed_in=last)
    assert "was killed by SIGKILL" in killed.stderr
    ended, after = controlled(tmp_path / "two", 2, 2)
    assert ended.returncode == 0, ended.stderr
    assert [line["epoch"] for line in after] == [last]
    for ours, theirs in zip(before + after, one, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    names = [name for name in os.listdir(tmp_path / "two") if name[0] != "."]
    assert names == [str(last + 1)]

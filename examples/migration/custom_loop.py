"""A custom loop for tf.distribute: `keras-strategies migrate` ports it."""

import numpy as np
import keras_strategies as ks
import keras
import tensorflow as tf

BATCH_SIZE = 100
x = np.random.default_rng(0).normal(size=(1000, 8)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int32")

strategy = ks.MirroredStrategy(
    ["CPU:0", "CPU:1"],
)
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, "relu"),
            keras.layers.Dense(2),
        ]
    )
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    loss_of_rows = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )


def scale(x, y):
    return tf.cast(x, tf.float32), y


def train_step(inputs):
    x, y = inputs
    with ks.GradientTape() as tape:
        logits = model(x, training=True)
        penalty = 1e-4 * keras.ops.sum(keras.ops.square(logits), axis=-1)
        loss = ks.compute_average_loss(
            loss_of_rows(y, logits) + penalty, global_batch_size=BATCH_SIZE
        )
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    accuracy.update_state(y, logits)
    return loss


@ks.function
def distributed_train_step(inputs):
    losses = strategy.run(train_step, args=(inputs,))
    return strategy.reduce(ks.ReduceOp.SUM, losses, axis=None)


dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)
dataset = strategy.experimental_distribute_dataset(dataset.map(scale))
for _ in range(5):
    accuracy.reset_state()
    total = 0.0
    for inputs in dataset:
        total += keras.ops.convert_to_numpy(distributed_train_step(inputs))
print("accuracy", float(accuracy.result()))

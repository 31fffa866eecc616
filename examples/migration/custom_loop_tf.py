"""A custom loop for tf.distribute: `keras-strategies migrate` ports it."""

import numpy as np
import tensorflow as tf

BATCH_SIZE = 100
x = np.random.default_rng(0).normal(size=(1000, 8)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int32")

for gpu in tf.config.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(gpu, True)
strategy = tf.distribute.MirroredStrategy(
    ["CPU:0", "CPU:1"],
    cross_device_ops=tf.distribute.ReductionToOneDevice(),
)
with strategy.scope():
    model = tf.keras.Sequential(
        [
            tf.keras.Input((8,)),
            tf.keras.layers.Dense(16, "relu"),
            tf.keras.layers.Dense(2),
        ]
    )
    optimizer = tf.keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    accuracy = tf.keras.metrics.SparseCategoricalAccuracy()
    loss_of_rows = tf.keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )


def scale(x, y):
    return tf.cast(x, tf.float32), y


def train_step(inputs):
    x, y = inputs
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        penalty = 1e-4 * tf.reduce_sum(tf.square(logits), axis=-1)
        loss = tf.nn.compute_average_loss(
            loss_of_rows(y, logits) + penalty, global_batch_size=BATCH_SIZE
        )
    grads = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables))
    accuracy.update_state(y, logits)
    return loss


@tf.function
def distributed_train_step(inputs):
    losses = strategy.run(train_step, args=(inputs,))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)


dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)
dataset = strategy.experimental_distribute_dataset(dataset.map(scale))
for _ in range(5):
    accuracy.reset_state()
    total = 0.0
    for inputs in dataset:
        total += distributed_train_step(inputs).numpy()
print("accuracy", float(accuracy.result()))

"""What tests/docs/test_notebooks.py starts: a loop with a manager.

Trains by TF_CONFIG, with a dataset made by a function in each process and the
epochs counted in a checkpoint. One process kills itself where it is told to.
"""

import json
import os
import signal
import sys

import keras
import numpy as np
import tensorflow as tf

import keras_strategies as ks

EPOCHS, STEPS, SIZE, ROWS = 3, 3, 16, 64


def dataset_fn(context):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, (x[:, 0] > 0).astype(int)))
    data = data.shard(context.num_input_pipelines, context.input_pipeline_id)
    return data.batch(context.get_per_replica_batch_size(SIZE))


def model_of():
    keras.utils.set_random_seed(5)
    regularizer = keras.regularizers.L2(1e-3)
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, "tanh", kernel_regularizer=regularizer),
            keras.layers.Dense(2, kernel_regularizer=regularizer),
        ]
    )


def make_train_step(strategy, model, optimizer, accuracy):
    loss_of_rows = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="none"
    )

    def step(inputs):
        x, y = inputs

        def loss_fn():
            logits = model(x, training=True)
            loss = ks.compute_average_loss(loss_of_rows(y, logits))
            loss += ks.scale_regularization_loss(sum(model.losses))
            return loss, logits

        (loss, logits), gradients = ks.value_and_grad(
            loss_fn, model.trainable_variables, has_aux=True
        )()
        optimizer.apply_gradients(
            zip(gradients, model.trainable_variables, strict=True)
        )
        accuracy.update_state(y, logits)
        return loss

    @ks.function
    def train_step(iterator):
        losses = strategy.run(step, args=(next(iterator),))
        return strategy.reduce(ks.ReduceOp.SUM, losses, axis=None)

    return train_step


def main():
    told = json.loads(sys.argv[1])
    strategy = ks.MultiWorkerMirroredStrategy()
    is_last = strategy.cluster_resolver.task_id == 1
    with strategy.scope():
        model = model_of()
        data = strategy.distribute_datasets_from_function(dataset_fn)
        optimizer = keras.optimizers.RMSprop(0.01)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    train_step = make_train_step(strategy, model, optimizer, accuracy)
    epoch, step_in_epoch = (
        keras.Variable(0, dtype="int32", trainable=False) for _ in range(2)
    )
    checkpoint = ks.checkpoint.Checkpoint(
        model=model,
        optimizer=optimizer,
        epoch=epoch,
        step_in_epoch=step_in_epoch,
    )
    manager = ks.checkpoint.CheckpointManager(
        checkpoint, directory=told["directory"], max_to_keep=1
    )
    newest = ks.checkpoint.latest_checkpoint(told["directory"])
    if newest:
        checkpoint.restore(newest)
    while epoch.numpy() < EPOCHS:
        iterator, total = iter(data), 0.0
        while step_in_epoch.numpy() < STEPS:
            total += float(train_step(iterator))
            step_in_epoch.assign_add(1)
            if is_last and epoch.numpy() == told["killed_in"]:
                os.kill(os.getpid(), signal.SIGKILL)
        line = {
            "epoch": int(epoch.numpy()),
            "loss": total / STEPS,
            "accuracy": float(accuracy.result()),
        }
        accuracy.reset_state()
        epoch.assign_add(1)
        step_in_epoch.assign(0)
        manager.save()
        manager.wait()
        if strategy.cluster_resolver.task_id in (0, None):
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

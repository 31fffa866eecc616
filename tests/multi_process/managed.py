"""A loop's checkpoints of several processes; see `test_fits.py`."""

import keras
import numpy as np

import keras_strategies as ks


def save_and_restore(directory):
    """A manager that keeps variables of the strategy's and of the process's."""
    strategy = ks.MultiWorkerMirroredStrategy()
    me = strategy.cluster_resolver.task_id or 0
    # As in tf's multi_worker_with_ctl: made outside of the scope.
    epoch = keras.Variable(10 + me, trainable=False, name="epoch")
    factor = keras.Variable(np.arange(3.0) + me, name="factor")
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
    checkpoint = ks.checkpoint.Checkpoint(
        model=model, epoch=epoch, factor=factor
    )
    manager = ks.checkpoint.CheckpointManager(checkpoint, directory)
    kernel = model.get_weights()[0]
    for step in (1, 2):
        epoch.assign_add(1)
        manager.save(step)
    manager.wait()
    epoch.assign(0)
    factor.assign(np.zeros(3))
    model.set_weights([0 * w for w in model.get_weights()])
    step = manager.restore_or_initialize()
    manager.close()
    is_same = bool(np.array_equal(kernel, model.get_weights()[0]))
    # They are still the process's own.
    epoch.assign_add(1)
    return {
        "step": step,
        "epoch": int(epoch.value),
        "factor": np.asarray(factor.value).tolist(),
        "is_same": is_same,
        "is_local": epoch.value.is_fully_addressable,
    }

"""The memory that a job of two processes needs for a GB of sharded weights."""

import keras

import keras_strategies as ks
from tests.support.peaks import measure_added

SIZES = {"small": 64, "large": 1024}


def make_strategy():
    return ks.MultiWorkerMirroredStrategy(
        variable_partitioner=ks.experimental.FullySharded()
    )


def restore(directory):
    """Restores a checkpoint of a GB of weights, with Adam's slots.

    Returns:
      The MB that it adds for a while, and how many it may.
    """
    strategy = make_strategy()

    def build(width, depth):
        layer = keras.layers.Dense
        with strategy.scope():
            layers = [layer(width, "tanh") for _ in range(depth)]
            model = keras.Sequential([keras.Input((width,)), *layers])
            model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
        objects = {"model": model, "optimizer": model.optimizer}
        checkpoint = ks.checkpoint.Checkpoint(**objects)
        where = f"{directory}/{width}"
        return model, ks.checkpoint.CheckpointManager(checkpoint, where, 1)

    _, manager = build(64, 2)
    manager.save()
    manager.restore_or_initialize()
    model, manager = build(4096, 15)
    manager.save()
    restored, added = measure_added(manager.restore_or_initialize)
    assert restored
    return added, bound([*model.variables, *model.optimizer.variables])


def write_preset(directory, size):
    import keras_hub

    width = SIZES[size]
    backbone = keras_hub.models.Llama3Backbone(
        vocabulary_size=32 * width,
        num_layers=width // 85,
        num_query_heads=8,
        num_key_value_heads=8,
        hidden_dim=width,
        intermediate_dim=4 * width,
    )
    backbone.save_to_preset(f"{directory}/{size}")


def load_preset(directory):
    """Loads a keras-hub preset of a GB, in a scope."""
    import keras_hub

    def load(size):
        return keras_hub.models.Backbone.from_preset(f"{directory}/{size}")

    with make_strategy().scope():
        load("small")
        backbone, added = measure_added(lambda: load("large"))
    return added, bound(backbone.variables)


def bound(variables):
    """1.2 times this process's shards, and the largest variable, in MB."""
    values = [variable.value for variable in variables]
    shards = [s.data.nbytes for v in values for s in v.addressable_shards]
    return (1.2 * sum(shards) + max(v.nbytes for v in values)) / 2**20

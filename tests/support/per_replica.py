"""Variables of a strategy, and values that differ on its replicas."""

import keras
import numpy as np


def make_variable(strategy, value=1.0, **kwargs):
    with strategy.scope():
        return keras.Variable(value, name="v", **kwargs)


def on_read(strategy, aggregation, value=1.0):
    """A variable of which each replica has a copy of its own."""
    how = {"synchronization": "on_read", "aggregation": aggregation}
    return make_variable(strategy, value, **how)


def ids(strategy):
    """0.0, 1.0, ... on the replicas."""
    return strategy.experimental_distribute_values_from_function(
        lambda c: np.float32(c.replica_id_in_sync_group)
    )

"""Checking that replicated state agrees."""

import keras
import numpy as np

from keras_strategies.keras_bridge.binding import all_variables


def assert_replicated(model: keras.Model) -> None:
    """Asserts that all copies of all of a model's variables are bit-equal.

    Args:
      model: A model that was bound to a strategy.

    Raises:
      AssertionError: copies differ; the text lists the variables.
    """
    different = []
    for variable in all_variables(model):
        shards = [np.asarray(s.data) for s in variable.value.addressable_shards]
        if any(s.tobytes() != shards[0].tobytes() for s in shards[1:]):
            different.append(variable.path)
    if different:
        raise AssertionError(
            "Replicas hold different values of replicated variables: "
            f"{', '.join(different)}."
        )

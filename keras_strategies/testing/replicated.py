"""Checking that replicated state agrees."""

import keras
import numpy as np

from keras_strategies._core.values import copies_of
from keras_strategies.keras_bridge.binding import all_variables


def assert_replicated(*owners: keras.Model | keras.Variable) -> None:
    """Asserts that all copies of replicated variables are equal, bit by bit.

    Args:
      *owners: Models that were bound to a strategy, whose variables (also of
        their optimizers, metrics and losses) are looked at, and variables.

    Raises:
      AssertionError: copies differ; the text lists the variables.
    """
    variables: list[keras.Variable] = []
    for owner in owners:
        is_variable = isinstance(owner, keras.Variable)
        variables += [owner] if is_variable else all_variables(owner)
    different = []
    for variable in variables:
        copies = [np.asarray(copy) for copy in copies_of(variable.value)]
        if any(c.tobytes() != copies[0].tobytes() for c in copies[1:]):
            different.append(variable.path)
    if different:
        raise AssertionError(
            "Replicas hold different values of replicated variables: "
            f"{', '.join(different)}."
        )

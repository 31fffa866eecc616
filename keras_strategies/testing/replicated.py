"""Assertions that replicated state is equal on all replicas."""

import keras
import numpy as np

from keras_strategies._core.values import local_shards
from keras_strategies.keras_bridge.variables.model_variables import (
    all_variables,
)


def assert_replicated(*owners: keras.Model | keras.Variable) -> None:
    """Asserts that all copies of replicated variables are equal, bit by bit.

    Of variables that a replica divides over its cores, all copies of a part.

    Args:
      *owners: Models that were bound to a strategy, whose variables (also of
        their optimizers, metrics and losses) are looked at, and variables.

    Raises:
      AssertionError: copies differ; the text lists the variables.

    Example:
      ```python
      from keras_strategies import testing

      model.fit(x, y, batch_size=64)
      testing.assert_replicated(model)
      ```
    """
    variables: list[keras.Variable] = []
    for owner in owners:
        is_variable = isinstance(owner, keras.Variable)
        variables += [owner] if is_variable else all_variables(owner)
    different = []
    for variable in variables:
        parts: dict[str, bytes] = {}
        for index, data in local_shards(variable.value):
            copy = np.asarray(data).tobytes()
            if parts.setdefault(str(index), copy) != copy:
                different.append(variable.path)
                break
    if different:
        raise AssertionError(
            "Replicas hold different values of replicated variables: "
            f"{', '.join(different)}."
        )

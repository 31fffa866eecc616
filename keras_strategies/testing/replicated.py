"""Assertions that replicated state is equal on all replicas."""

import keras
import numpy as np

from keras_strategies.spmd.values import local_shards
from keras_strategies.variables.model_variables import (
    all_variables,
)


def assert_replicated(*owners: keras.Model | keras.Variable) -> None:
    """Asserts that all copies of replicated variables are bit-for-bit equal.

    If a variable is sharded over the cores of a replica, the copies of each
    shard are compared with each other.

    Args:
      *owners: Variables, or models created under a strategy. A model's
        variables include those of its optimizer, metrics and losses.

    Raises:
      AssertionError: if copies differ. The message lists the variables that
        differ.

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
            "All copies of a replicated variable must be equal. Received: "
            f"different copies of {', '.join(different)}. Find the operation "
            "that wrote different values on the replicas."
        )

"""Names of the nests of arrays that steps take and return."""

from typing import Any

Batch = Any
"""A nest (dicts, lists, tuples) of arrays of shape (rows, ...): x, (x, y) or
(x, y, sample_weight), as `keras.utils.unpack_x_y_sample_weight` takes it."""

Group = list[Any]
"""The values of some variables, in the order of the variables: each of its
variable's shape; in a mapped program those of one replica."""

State = tuple[Group, ...]
"""The values of a model's variables, a `Group` for each of Keras's groups:
trainable and other variables, the optimizers', and those of metrics."""

Logs = Any
"""What a step returns: a dict of scalars by name for train and test steps, a
`Batch` of outputs for predict steps."""

"""Makes sure that all processes shard variables along the same dimensions.

If processes sharded a variable differently, their shards would have different
shapes, and the processes would wait for each other in different programs.
"""

import json
from collections.abc import Sequence
from typing import Any

import keras

from keras_strategies.cluster.exchange import message_forms
from keras_strategies.cluster.exchange.host_exchange import Agreement
from keras_strategies.data.raise_together import list_values, raise_everywhere
from keras_strategies.spmd.mesh import ReplicaMesh
from keras_strategies.variables.partitioners import (
    Dimension,
    Partitioner,
)

_DIVIDING = "dividing variables"
_CURE = (
    "Pass the same `variable_partitioner` in all processes. Its result must "
    "depend only on a variable's path, shape and dtype."
)
_MAX_ERROR = 500
# Each answer is for one variable: its path, shape and dimension.
_FORM = message_forms.Either(
    (
        {"error": str},
        {"partitioner": str, "answers": [(str, [int], int | None)]},
    )
)


def choose_dimensions(
    partitioner: Partitioner,
    variables: Sequence[keras.Variable],
    over_cores: Sequence[Any],
) -> list[Dimension]:
    """Returns the dimensions that a partitioner chooses for variables."""
    return [
        partitioner.choose_dimension(v.path, tuple(v.shape), v.dtype, axes)
        for v, axes in zip(variables, over_cores, strict=True)
    ]


def agree_on_dimensions(
    partitioner: Partitioner,
    mesh: ReplicaMesh,
    variables: Sequence[keras.Variable],
    over_cores: Sequence[Any],
) -> list[Dimension]:
    """Chooses dimensions and compares them between processes. Collective.

    Args:
      partitioner: The partitioner.
      mesh: The mesh of the replicas.
      variables: Variables of the same shapes in all processes.
      over_cores: For each variable, the axes that are passed to
        `Partitioner.choose_dimension`.

    Raises:
      ValueError: if processes shard a variable differently. All processes
        raise it.
      RuntimeError: if another process's partitioner raised an error.
    """
    dims: list[Dimension] = []
    error: Exception | None = None
    name = f"{partitioner.name} over {partitioner.shards}"
    try:
        dims = choose_dimensions(partitioner, variables, over_cores)
        answers = [
            [variable.path, list(variable.shape), dim]
            for variable, dim in zip(variables, dims, strict=True)
        ]
        message: dict[str, Any] = {"partitioner": name, "answers": answers}
    except Exception as raised:
        error = raised
        message = {"error": f"{type(error).__name__}: {error}"[:_MAX_ERROR]}
    agreement = Agreement(mesh.processes, _DIVIDING)
    try:
        texts = agreement.exchange(json.dumps(message))
    finally:
        agreement.end()
    received = message_forms.read_messages(
        texts, _FORM, processes=mesh.processes, about=_DIVIDING
    )
    action = "Calling `variable_partitioner`"
    raise_everywhere(mesh, action, received, error, cure=_CURE)
    shown = _find_difference(received)
    if shown:
        raise ValueError(
            "All processes must shard variables in the same way. Received: "
            f"{list_values(mesh, shown)}. {_CURE}"
        )
    return dims


def _find_difference(received: list[dict[str, Any]]) -> list[str]:
    """Describes the first difference between the processes' answers.

    Paths are not compared, because the numbers in them count the layers that a
    process has created, which may differ between processes.

    Returns:
      A text for each process, or an empty list if the answers do not differ.
    """
    names = [message["partitioner"] for message in received]
    if len(set(names)) > 1:
        return names
    counts = [len(message["answers"]) for message in received]
    if len(set(counts)) > 1:
        return [f"{count} variables" for count in counts]
    columns = zip(*[message["answers"] for message in received], strict=True)
    for column in columns:
        if any(answer[1:] != column[0][1:] for answer in column):
            return [
                f"{'no dimension' if dim is None else f'dimension {dim}'} of "
                f"{path!r}, shape {tuple(shape)}"
                for path, shape, dim in column
            ]
    return []

"""The dimensions that variables are divided along, the same in all processes.

Processes that divide a variable differently would place parts of different
shapes, and wait for each other in different programs.
"""

import json
from collections.abc import Sequence
from typing import Any

import keras

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.cluster.exchange import message_forms
from keras_strategies.cluster.exchange.host_exchange import Agreement
from keras_strategies.data.raise_together import list_values, raise_everywhere
from keras_strategies.keras_bridge.variables.partitioners import (
    Dimension,
    Partitioner,
)

_DIVIDING = "dividing variables"
_CURE = (
    "Give all processes the same `variable_partitioner`, whose answer depends "
    "on a variable's path, shape and dtype alone."
)
_MAX_ERROR = 500
# Of each variable its path, its shape and the dimension.
_FORM = message_forms.Either(
    (
        {"error": str},
        {"partitioner": str, "answers": [(str, [int], int | None)]},
    )
)


def dimensions_of(
    partitioner: Partitioner,
    variables: Sequence[keras.Variable],
    over_cores: Sequence[Any],
) -> list[Dimension]:
    """What a partitioner says of variables; see `Partitioner.dimension`."""
    return [
        partitioner.dimension(v.path, tuple(v.shape), v.dtype, axes)
        for v, axes in zip(variables, over_cores, strict=True)
    ]


def agreed_dimensions(
    partitioner: Partitioner,
    mesh: ReplicaMesh,
    variables: Sequence[keras.Variable],
    over_cores: Sequence[Any],
) -> list[Dimension]:
    """As `dimensions_of`, for replicas of several processes. Collective.

    Args:
      partitioner: The partitioner.
      mesh: The replicas.
      variables: Of the same shapes in all processes.
      over_cores: Of each, see `Partitioner.dimension`.

    Raises:
      ValueError: processes divide a variable differently; all raise.
      RuntimeError: another process's partitioner raised.
    """
    dims: list[Dimension] = []
    error: Exception | None = None
    name = f"{partitioner.name} over {partitioner.shards}"
    try:
        dims = dimensions_of(partitioner, variables, over_cores)
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
    what = "Asking `variable_partitioner`"
    raise_everywhere(mesh, what, received, error, cure=_CURE)
    shown = _differing(received)
    if shown:
        raise ValueError(
            "All processes must divide variables alike. Received: "
            f"{list_values(mesh, shown)}. {_CURE}"
        )
    return dims


def _differing(received: list[dict[str, Any]]) -> list[str]:
    """What each process has said where they differ first; nothing: they agree.

    Paths may differ: they have numbers of what a process has made before.
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
                f"{'whole' if dim is None else f'dimension {dim}'} of "
                f"{path!r}, shape {tuple(shape)}"
                for path, shape, dim in column
            ]
    return []

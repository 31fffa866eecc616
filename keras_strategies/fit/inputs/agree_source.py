"""Data sources made collectively: an error in one process is raised in all."""

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from keras_strategies._types import Tree
from keras_strategies.cluster.exchange import message_forms
from keras_strategies.cluster.exchange.rounds import Rounds
from keras_strategies.data.source import Source, data_checksum
from keras_strategies.data.step_checks import (
    find_unequal_readers,
    list_values,
    raise_everywhere,
)
from keras_strategies.spmd.mesh import ReplicaMesh

_T = TypeVar("_T")
_MAX_NUMBER = 2**31 - 1
# The formats of the messages that processes exchange.
_FAILED = {"error": str}
_MADE = message_forms.Either(
    (_FAILED, {"facts": dict, "seed": int | str | None})
)
_SHAPES = message_forms.Either(
    (_FAILED, {"outlines": [str], "checksum": int | None})
)


def build_on_all_processes(
    mesh: ReplicaMesh,
    name: str,
    make: Callable[[int], Source],
    facts: dict[str, Any] | None = None,
    *,
    draws: bool = False,
) -> Source:
    """Makes a source in every process. Collective.

    All processes shuffle with the chief's seed, unless the rows are
    process-local. If one process cannot make its source, all processes raise an
    error, so that no process waits for the failed process later.

    Args:
      mesh: The mesh of the replicas.
      name: The function or method that needs the source, for error messages.
      make: A function that makes the source from a seed, an integer that is
        equal in all processes.
      facts: JSON values by name, such as the number of steps. They must be
        equal in all processes, and so must the results of `Source.facts`.
      draws: Whether the seed that is passed to `make` is random. Otherwise it
        is 0.

    Raises:
      ValueError: if the processes are in different calls, or if their data or
        `facts` differ.
      RuntimeError: if another process could not make its source.
    """
    number = int(np.random.randint(_MAX_NUMBER)) if draws else 0
    if mesh.num_processes == 1:
        return make(number)
    with _start_rounds(mesh, name, f"preparing the data of {name}") as rounds:
        numbers = rounds.exchange(number, message_forms.is_count)
        source, error, message = _try_to_make(lambda: make(numbers[0]))
        if source is not None:
            all_facts = (facts or {}) | source.facts()
            message = {"facts": all_facts, "seed": source.seed}
        received = rounds.exchange(message, _MADE)
    raise_everywhere(mesh, f"Preparing the data of {name}", received, error)
    _check_facts(mesh, name, [message["facts"] for message in received])
    assert source is not None
    seeds = [message["seed"] for message in received]
    if not source.is_process_local:
        source.restart(seeds[0])
    elif mesh.spans_processes:
        # Processes that share replicas read the same process-local rows.
        source.restart(mesh.first_of_readers(seeds)[mesh.reader_index])
    return source


def build_equal_replicas(
    mesh: ReplicaMesh, name: str, make: Callable[[], list[Any]]
) -> list[Any]:
    """Makes one nest of arrays for each local replica. Collective.

    Args:
      mesh: The mesh of the replicas.
      name: The function or method that needs the nests, for error messages.
      make: A function that makes the nests of this process's replicas.

    Raises:
      ValueError: if the nests differ in shapes, dtypes or structure, within
        a process or between processes. All processes raise it.
      RuntimeError: if another process could not make its nests.
    """
    if mesh.num_processes == 1:
        return make()

    def make_outlined() -> tuple[list[Any], dict[str, Any]]:
        nests = make()
        checksum = data_checksum(nests) if mesh.spans_processes else None
        outlines = [_describe_shapes(nest) for nest in nests]
        return nests, {"outlines": outlines, "checksum": checksum}

    with _start_rounds(mesh, name, f"making the values of {name}") as rounds:
        values, error, message = _try_to_make(make_outlined)
        if values is not None:
            message = values[1]
        received = rounds.exchange(message, _SHAPES)
    raise_everywhere(mesh, f"Making the values of {name}", received, error)
    reader_values = mesh.first_of_readers(received)
    outlines = [text for one in reader_values for text in one["outlines"]]
    if len(set(outlines)) > 1:
        raise ValueError(
            f"If there are several processes, the values in {name} must have "
            "the same structure, shapes and dtypes for all replicas. Received: "
            f"{'; '.join(dict.fromkeys(outlines))}. Pad the arrays to the same "
            "shape, or distribute a dataset, whose batches may differ in their "
            "number of rows."
        )
    _compare_checksums(mesh, name, [one["checksum"] for one in received])
    assert values is not None
    return values[0]


def check_same_values(
    mesh: ReplicaMesh, name: str, values: Tree, shared: str = "replicas"
) -> None:
    """Checks that processes have equal values if they must. Collective.

    Args:
      mesh: The mesh of the replicas.
      name: The function or method that needs the values, for error messages.
      values: Arrays.
      shared: "replicas" if processes that share replicas must have equal
        values; "variables" if all processes must.

    Raises:
      ValueError: if these processes received different values.
    """
    with _start_rounds(mesh, name, name) as rounds:
        checksum = data_checksum(values)
        checksums = rounds.exchange(checksum, message_forms.is_count)
    _compare_checksums(mesh, name, checksums, shared)


def _compare_checksums(
    mesh: ReplicaMesh,
    name: str,
    checksums: list[Any],
    shared: str = "replicas",
) -> None:
    group = find_unequal_readers(mesh, checksums)
    if shared == "variables" and len(set(checksums)) > 1:
        group = list(mesh.processes)
    if group is not None:
        raise ValueError(
            f"Processes that share {shared} must provide equal values to "
            f"{name}. Received: values with the checksums "
            f"{list_values(mesh, checksums)}, where the processes {group} "
            f"share {shared}. Pass equal values in all processes. If they are "
            "random, generate them with the same seed."
        )


def _try_to_make(
    make: Callable[[], _T],
) -> tuple[_T | None, Exception | None, dict[str, Any]]:
    """Calls `make`, and catches an error that it raises.

    Returns:
      The new value, None and an empty message. If `make` failed: None, the
      error, and the message that reports the error to the other processes.
    """
    try:
        return make(), None, {}
    except Exception as error:
        return None, error, {"error": f"{type(error).__name__}: {error}"}


def _describe_shapes(nest: Tree) -> str:
    arrays = jax.tree.map(np.asarray, nest)
    return str(jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", arrays))


def _check_facts(
    mesh: ReplicaMesh, name: str, facts: list[dict[str, Any]]
) -> None:
    for fact in dict.fromkeys(itertools.chain(*facts)):
        values = [one.get(fact) for one in facts]
        if any(value != values[0] for value in values):
            raise ValueError(
                "All processes must pass the same data, batch size, numbers of "
                "steps and epochs, and callbacks that control the training to "
                f"{name}. Received: different values of {fact}: "
                f"{list_values(mesh, values)}. Pass the same in all processes. "
                "Only process-local rows (`AutoShardPolicy.OFF`) may differ in "
                "number."
            )


def _start_rounds(mesh: ReplicaMesh, name: str, doing: str) -> Rounds:
    return Rounds(mesh.processes, doing, f"the data of {name}")

"""Agreement on a source: all processes make theirs, or none does."""

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies._types import Batch, Tree
from keras_strategies.cluster.exchange import message_forms
from keras_strategies.cluster.exchange.rounds import Rounds
from keras_strategies.data.raise_together import by_process, raise_together
from keras_strategies.data.source import Source, data_checksum
from keras_strategies.data.step_checks import unlike_readers

_T = TypeVar("_T")
_MAX_NUMBER = 2**31 - 1
_MAX_SHOWN = 8
# The messages between processes.
_FAILED = {"error": str}
_NUMBER = {"number": message_forms.is_count}
_MADE = message_forms.Either(
    (_FAILED, {"facts": dict, "seed": int | str | None})
)
_SHAPES = message_forms.Either(
    (_FAILED, {"outlines": [str], "checksum": int | None})
)

_SAME = {"checksum": message_forms.is_count}


def made_together(
    mesh: ReplicaMesh,
    name: str,
    make: Callable[[int], Source],
    facts: dict[str, Any] | None = None,
    *,
    draws: bool = False,
) -> Source:
    """Makes a source in every process. Collective.

    All take the chief's seed, unless the rows are the process's own. If one
    process cannot make its source, all raise; nobody waits for it later on.

    Args:
      mesh: The replicas.
      name: The call that it is for, for messages.
      make: Makes it, from a number that is the same in all processes.
      facts: What else must be the same in all, by name; what JSON can hold.
      draws: Whether the number is drawn, so that the next one is another.

    Raises:
      ValueError: the processes are in different calls, or were given
        different data or numbers.
      RuntimeError: another process could not make it.
    """
    number = int(np.random.randint(_MAX_NUMBER)) if draws else 0
    if mesh.num_processes == 1:
        return make(number)
    with _rounds(mesh, name, f"preparing the data of {name}") as rounds:
        numbers = rounds.exchange({"number": number}, _NUMBER)
        source, error, message = _tried(lambda: make(numbers[0]["number"]))
        if source is not None:
            all_facts = (facts or {}) | source.facts()
            message = {"facts": all_facts, "seed": source.seed}
        received = rounds.exchange(message, _MADE)
    raise_together(mesh, f"Preparing the data of {name}", received, error)
    _check_facts(mesh, name, [message["facts"] for message in received])
    assert source is not None
    seeds = [message["seed"] for message in received]
    if not source.is_process_local:
        source.restart(seeds[0])
    elif mesh.spans_processes:
        # They read the same rows of their own.
        source.restart(mesh.first_of_readers(seeds)[mesh.reader_index])
    return source


def made_alike(
    mesh: ReplicaMesh, name: str, make: Callable[[], list[Any]]
) -> list[Any]:
    """Makes one nest of arrays for each local replica. Collective.

    Args:
      mesh: The replicas.
      name: The call that it is for, for messages.
      make: Makes the nests.

    Raises:
      ValueError: they differ in shapes, dtypes or structure, here or between
        processes; all raise.
      RuntimeError: another process could not make them.
    """
    if mesh.num_processes == 1:
        return make()

    def outlined() -> tuple[list[Any], dict[str, Any]]:
        nests = make()
        checksum = data_checksum(nests) if mesh.spans_processes else None
        outlines = [_shapes_of(nest) for nest in nests]
        return nests, {"outlines": outlines, "checksum": checksum}

    with _rounds(mesh, name, f"making the values of {name}") as rounds:
        made, error, message = _tried(outlined)
        if made is not None:
            message = made[1]
        received = rounds.exchange(message, _SHAPES)
    raise_together(mesh, f"Making the values of {name}", received, error)
    of_readers = mesh.first_of_readers(received)
    outlines = [text for one in of_readers for text in one["outlines"]]
    if len(set(outlines)) > 1:
        shown = ", ".join(
            f"{text} (replica {replica})"
            for replica, text in enumerate(outlines[:_MAX_SHOWN])
        )
        more = ", ..." * (len(outlines) > _MAX_SHOWN)
        raise ValueError(
            f"On several processes {name} makes values of the same structure, "
            f"shapes and dtypes for all replicas. Received: {shown}{more}. "
            "Make them alike: pad the rows, or distribute a dataset, whose "
            "batches may differ."
        )
    _check_same_values(mesh, name, received)
    assert made is not None
    return made[0]


def check_same_rows(mesh: ReplicaMesh, batch: Batch) -> None:
    """Compares a batch that every process was given. Collective.

    Raises:
      ValueError: processes that share replicas were given other rows.
    """
    name = "a call with one batch"
    with _rounds(mesh, name, name) as rounds:
        message = {"checksum": data_checksum(batch)}
        received = rounds.exchange(message, _SAME)
    _check_same_values(mesh, name, received)


def _check_same_values(
    mesh: ReplicaMesh, name: str, received: list[dict[str, Any]]
) -> None:
    checksums = [one["checksum"] for one in received]
    group = unlike_readers(mesh, checksums)
    if group is not None:
        raise ValueError(
            "Processes that have cores of one replica must give it the same "
            f"values, in {name} too. Received: values of the checksums "
            f"{by_process(mesh, checksums)}, where the processes {group} share "
            "replicas. Make them the same in all processes, and draw with one "
            "seed."
        )


def _tried(
    make: Callable[[], _T],
) -> tuple[_T | None, Exception | None, dict[str, Any]]:
    """What was made; or an error, and the message of it."""
    try:
        return make(), None, {}
    except Exception as error:
        return None, error, {"error": f"{type(error).__name__}: {error}"}


def _shapes_of(nest: Tree) -> str:
    leaves, structure = jax.tree.flatten(nest)
    arrays = [np.asarray(leaf) for leaf in leaves]
    shapes = ", ".join(f"{a.dtype}{list(a.shape)}" for a in arrays)
    is_one = jax.tree.structure(0) == structure
    return shapes if is_one else f"{structure} of {shapes}"


def _check_facts(
    mesh: ReplicaMesh, name: str, facts: list[dict[str, Any]]
) -> None:
    for fact in dict.fromkeys(itertools.chain(*facts)):
        values = [given.get(fact) for given in facts]
        if any(value != values[0] for value in values):
            raise ValueError(
                f"All processes must give {name} the same data, batch size "
                f"and numbers of steps and epochs. Received: {fact} of "
                f"{by_process(mesh, values)}. Give all processes the same; of "
                "rows that are each process's own, with `AutoShardPolicy.OFF`, "
                "the number may differ."
            )


def _rounds(mesh: ReplicaMesh, name: str, doing: str) -> Rounds:
    return Rounds(mesh.processes, doing, f"the data of {name}")

"""Checks of what processes have sent each other of a step's batch.

Every process has received the same, so all raise the same.
"""

from collections.abc import Sequence
from typing import Any

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.data import batch_spec
from keras_strategies.data.raise_together import by_process

Received = list[dict[str, Any]]
"""The messages, in the order of `mesh.processes`."""


def check_places(mesh: ReplicaMesh, received: Received) -> None:
    """Raises ValueError unless all read the same step of the same epoch."""
    places = [h["place"] for h in received]
    if len(set(places)) > 1:
        raise ValueError(
            "All processes must read the same step of the same epoch. "
            f"Received: {by_process(mesh, places)}. Iterate over "
            "datasets equally often in all processes, and resume all at "
            "one place."
        )


def check_specs(
    mesh: ReplicaMesh, received: Received, step: int, before: str | None
) -> None:
    """Raises ValueError unless all batches have one structure.

    Args:
      mesh: The replicas.
      received: The messages.
      step: The step.
      before: The structure of the last step's batch, if there was one.
    """
    specs = [h.get("spec") for h in received]
    known = {spec for spec in specs if spec is not None}
    if len(known) > 1:
        raise ValueError(
            "The batches of all processes must have the same structure, "
            f"shapes and dtypes. Received: in step {step} "
            f"{by_process(mesh, list(map(_shown, specs)))}. Check "
            "what each process reads."
        )
    if before and known and not batch_spec.is_like(before, *known):
        raise ValueError(
            "All batches must have the same structure, ranks and dtypes. "
            f"Received: {_shown(before)} before, {_shown(*known)} in step "
            f"{step}. Make the dataset yield one structure."
        )


def check_whole(mesh: ReplicaMesh, received: Received, step: int) -> None:
    """Raises ValueError unless all saw the same batch."""
    rows = [h["rows"] for h in received]
    if None in rows or len(set(rows)) > 1:
        told = ["no more rows" if n is None else f"{n} rows" for n in rows]
        raise ValueError(
            "All processes must see the same number of batches and rows. "
            f"Received: in step {step} {by_process(mesh, told)}. Give "
            "all processes the same data, or each its own with "
            "`AutoShardPolicy.OFF`."
        )
    checksums = [h.get("checksum") for h in received]
    if any(checksum != checksums[0] for checksum in checksums):
        raise ValueError(
            "Every process must see the same batches, of which it takes "
            "its rows: otherwise rows are lost and others used twice. "
            f"Received: rows that differ in step {step} (checksums "
            f"{by_process(mesh, checksums)}). Shuffle "
            "and augment with one seed in all processes, or give each "
            "process rows of its own with `AutoShardPolicy.OFF`."
        )


def check_readers(mesh: ReplicaMesh, received: Received, step: int) -> None:
    """Raises ValueError where processes that share replicas differ.

    Nothing else would notice: a replica's cores would compute with rows of two
    batches.
    """
    if not mesh.spans_processes:
        return
    facts = ("rows", "spec", "counts", "read")
    told = [[message.get(fact) for fact in facts] for message in received]
    group = unlike_readers(mesh, told)
    if group is not None:
        shown = [
            "no rows" if rows is None else f"{rows} rows of checksum {checksum}"
            for rows, _, _, checksum in told
        ]
        raise ValueError(
            "Processes that have cores of the same replicas must read the "
            f"same rows, in one order. Received: in step {step} "
            f"{by_process(mesh, shown)}, where the processes {group} share "
            "replicas. Shuffle and augment with one seed in all processes, or "
            "choose replicas within one process."
        )


def unlike_readers(
    mesh: ReplicaMesh, values: Sequence[object]
) -> list[int] | None:
    """Returns processes that share replicas and differ, or None.

    Args:
      mesh: The replicas.
      values: What each process has, in the order of `mesh.processes`.
    """
    of_process = dict(zip(mesh.processes, values, strict=True))
    for group in mesh.readers:
        if any(of_process[p] != of_process[group[0]] for p in group):
            return list(group)
    return None


def _shown(spec: str | None) -> str:
    return "no rows" if spec is None else batch_spec.shown(spec)

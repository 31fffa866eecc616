"""Checks that all processes have read matching batches, without errors.

They check the messages that the processes have exchanged about their batches.
Every process has received the same messages, so all raise the same error.
"""

from collections.abc import Sequence
from typing import Any

from keras_strategies.cluster.exchange.greetings import clean_text
from keras_strategies.data import batch_spec
from keras_strategies.spmd.mesh import ReplicaMesh

Received = list[dict[str, Any]]
"""The messages, in the order of `mesh.processes`."""


def check_places(mesh: ReplicaMesh, received: Received) -> None:
    """Raises ValueError unless all processes read the same step and epoch."""
    places = [h["place"] for h in received]
    if len(set(places)) > 1:
        raise ValueError(
            "All processes must read the same step of the same epoch. "
            f"Received: {list_values(mesh, places)}. Iterate over datasets "
            "equally often in all processes, and resume from the same position."
        )


def check_specs(mesh: ReplicaMesh, received: Received, step: int) -> None:
    """Raises ValueError unless a step's batches have the same structure."""
    specs = [h.get("spec") for h in received]
    if len(set(specs) - {None}) > 1:
        raise ValueError(
            "The batches of all processes must have the same structure, "
            f"shapes and dtypes. Received: in step {step}: "
            f"{list_values(mesh, list(map(_format_spec, specs)))}. Check "
            "which data each process reads."
        )


def check_global_batch(
    mesh: ReplicaMesh, received: Received, step: int
) -> None:
    """Raises ValueError unless all processes read the same global batch."""
    rows = [h["rows"] for h in received]
    if None in rows or len(set(rows)) > 1:
        texts = ["no more rows" if n is None else f"{n} rows" for n in rows]
        raise ValueError(
            "All processes must see the same number of batches and rows. "
            f"Received: in step {step}: {list_values(mesh, texts)}. Use the "
            "same data in all processes, or `AutoShardPolicy.OFF` if each "
            "process has different rows."
        )
    checksums = [h.get("checksum") for h in received]
    if any(checksum != checksums[0] for checksum in checksums):
        raise ValueError(
            "Every process must read the same batches, of which it uses its "
            f"rows. Received: different rows in step {step} (checksums "
            f"{list_values(mesh, checksums)}). Shuffle and augment with the "
            "same seed in all processes, or use `AutoShardPolicy.OFF` if each "
            "process has different rows."
        )


def check_readers(mesh: ReplicaMesh, received: Received, step: int) -> None:
    """Raises ValueError if processes that share replicas read different rows.

    Without this check, the cores of one replica could compute with rows from
    different batches, and no error would be raised.
    """
    if not mesh.spans_processes:
        return
    facts = ("rows", "spec", "counts", "read")
    values = [[message.get(fact) for fact in facts] for message in received]
    group = find_unequal_readers(mesh, values)
    if group is not None:
        texts = [
            "no rows"
            if rows is None
            else f"{rows} rows with checksum {checksum}"
            for rows, _, _, checksum in values
        ]
        raise ValueError(
            "Processes that have cores of the same replicas must read the "
            f"same rows, in the same order. Received: in step {step}: "
            f"{list_values(mesh, texts)}, where the processes {group} share "
            "replicas. Shuffle and augment with the same seed in all "
            "processes, or choose replicas whose cores are all in one process."
        )


def find_unequal_readers(
    mesh: ReplicaMesh, values: Sequence[object]
) -> list[int] | None:
    """Finds processes that share replicas but have different values.

    Returns the first such group of processes, or None.

    Args:
      mesh: The mesh of the replicas.
      values: The value of each process, in the order of `mesh.processes`.
    """
    process_values = dict(zip(mesh.processes, values, strict=True))
    for group in mesh.readers:
        if any(process_values[p] != process_values[group[0]] for p in group):
            return list(group)
    return None


def _format_spec(spec: str | None) -> str:
    return "no rows" if spec is None else batch_spec.format_spec(spec)


def list_values(mesh: ReplicaMesh, values: list[Any]) -> str:
    """Lists the value of each process, with the process's index, as text."""
    return ", ".join(
        f"{clean_text(str(value))} (process {process})"
        for process, value in zip(mesh.processes, values, strict=True)
    )


def raise_everywhere(
    mesh: ReplicaMesh,
    what: str,
    received: list[dict[str, Any]],
    error: Exception | None,
) -> None:
    """Raises an error in every process if any of them reported a failure.

    Args:
      mesh: The mesh of the replicas.
      what: The action that failed, which begins the error message.
      received: The message of each process; it has the key "error" if the
        process failed.
      error: This process's own error if it failed, else None. A process that
        failed raises this error instead of a RuntimeError.

    Raises:
      RuntimeError: if another process failed.
    """
    failed = [
        f"process {process}: {clean_text(message['error']).rstrip(' .')}"
        for process, message in zip(mesh.processes, received, strict=True)
        if "error" in message
    ]
    if not failed:
        return
    if error is not None:
        if len(failed) < mesh.num_processes:
            note = f"{what} failed in this process, so all processes stop."
            error.add_note(note)
        raise error
    raise RuntimeError(
        f"{what} failed in another process, so all processes stop. Received: "
        f"{'; '.join(failed)}. Fix the data that these processes read."
    )

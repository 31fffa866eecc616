"""Raising an error in every process if it occurred in one of them."""

from typing import Any

from keras_strategies.cluster.exchange.greetings import clean_text
from keras_strategies.spmd.mesh import ReplicaMesh


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

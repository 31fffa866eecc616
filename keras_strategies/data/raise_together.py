"""An error of one process, raised in all."""

from typing import Any

from keras_strategies._core.mesh import ReplicaMesh
from keras_strategies.cluster.exchange.greetings import clean_text


def by_process(mesh: ReplicaMesh, values: list[Any]) -> str:
    """What each process has said, for messages."""
    return ", ".join(
        f"{clean_text(str(value))} (process {process})"
        for process, value in zip(mesh.processes, values, strict=True)
    )


def raise_together(
    mesh: ReplicaMesh,
    what: str,
    received: list[dict[str, Any]],
    error: Exception | None,
    *,
    cure: str = "Mend what the named process reads.",
) -> None:
    """Raises if a process has sent that it had an error.

    Args:
      mesh: The replicas.
      what: What was done, to begin a sentence with.
      received: The message of each process; with "error" if it had one.
      error: This process's own, which is raised itself.
      cure: What to do, where another process had it.

    Raises:
      RuntimeError: another process had one.
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
            error.add_note(f"{what} failed here, so all processes stop.")
        raise error
    raise RuntimeError(
        f"{what} failed in another process, so all processes stop. Received: "
        f"{'; '.join(failed)}. {cure}"
    )

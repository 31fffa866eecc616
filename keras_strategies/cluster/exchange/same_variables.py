"""The check that all processes create the same variables.

When a variable is created, the chief's value is sent to all processes. If they
created different variables, they would send arrays of different shapes, and
JAX would abort all of them without the cause. So each process notes the
variables that it creates, and the processes compare these notes.

The chief sends seeds and small values without waiting for the others, which
compare only that variable's note with the chief's. All notes are compared
before a program sends a large value, at the end of a scope, and after many
variables.
"""

import dataclasses
import functools
import re

from keras_strategies.cluster.exchange.host_exchange import (
    CREATING,
    SAME_VARIABLES,
    SAME_VARIABLES_FIX,
    Agreement,
)
from keras_strategies.cluster.exchange.same_program import (
    compute_digest,
    find_first_difference,
    group_processes,
)

_MAX_SHOWN = 1000
# After this number of values, the store forgets them.
_MAX_SHARED = 256
# The numbers of Keras's names: they count the layers that a process has
# created, which may differ between processes.
_NUMBER = re.compile(r"_\d+(?=[_/]|$)")
# The notes since the last comparison, by the processes that compare them.
_notes: dict[tuple[int, ...], list["Note"]] = {}
# The agreements in which values were shared since the last comparison.
_sharing: dict[tuple[int, ...], Agreement] = {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Note:
    """A description of a variable, to be compared between processes.

    Attributes:
      path: The variable's path.
      shape: The shape, such as "(3, 4)".
      dtype: The dtype.
      trainable: "trainable" or "not trainable".
      initializer: The kind of the initializer.
      where: The line of user code that creates the variable, or "". It is not
        compared.
    """

    path: str
    shape: str
    dtype: str
    trainable: str
    initializer: str
    where: str = ""

    def __str__(self) -> str:
        place = f", at {self.where}" if self.where else ""
        return (
            f"{self.path!r} of shape {self.shape}, {self.dtype}, "
            f"{self.trainable}, with {self.initializer}{place}"
        )

    def get_key(self) -> tuple[str, ...]:
        """Returns the fields that must be equal in all processes."""
        path = _NUMBER.sub("", self.path)
        return path, self.shape, self.dtype, self.trainable, self.initializer


def note(processes: tuple[int, ...], variable: Note) -> None:
    """Notes a variable that is about to be created in all processes.

    Args:
      processes: JAX's ids of the processes that create it.
      variable: The description of the variable.
    """
    if len(processes) > 1:
        _notes.setdefault(processes, []).append(variable)


def share(processes: tuple[int, ...], variable: Note, data: bytes) -> bytes:
    """Sends the first process's value of a new variable to all. Collective.

    No devices are used, and the first process does not wait.

    Args:
      processes: JAX's ids of the processes that create the variable.
      variable: The description of the variable.
      data: The value as a few bytes. The first process sends them.

    Returns:
      The first process's `data`.

    Raises:
      ValueError: if the variables differ. All processes raise it, the first one
        in its next `compare`.
      TimeoutError: see `Agreement.exchange`.
      RuntimeError: if the first process's data are malformed.
    """
    agreement = _sharing.get(processes) or Agreement(processes, CREATING)
    _sharing[processes] = agreement
    key = compute_digest(repr(variable.get_key()))
    mine = f"{len(_notes.get(processes, ()))}:{key}"
    shared = agreement.share(
        f"{mine} {variable}", data, functools.partial(compare, processes)
    )
    text, received = shared or ("", b"")
    if text.partition(" ")[0] != mine:
        compare(processes)
    if len(received) != len(data):
        raise RuntimeError(
            "The value of a variable that process "
            f"{processes[0]} sends must consist of {len(data)} bytes. "
            f"Received: {len(received)} bytes. Use the same version of "
            "keras_strategies in all processes, and create variables in the "
            "same order."
        )
    if agreement.num_shared >= _MAX_SHARED:
        compare(processes)
    return received


def compare(processes: tuple[int, ...], *, always: bool = False) -> None:
    """Compares the variables that were noted since the last call. Collective.

    No devices are used.

    Args:
      processes: JAX's ids of the processes that created the variables.
      always: Whether to exchange messages even if this process has noted no
        variable.

    Raises:
      ValueError: if the variables differ. All processes raise it.
      TimeoutError: see `Agreement.exchange`.
    """
    noted = _notes.pop(processes, [])
    agreement = _sharing.pop(processes, None)
    if not noted and not always and agreement is None:
        return
    agreement = agreement or Agreement(processes, CREATING)
    keys = [repr(variable.get_key()) for variable in noted]
    # `Agreement.exchange` shows the first variable to a process that creates
    # none.
    first = noted[0] if noted else "no further variable"
    texts = agreement.exchange(f"{compute_digest(repr(keys))} {first}")
    if len({text.partition(" ")[0] for text in texts}) > 1:
        raise ValueError(_describe_difference(agreement, processes, noted))
    agreement.end()


def _describe_difference(
    agreement: Agreement, processes: tuple[int, ...], noted: list[Note]
) -> str:
    """Describes the first variable that differs. Collective."""
    keys = [repr(variable.get_key()) for variable in noted]
    first = find_first_difference(agreement, keys)
    mine = "no further variable"
    if first < len(noted):
        mine = f"variable {noted[first]}"[:_MAX_SHOWN]
    texts = agreement.exchange(mine)
    agreement.end()
    shown = group_processes(processes, texts, "{1} in {0}")
    return f"{SAME_VARIABLES} Received: {shown}. {SAME_VARIABLES_FIX}"

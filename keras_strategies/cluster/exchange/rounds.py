"""Rounds in which processes exchange JSON messages of a given structure."""

import json
import operator
from collections.abc import Callable
from typing import Any

from keras_strategies.cluster.exchange.host_exchange import (
    Agreement,
    IsStopped,
)
from keras_strategies.cluster.exchange.message_forms import Form, read_messages


class Rounds:
    """Rounds in which each process sends a message to all processes.

        with Rounds(mesh.processes, "the time of a checkpoint") as rounds:
            received = rounds.exchange({"wait": 3}, {"wait": is_count})

    Args:
      processes: JAX's ids of the processes that take part.
      name: The name of the `Agreement`; it must be the same in all processes.
      about: The subject of the messages, for error messages; by default
        `name`.
      is_stopped: See `Agreement.exchange`.
      agree: A function that creates the `Agreement`; tests replace it.
    """

    def __init__(
        self,
        processes: tuple[int, ...],
        name: str,
        about: str | None = None,
        *,
        is_stopped: IsStopped | None = None,
        agree: Callable[[tuple[int, ...], str], Any] = Agreement,
    ) -> None:
        self._processes = processes
        self._about = about or name
        self._is_stopped = is_stopped
        self._agreement = agree(processes, name)

    def __enter__(self) -> "Rounds":
        return self

    def __exit__(self, *_: object) -> None:
        self._agreement.end()

    def exchange(self, message: object, form: Form) -> list[Any]:
        """Sends a message and receives one from each process. Collective.

        Args:
          message: A JSON value. NumPy integers in it are sent as ints; other
            objects that JSON does not support are sent as their `str`.
          form: The structure that every process's message must have.

        Returns:
          The messages of all processes, including this one.

        Raises:
          RuntimeError: if a message does not have the structure `form`. Also
            see `Agreement.exchange`.
        """
        texts = self._agreement.exchange(
            json.dumps(message, default=_make_plain), self._is_stopped
        )
        return read_messages(
            texts, form, processes=self._processes, about=self._about
        )


def _make_plain(value: Any) -> int | str:
    """Converts a value that JSON does not support to an int or a str."""
    try:
        return operator.index(value)
    except TypeError:
        return str(value)

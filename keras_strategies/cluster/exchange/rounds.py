"""Rounds of JSON messages between processes, each of a given form."""

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
    """Rounds in which every process sends a message and receives all.

        with Rounds(mesh.processes, "the time of a checkpoint") as rounds:
            received = rounds.exchange({"wait": 3}, {"wait": is_count})

    Args:
      processes: JAX's ids of the processes that take part.
      name: The name of the `Agreement`; it must be the same in all processes.
      about: The subject of the messages, for errors; by default `name`.
      is_stopped: See `Agreement.exchange`.
      agree: A factory of the `Agreement`, which tests replace.
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
        """Sends a message; returns those of all processes. Collective.

        Args:
          message: A JSON value. NumPy integers in it are sent as numbers,
            other objects as a str.
          form: The form of every process's message.

        Raises:
          RuntimeError: if a message has another form; also see
            `Agreement.exchange`.
        """
        texts = self._agreement.exchange(
            json.dumps(message, default=_make_plain), self._is_stopped
        )
        return read_messages(
            texts, form, processes=self._processes, about=self._about
        )


def _make_plain(value: Any) -> int | str:
    """Returns what is sent for a value that JSON has not."""
    try:
        return operator.index(value)
    except TypeError:
        return str(value)

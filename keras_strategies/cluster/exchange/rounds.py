"""Rounds of JSON messages, each of a given form, between processes."""

import json
from collections.abc import Callable
from typing import Any

from keras_strategies.cluster.exchange.host_exchange import (
    Agreement,
    IsStopped,
)
from keras_strategies.cluster.exchange.message_forms import Form, read_messages


class Rounds:
    """Sends a message in each round, and receives those of all processes.

        with Rounds(mesh.processes, "the time of a checkpoint") as rounds:
            received = rounds.exchange({"wait": 3}, {"wait": is_count})

    Args:
      processes: JAX's ids of the processes that take part.
      name: What they do together; the same in all, which is checked.
      about: What the messages are about, for errors; `name` if left out.
      is_stopped: See `Agreement.exchange`.
      agree: Makes the `Agreement`; tests have another.
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
          message: What JSON can hold; anything else in it is sent as a text.
          form: What each of them must be like.

        Raises:
          RuntimeError: one is not. `Agreement.exchange` says what else.
        """
        texts = self._agreement.exchange(
            json.dumps(message, default=str), self._is_stopped
        )
        return read_messages(
            texts, form, processes=self._processes, about=self._about
        )

"""The exchange of texts between the processes of a job, on the host.

Goes through the key-value store of JAX's coordination service, never through
the devices: so it may be called from any thread, at any time.
"""

import itertools
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from keras_strategies.cluster.addresses import shown
from keras_strategies.cluster.exchange.exit_codes import Stalled
from keras_strategies.cluster.exchange.greetings import readable
from keras_strategies.cluster.exchange.kv_store import client as _client
from keras_strategies.cluster.exchange.message_forms import (
    MAX_MESSAGE,
    Either,
    Form,
    read_messages,
)

TIMEOUT = "KERAS_STRATEGIES_TIMEOUT_S"
"""The environment variable that says how long to wait for other processes,
in seconds."""

_SLICE_MS = 250
_TIMEOUT_S = 600.0
# Later agreements after which nobody can still be hearing an ended one.
_NUM_KEPT = 64
# So many processes hear each other. Of more, the first hears all and tells
# all: reads of the store grow with their number, not with its square.
_MOST_RECEIVED_BY_ALL = 4
_SAME_CALLS = (
    "All processes must run the same calls of fit, evaluate, predict and of "
    "datasets in the same order, with as many epochs."
)
_CURE = "Look at the logs of all processes for the call that differs."
_ALL = "all"
_numbers = itertools.count()
# What this process waits for, by thread: a name and since when.
_waits: dict[int, tuple[str, float]] = {}
# Agreements by their numbers, each with what forgets its last round.
_ended: dict[int, Callable[[], None]] = {}
# What `limit_waiting` was given.
_limit_s: float | None = None
IsStopped = Callable[[], bool]


class Agreement:
    """Rounds in which every process sends a text and receives all others.

    All processes make their agreements in one order, and go through the
    rounds of each in one order.

    Args:
      processes: JAX's ids of the processes that take part.
      name: What it is about; the same in all, which is checked.
      timeout_s: How long to wait for the others in a round, in seconds; None
        for what `KERAS_STRATEGIES_TIMEOUT_S` says, else 600.
    """

    def __init__(
        self,
        processes: tuple[int, ...],
        name: str,
        *,
        timeout_s: float | None = None,
    ) -> None:
        self._processes = processes
        self._name = name
        self._timeout_s = waiting_limit_s() if timeout_s is None else timeout_s
        self._number = next(_numbers)
        self._round = 0
        forgotten = _ended.pop(self._number - _NUM_KEPT, None)
        if forgotten is not None:
            forgotten()

    def end(self) -> None:
        """Takes part in no further round; its messages stay a while."""
        last = self._round - 1
        if last >= 0:
            _ended[self._number] = lambda: self._forget(_client(), last)

    def exchange(
        self, text: str, is_stopped: IsStopped | None = None
    ) -> list[str]:
        """One round. Collective over the processes, not over the devices.

        Args:
          text: What this process says; short.
          is_stopped: Asked about a few times a second; True gives up waiting.

        Returns:
          What each process says, in the order of `processes`.

        Raises:
          ValueError: the processes are in different agreements; all raise.
          TimeoutError: a process said nothing in time; it is named.
          RuntimeError: a process said something else than this one would.
          InterruptedError: `is_stopped` said so.
        """
        client = _client()
        me = jax.process_index()
        number, self._round = self._round, self._round + 1
        # One that does not receive the others' in time has sent its own still:
        # they receive it as soon as they get here.
        sent = json.dumps([self._name, text])
        client.key_value_set(self._key(number, me), sent)
        thread = threading.get_ident()
        _waits[thread] = (self._name, time.monotonic())
        try:
            if len(self._processes) <= _MOST_RECEIVED_BY_ALL:
                received = self._receive_all(client, number, sent, is_stopped)
            elif me == self._processes[0]:
                received = self._send_to_all(client, number, sent, is_stopped)
            else:
                received = self._receive_from_first(client, number, is_stopped)
        finally:
            del _waits[thread]
        messages = self._read(received, (str, str), self._processes)
        names, texts = zip(*messages, strict=True)
        if len(set(names)) > 1:
            calls = ", ".join(
                f"{readable(name)} (process {process})"
                for process, name in zip(self._processes, names, strict=True)
            )
            raise ValueError(f"{_SAME_CALLS} Received: {calls}. {_CURE}")
        if number:
            # All have said something in this round, so all have heard all of
            # the last one.
            self._forget(client, number - 1)
        return list(texts)

    def _receive_all(
        self, client: Any, number: int, sent: str, is_stopped: IsStopped | None
    ) -> list[str]:
        me = jax.process_index()
        return [
            sent
            if process == me
            else self._receive(client, number, process, is_stopped)
            for process in self._processes
        ]

    def _send_to_all(
        self, client: Any, number: int, sent: str, is_stopped: IsStopped | None
    ) -> list[str]:
        try:
            received = self._receive_all(client, number, sent, is_stopped)
        except TimeoutError as error:
            client.key_value_set(
                self._key(number, _ALL), json.dumps(str(error))
            )
            raise
        client.key_value_set(self._key(number, _ALL), json.dumps(received))
        return received

    def _receive_from_first(
        self, client: Any, number: int, is_stopped: IsStopped | None
    ) -> list[str]:
        # The first may wait for another one, for as long as it may itself be
        # waited for.
        text = self._receive(
            client, number, _ALL, is_stopped, 2 * self._timeout_s
        )
        all_of_them = (str,) * len(self._processes)
        form = Either((str, all_of_them))
        (received,) = self._read([text], form, self._processes[:1])
        if isinstance(received, str):
            raise Stalled(received)
        return received

    def _read(
        self, texts: list[str], form: Form, processes: tuple[int, ...]
    ) -> list[Any]:
        return read_messages(
            texts,
            form,
            processes=processes,
            about=self._name,
            # A text in a text in a text: its quotes are written twice.
            max_characters=4 * MAX_MESSAGE * len(self._processes),
        )

    def _forget(self, client: Any, number: int) -> None:
        me = jax.process_index()
        client.key_value_delete(self._key(number, me))
        is_many = len(self._processes) > _MOST_RECEIVED_BY_ALL
        if is_many and me == self._processes[0]:
            client.key_value_delete(self._key(number, _ALL))

    def _receive(
        self,
        client: Any,
        number: int,
        process: int | str,
        is_stopped: IsStopped | None,
        timeout_s: float | None = None,
    ) -> str:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        end = time.monotonic() + timeout_s
        key = self._key(number, process)
        if process == _ALL:
            process = self._processes[0]
        while True:
            try:
                return client.blocking_key_value_get(key, _SLICE_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if is_stopped is not None and is_stopped():
                raise InterruptedError
            if time.monotonic() > end:
                raise Stalled(
                    f"Process {process} did not take part in {self._name} "
                    f"within {timeout_s:.0f} s. {_SAME_CALLS} Received: "
                    f"nothing from process {process} in round {number}. "
                    f"{_CURE} If it has no error and needs longer (to read "
                    f"its data), set the environment variable {TIMEOUT} to "
                    "more seconds."
                )

    def _key(self, number: int, process: int | str) -> str:
        return f"keras_strategies/{self._number}/{number}/{process}"


def longest_wait() -> tuple[str, float]:
    """What this process waits for others in, and for how many seconds.

    The name of the agreement that waits longest; "" and 0.0 for none.
    """
    now = time.monotonic()
    waits = [(now - since, name) for name, since in list(_waits.values())]
    seconds, name = max(waits, default=(0.0, ""))
    return name, seconds


def limit_waiting(seconds: float) -> None:
    """Says how long to wait for other processes, in place of the environment.

    Args:
      seconds: A positive number; of this process, for all of its strategies.
    """
    global _limit_s
    _limit_s = seconds


def waiting_limit_s() -> float:
    """How long to wait for other processes, in seconds.

    Raises:
      ValueError: the environment variable is no positive number.
    """
    if _limit_s is not None:
        return _limit_s
    text = os.environ.get(TIMEOUT, str(_TIMEOUT_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(
            f"The environment variable {TIMEOUT} is a positive number of "
            f"seconds. Received: {shown(text)}. Leave it out for "
            f"{_TIMEOUT_S:.0f}."
        )
    return seconds

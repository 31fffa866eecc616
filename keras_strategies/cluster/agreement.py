"""What the processes of a job tell each other on the host.

Goes through the key-value store of JAX's coordination service, never through
the devices: so it may be called from any thread, at any time. JAX has no
public name for the store's client; this is its only user.
"""

import itertools
import time
from collections.abc import Callable
from typing import Any

import jax

_SLICE_MS = 1000
_TIMEOUT_S = 600.0
_numbers = itertools.count()


class Agreement:
    """Rounds in which every process says a text and hears all the others.

    All processes make their agreements in one order, and go through the
    rounds of each in one order.

    Args:
      processes: JAX's ids of the processes that take part.
      name: What it is about, for messages.
      timeout_s: How long to wait for the others in a round, in seconds.
    """

    def __init__(
        self,
        processes: tuple[int, ...],
        name: str,
        *,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self._processes = processes
        self._name = name
        self._timeout_s = timeout_s
        self._number = next(_numbers)
        self._round = 0

    def exchange(
        self, text: str, is_stopped: Callable[[], bool] | None = None
    ) -> list[str]:
        """One round. Collective over the processes, not over the devices.

        Args:
          text: What this process says; short.
          is_stopped: Asked about once a second; True gives up waiting.

        Returns:
          What each process says, in the order of `processes`.

        Raises:
          TimeoutError: a process said nothing in time; it is named.
          InterruptedError: `is_stopped` said so.
        """
        client = _client()
        me = jax.process_index()
        number, self._round = self._round, self._round + 1
        client.key_value_set(self._key(number, me), text)
        heard = []
        for process in self._processes:
            if process == me:
                heard.append(text)
                continue
            heard.append(self._hear(client, number, process, is_stopped))
        if number:
            # All have said something in this round, so all have heard all of
            # the last one.
            client.key_value_delete(self._key(number - 1, me))
        return heard

    def _hear(
        self,
        client: Any,
        number: int,
        process: int,
        is_stopped: Callable[[], bool] | None,
    ) -> str:
        end = time.monotonic() + self._timeout_s
        key = self._key(number, process)
        while True:
            try:
                return client.blocking_key_value_get(key, _SLICE_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if is_stopped is not None and is_stopped():
                raise InterruptedError
            if time.monotonic() > end:
                raise TimeoutError(
                    f"Process {process} did not take part in {self._name} "
                    f"within {self._timeout_s:.0f} s, round {number}. All "
                    "processes must run the same calls of fit, evaluate, "
                    "predict and of datasets in the same order. Look at the "
                    f"log of process {process}."
                )

    def _key(self, number: int, process: int) -> str:
        return f"keras_strategies/{self._number}/{number}/{process}"


def is_available() -> bool:
    """Whether this process is part of a job of `jax.distributed`."""
    return jax.distributed.is_initialized()


def _client() -> Any:
    from jax._src import distributed

    client = distributed.global_state.client
    if client is None:
        raise RuntimeError(
            "Several processes need JAX's coordination service. Received: a "
            "strategy over their devices without it. Call "
            "`jax.distributed.initialize` first."
        )
    return client

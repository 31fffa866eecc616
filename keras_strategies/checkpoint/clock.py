"""A timer for checkpoints, the same in all processes."""

import math
import time
from typing import Any

from keras_strategies.cluster.exchange.message_forms import is_count
from keras_strategies.cluster.exchange.rounds import Rounds

_ANSWER = {"is_due": bool, "wait": is_count}


class Clock:
    """When it is time to save, the same in all processes.

    The chief's clock decides. The others receive it where all ask, which is
    at steps that the chief chooses by how long steps take: so one or two
    questions are asked for each save.

    Args:
      seconds: Between saves.
      step: The number of steps done.
      processes: JAX's ids of the processes.
    """

    def __init__(
        self, seconds: float, step: int, processes: tuple[int, ...]
    ) -> None:
        self._seconds = seconds
        self._processes = processes
        self.restart(step)

    def restart(self, step: int) -> None:
        """A checkpoint was saved."""
        self._begun = self._asked_at = time.monotonic()
        self._asked = step
        self._next = step + 1
        self.is_waiting = False

    def is_due(self, step: int) -> bool:
        """Whether to save after this step. Collective."""
        if self.is_waiting or step < self._next:
            return self.is_waiting
        now = time.monotonic()
        left = self._begun + self._seconds - now
        per_step = (now - self._asked_at) / max(step - self._asked, 1)
        # Steps may get slower: not more than twice as many as were measured.
        most = 2 * (step - self._asked)
        wait = min(most, math.ceil(left / max(per_step, 1e-6)))
        answer = self._agreed({"is_due": left <= 0, "wait": max(wait, 1)})
        self._asked, self._asked_at = step, now
        self._next = step + answer["wait"]
        self.is_waiting = answer["is_due"]
        return self.is_waiting

    def _agreed(self, answer: dict[str, Any]) -> dict[str, Any]:
        if len(self._processes) == 1:
            # Looking at the clock costs nothing.
            return answer | {"wait": 1}
        with Rounds(self._processes, "the time of a checkpoint") as rounds:
            return rounds.exchange(answer, _ANSWER)[0]

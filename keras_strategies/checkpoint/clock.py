"""A timer by which all processes save checkpoints after the same step."""

import math
import time
from typing import Any

from keras_strategies.cluster.exchange.message_forms import is_count
from keras_strategies.cluster.exchange.rounds import Rounds

_ANSWER = {"is_due": bool, "wait": is_count}


class Clock:
    """A timer that makes all processes save after the same step.

    The chief's clock decides when to save. The processes do not exchange
    messages at every step: in each exchange the chief announces after which
    step the next exchange takes place. It estimates this step from the measured
    duration of a step, so only one or two exchanges are needed for each save.

    Args:
      seconds: The time between saves, in seconds.
      step: The number of steps completed so far.
      processes: JAX's ids of the processes.
    """

    def __init__(
        self, seconds: float, step: int, processes: tuple[int, ...]
    ) -> None:
        self._seconds = seconds
        self._processes = processes
        self.restart(step)

    def restart(self, step: int) -> None:
        """Restarts the timer after a save."""
        self._begun = self._asked_at = time.monotonic()
        self._asked = step
        self._next = step + 1
        self.is_waiting = False

    def is_due(self, step: int) -> bool:
        """Returns whether to save after this step. Collective."""
        if self.is_waiting or step < self._next:
            return self.is_waiting
        now = time.monotonic()
        left = self._begun + self._seconds - now
        per_step = (now - self._asked_at) / max(step - self._asked, 1)
        # The estimate may be wrong if the duration of steps changes. So the
        # number of steps until the next exchange is at most twice the number of
        # steps that were measured.
        maximum = 2 * (step - self._asked)
        wait = min(maximum, math.ceil(left / max(per_step, 1e-6)))
        answer = self._agree({"is_due": left <= 0, "wait": max(wait, 1)})
        self._asked, self._asked_at = step, now
        self._next = step + answer["wait"]
        self.is_waiting = answer["is_due"]
        return self.is_waiting

    def _agree(self, answer: dict[str, Any]) -> dict[str, Any]:
        if len(self._processes) == 1:
            # A single process exchanges nothing, so it reads its clock at every
            # step.
            return answer | {"wait": 1}
        with Rounds(self._processes, "the time of a checkpoint") as rounds:
            return rounds.exchange(answer, _ANSWER)[0]

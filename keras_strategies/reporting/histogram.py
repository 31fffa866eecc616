"""A histogram of durations, of bounded size."""

import collections
import math

_WIDTH = math.log(1.01)
_LEAST_S = 1e-7
_MOST_S = 1e7


class Histogram:
    """Counts durations, each rounded to 0.5 %."""

    def __init__(self) -> None:
        self._counts = collections.Counter[int]()

    def add(self, seconds: float, count: int) -> None:
        """Adds a duration that occurred `count` times."""
        clipped = min(max(seconds, _LEAST_S), _MOST_S)
        self._counts[round(math.log(clipped) / _WIDTH)] += count

    def find_quantile(self, share: float) -> float | None:
        """Returns the least duration that `share` of all do not exceed.

        Returns None if there are no durations.
        """
        left = share * sum(self._counts.values())
        for bucket, count in sorted(self._counts.items()):
            left -= count
            if left <= 0:
                return math.exp(bucket * _WIDTH)
        return None

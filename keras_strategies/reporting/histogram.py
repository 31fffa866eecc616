"""A histogram of durations, of bounded size."""

import collections
import math

import numpy as np

_WIDTH = math.log(1.01)
_LEAST_S = 1e-7
_MOST_S = 1e7
_MOST_NEW = 4096


class Histogram:
    """Counts durations, each rounded to 0.5 %."""

    def __init__(self) -> None:
        self._counts = collections.Counter[int]()
        self._new: list[tuple[float, int]] = []

    def add(self, seconds: float, count: int) -> None:
        """Adds a duration that occurred `count` times."""
        self._new.append((seconds, count))
        if len(self._new) >= _MOST_NEW:
            self._sort_new()

    def _sort_new(self) -> None:
        new, self._new = self._new, []
        if not new:
            return
        seconds = np.clip([one[0] for one in new], _LEAST_S, _MOST_S)
        buckets = np.rint(np.log(seconds) / _WIDTH).astype(int).tolist()
        for bucket, (_, count) in zip(buckets, new, strict=True):
            self._counts[bucket] += count

    def find_quantile(self, share: float) -> float | None:
        """Returns the least duration that `share` of all do not exceed.

        Returns None if there are no durations.
        """
        self._sort_new()
        left = share * sum(self._counts.values())
        for bucket, count in sorted(self._counts.items()):
            left -= count
            if left <= 0:
                return math.exp(bucket * _WIDTH)
        return None

"""The most rows that fit: a search whose steps are compilations."""

import math
from collections.abc import Callable

_MOST_ROWS = 2**24
_NARROW = 8
_PARTS = 16
_BEYOND = 1.02

Try = Callable[[int], tuple[bool, float | None]]
"""Whether so many rows fit, and the bytes that they need, if known."""


def find_edge(
    guess: int, limit: float, fits: Try, most_tries: int
) -> tuple[int, bool]:
    """The most rows that fit, and one more that does not.

    Bytes are nearly a line in the rows, so the line between the two ends of
    what is left is followed, and what it leaves is halved in the end.

    Args:
      guess: Where the search begins.
      limit: The bytes that there are.
      fits: Tries a number of rows.
      most_tries: After so many the search ends.

    Returns:
      The most rows that were seen to fit, and whether one more was tried,
      which does not.
    """
    low, of_low = 0, 0.0
    high: int | None = None
    of_high: float | None = None
    tried = min(max(guess, 1), _MOST_ROWS)
    for _ in range(most_tries):
        is_fitting, needed = fits(tried)
        if is_fitting:
            low, of_low = tried, limit / 2 if needed is None else needed
        else:
            high, of_high = tried, needed
        if high is None:
            if low >= _MOST_ROWS:
                break
            more = low * limit / max(of_low, 1.0) * _BEYOND
            tried = min(max(math.ceil(more), low + 1), _MOST_ROWS)
            continue
        if high - low == 1:
            return low, True
        tried = _between(low, of_low, high, of_high, limit)
    return low, False


def _between(
    low: int, of_low: float, high: int, of_high: float | None, limit: float
) -> int:
    """Where to look between rows that fit and rows that do not."""
    width = high - low
    if width <= _NARROW or of_high is None or of_high <= max(of_low, limit):
        return (low + high) // 2
    share = (limit - of_low) / (of_high - of_low)
    margin = max(width // _PARTS, 1)
    wanted = low + math.floor(share * width)
    return min(max(wanted, low + margin), high - margin)

"""The steps of a training loop that JAX's profiler traces, as text."""

import re
from collections.abc import Mapping

STEPS = "KERAS_STRATEGIES_PROFILE"
"""The environment variable with the steps that each fit traces."""

_STEPS = re.compile(r"(?P<first>\d{1,9})(:(?P<last>\d{1,9}))?", re.ASCII)
_MOST_STEPS = 1000


def parse_steps(steps: object, name: str) -> tuple[int, int] | None:
    """Returns the first and the last step of a text such as "10:13".

    Args:
      steps: The text: a step, or two with a colon between them. None for None.
      name: The name of the argument or variable, for errors.

    Raises:
      ValueError: if the text is not valid.
    """
    if steps is None:
        return None
    match = _STEPS.fullmatch(steps) if isinstance(steps, str) else None
    if match is not None:
        first, last = int(match["first"]), int(match["last"] or match["first"])
        if 0 < first <= last < first + _MOST_STEPS:
            return first, last
    raise ValueError(
        f"{name} must be the first and the last step to trace, counted from 1 "
        f"at the start of the fit, at most {_MOST_STEPS:,} steps. Received: "
        f"{steps!r:.100}. Pass, for example, '10:13'."
    )


def read_steps(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """Returns the first and the last step in the environment variable.

    Returns None if it is not set, or is empty.

    Raises:
      ValueError: if the variable is not valid.
    """
    return parse_steps(environ.get(STEPS) or None, STEPS)

"""Random states of a call, which leave those of the caller as they were."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np

_LIMIT = 2**32


@contextlib.contextmanager
def seeded(seed: int | None) -> Iterator[None]:
    """A context in which Keras draws from a seed.

    Initial weights, dropout and the order of rows come from the states of
    Python and numpy. After it they are what they were before: an evaluation
    in between changes nothing of a training.

    Args:
      seed: The seed; None to resume from the caller's states, and to move
        them on.
    """
    if seed is None:
        yield
        return
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % _LIMIT)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


@contextlib.contextmanager
def untouched() -> Iterator[None]:
    """A context after which the random states are what they were before."""
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])

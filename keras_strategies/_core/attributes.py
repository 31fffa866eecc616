"""Attributes that have another value for a while."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def attribute_set(owner: object, name: str, value: object) -> Iterator[None]:
    """Sets an attribute while the block runs, and what it was after it."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)

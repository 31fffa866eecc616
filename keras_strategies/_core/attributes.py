"""Attributes that have another value for a while."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def attribute_set(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute while the block runs, and what it was after it."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)

"""Temporary values of objects' attributes."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def temporary_attribute(
    owner: object, name: str, value: object
) -> Iterator[None]:
    """Sets an attribute while a `with` block runs, then restores it."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)

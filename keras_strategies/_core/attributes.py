"""Sets attributes temporarily."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def temporary_attribute(
    owner: object, name: str, value: object
) -> Iterator[None]:
    """Sets an attribute for the duration of a block, then restores it."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)

"""Containers keyed by the identity of objects, and temporary attributes.

`==` compares traced arrays and Keras variables entry by entry, so they cannot
be keys of a dict. These containers compare keys by `id` and keep them alive, so
that Python cannot reuse the id of a key for another object.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

V = TypeVar("V")


class IdentityMap(Generic[V]):
    """A dict whose keys are compared by `is`, in the order of insertion.

    Args:
      items: Pairs of a key and its value.
    """

    def __init__(self, items: Iterable[tuple[Any, V]] = ()) -> None:
        self._items = {id(pair[0]): pair for pair in items}

    def __setitem__(self, key: object, value: V) -> None:
        self._items[id(key)] = key, value

    def __getitem__(self, key: object) -> V:
        return self._items[id(key)][1]

    def __contains__(self, key: object) -> bool:
        return id(key) in self._items

    def __iter__(self) -> Iterator[Any]:
        return (key for key, _ in self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: object, default: V | None = None) -> V | None:
        """Returns the value of a key, or `default` if the key is missing."""
        return self._items.get(id(key), (key, default))[1]


class IdentitySet(IdentityMap[None]):
    """A set whose members are compared by `is`.

    Args:
      members: The initial members.
    """

    def __init__(self, members: Iterable[Any] = ()) -> None:
        super().__init__((member, None) for member in members)

    def add(self, member: object) -> None:
        """Adds an object."""
        self[member] = None

    def update(self, members: Iterable[Any]) -> None:
        """Adds several objects."""
        for member in members:
            self.add(member)


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

"""Methods of Keras that are wrapped while somebody needs it."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Patch = tuple[Any, str, Callable[[Any], Any]]
"""A class or module, the name of an attribute, and what wraps its value."""

_lock = threading.RLock()


class Patches:
    """Attributes of classes and modules that are wrapped while they are held.

    They are the whole process's: a wrapper asks what its own thread is in.

    Args:
      find: Makes the patches, of the arguments of `held`.
    """

    def __init__(self, find: Callable[..., Iterable[Patch]]) -> None:
        self._find = find
        self._holders = 0
        # Where, its name, the wrapper, and what was there; None: a base's.
        self._patched: list[tuple[Any, str, Any, Any]] = []

    @contextlib.contextmanager
    def held(self, *args: object) -> Iterator[None]:
        """Holds the patches for a block; the first holder's arguments count."""
        with _lock:
            if self._holders == 0:
                for owner, name, wrap in self._find(*args):
                    own = vars(owner).get(name)
                    wrapper = wrap(
                        getattr(owner, name, None) if own is None else own
                    )
                    setattr(owner, name, wrapper)
                    self._patched.append((owner, name, wrapper, own))
            self._holders += 1
        try:
            yield
        finally:
            with _lock:
                self._holders -= 1
                if self._holders == 0:
                    self._restore()

    def _restore(self) -> None:
        while self._patched:
            owner, name, wrapper, own = self._patched.pop()
            # What somebody else has put there since is theirs.
            if vars(owner).get(name) is not wrapper:
                continue
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

"""Reference-counted patches of Keras's attributes."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Patch = tuple[Any, str, Callable[[Any], Any]]
"""A class or module, an attribute's name, and the wrapper of its value."""

_lock = threading.RLock()


class Patches:
    """Attributes of classes and modules that are wrapped while they are held.

    Patches affect all threads of the process, so a wrapper must check the
    state of the thread that calls it.

    Args:
      find: Returns the patches, from the arguments of `hold`.
    """

    def __init__(self, find: Callable[..., Iterable[Patch]]) -> None:
        self._find = find
        self._holders = 0
        # Owner, name, wrapper, previous value (None if it was inherited).
        self._patched: list[tuple[Any, str, Any, Any]] = []

    @contextlib.contextmanager
    def hold(self, *args: object) -> Iterator[None]:
        """Holds the patches for a block; only the first holder's args count."""
        with _lock:
            if self._holders == 0:
                for owner, name, wrap in self._find(*args):
                    previous = vars(owner).get(name)
                    wrapper = wrap(
                        getattr(owner, name, None)
                        if previous is None
                        else previous
                    )
                    setattr(owner, name, wrapper)
                    self._patched.append((owner, name, wrapper, previous))
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
            owner, name, wrapper, previous = self._patched.pop()
            # Another library has patched it since: leave that in place.
            if vars(owner).get(name) is not wrapper:
                continue
            if previous is None:
                delattr(owner, name)
            else:
                setattr(owner, name, previous)

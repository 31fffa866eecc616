"""Temporary patches of Keras's classes and modules, shared by threads."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Patch = tuple[Any, str, Callable[[Any], Any]]
"""A class or module, the name of an attribute, and a function that wraps the
attribute's value."""

_lock = threading.RLock()


class Patches:
    """Patches of classes and modules, in effect inside `with` blocks of `hold`.

    Several threads may be in such blocks at the same time. The first thread
    installs the patches, and the last removes them. Patches affect all threads
    of the process, so a wrapper must check the state of the thread that calls
    it.

    Args:
      find: A function that receives the arguments of `hold` and returns the
        patches.
    """

    def __init__(self, find: Callable[..., Iterable[Patch]]) -> None:
        self._find = find
        self._holders = 0
        # Each entry is the owner, the attribute's name, the wrapper, and the
        # previous value (None if the attribute was inherited).
        self._patched: list[tuple[Any, str, Any, Any]] = []

    @contextlib.contextmanager
    def hold(self, *args: object) -> Iterator[None]:
        """Installs the patches while the block runs.

        If the patches are installed already, the arguments are ignored.
        """
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
            # If another library has patched the attribute in the meantime, its
            # patch is left in place.
            if vars(owner).get(name) is not wrapper:
                continue
            if previous is None:
                delattr(owner, name)
            else:
                setattr(owner, name, previous)

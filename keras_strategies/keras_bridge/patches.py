"""Temporary patches of Keras's classes and modules."""

import contextlib
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
from keras.src.utils import file_utils

Patch = tuple[Any, str, Callable[[Any], Any]]
"""A class or module, the name of an attribute, and a function that wraps the
attribute's value."""

_lock = threading.RLock()


def replacement(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Makes a function wrap the attribute's value that it replaces.

    Args:
      function: A function of this value and of the arguments of its calls.
    """

    def wrap(original: Any) -> Callable[..., Any]:
        @functools.wraps(original)
        def replace(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        return replace

    return wrap


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
                    wrapper = wrap(getattr(owner, name, None))
                    previous = vars(owner).get(name)
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


def skip_weights() -> list[tuple[Any, str, Any]]:
    """Returns replacements of Keras's functions that load weights.

    With them, `load_weights` does nothing, and `get_file` returns the path of a
    weight file, such as those of `keras.applications`, without downloading the
    file. Models are created as usual.

    Returns:
      Triples of a class or module, the name of its attribute, and the value.
    """
    get_file = _get_file(keras.utils.get_file)
    return [
        (keras.utils, "get_file", get_file),
        (file_utils, "get_file", get_file),
        (keras.Model, "load_weights", lambda *args, **kwargs: None),
        (keras.saving, "load_weights", lambda *args, **kwargs: None),
    ]


@replacement
def _get_file(original: Callable[..., str], *args: Any, **kwargs: Any) -> str:
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    origin = str(given.get("origin"))
    name = os.path.basename(str(given.get("fname") or origin))
    is_application = "/keras-applications/" in origin and name.endswith(".h5")
    if is_application or name.endswith(".weights.h5"):
        return name
    return original(*args, **kwargs)

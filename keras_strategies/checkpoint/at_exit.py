"""A wait for unfinished saves when Python ends.

A script may end right after a save. Python lets no thread start others then,
which Orbax needs: so what is being saved is waited for before that.
"""

import functools
import importlib
import logging
import os
import threading
import weakref
from typing import Protocol

_logger = logging.getLogger(__name__)


class _Saving(Protocol):
    def wait(self) -> None: ...


def wait_at_exit(storage: _Saving) -> None:
    """Waits for its save when Python ends, and reports an error."""
    _register()
    _open.add(storage)


_open: weakref.WeakSet[_Saving] = weakref.WeakSet()


@functools.cache
def _register() -> None:
    """Has Python wait for them before it ends its pools of threads.

    `atexit` comes after these, which `concurrent.futures` ends by what it has
    registered here when it was imported. The last that registered is first.
    """
    importlib.import_module("concurrent.futures.thread")
    threading._register_atexit(_wait_for_all)  # pyright: ignore
    if hasattr(os, "register_at_fork"):
        # What a parent's threads do, a child would wait for in vain.
        os.register_at_fork(after_in_child=_open.clear)


def _wait_for_all() -> None:
    for storage in list(_open):
        try:
            storage.wait()
        except Exception:
            _logger.exception("A checkpoint could not be saved.")

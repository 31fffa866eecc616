"""Waiting for pending saves when Python exits.

A script may end right after it has started a save. Late during exit, Python no
longer lets threads start other threads, which Orbax needs to do. So Python is
made to wait for pending saves before that point.
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
    """Makes exit wait for a pending save, and log an error if it fails."""
    _register()
    _open.add(storage)


_open: weakref.WeakSet[_Saving] = weakref.WeakSet()


@functools.cache
def _register() -> None:
    """Registers a function to run before Python shuts down its thread pools.

    `atexit` handlers run too late: `concurrent.futures` shuts down its pools
    in a function that it registers with `threading._register_atexit` on
    import. These functions run in reverse order of registration, so
    `concurrent.futures` must be imported first.
    """
    importlib.import_module("concurrent.futures.thread")
    threading._register_atexit(_wait_for_all)  # pyright: ignore
    if hasattr(os, "register_at_fork"):
        # A forked child does not have its parent's threads: it would wait
        # forever for a save that they were running.
        os.register_at_fork(after_in_child=_open.clear)


def _wait_for_all() -> None:
    for storage in list(_open):
        try:
            storage.wait()
        except Exception:
            _logger.exception("A checkpoint could not be saved.")

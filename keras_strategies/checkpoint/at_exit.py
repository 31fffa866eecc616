"""Waiting for saves when Python ends.

A script may end right after a save. Python lets no thread start others then,
which Orbax needs: so what is being saved is waited for before that.
"""

import functools
import importlib
import logging
import threading
import weakref
from typing import Protocol

_logger = logging.getLogger(__name__)


class _Closing(Protocol):
    def close(self) -> None: ...


def close_at_exit(storage: _Closing) -> None:
    """Closes it when Python ends, if it is still there, and tells of errors."""
    _register()
    _open.add(storage)


_open: weakref.WeakSet[_Closing] = weakref.WeakSet()


@functools.cache
def _register() -> None:
    """Has Python close them before its pools of threads.

    `atexit` comes after these, which `concurrent.futures` ends by what it has
    registered here when it was imported. The last that registered is first.
    """
    importlib.import_module("concurrent.futures.thread")
    threading._register_atexit(_close_all)  # pyright: ignore


def _close_all() -> None:
    for storage in list(_open):
        try:
            storage.close()
        except Exception:
            _logger.exception("A checkpoint could not be saved.")

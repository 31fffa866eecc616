"""Stubs that prevent a planned script from reading or writing checkpoints."""

import os
from collections.abc import Callable
from typing import Any

from keras_strategies import checkpoint as lib
from keras_strategies.estimator import exporting, train_callback

Patch = tuple[Any, str, Any]
"""A class or module, the name of an attribute, and the attribute's stub."""

_OF_MANAGER = ("save", "restore_or_initialize", "restore", "wait", "close")


def patches() -> list[Patch]:
    """Returns the stubs that replace the reading and writing of checkpoints."""
    checkpoint, kept = lib.Checkpoint, lib.CheckpointManager
    return [
        (lib, "latest_checkpoint", _do_nothing),
        (lib, "load_weights", _do_nothing),
        *((checkpoint, name, _get_prefix) for name in ("save", "write")),
        (checkpoint, "restore", _make_restored),
        (kept, "__init__", _init_manager),
        (kept, "directory", property(lambda self: self._ks_directory)),
        (kept, "latest_checkpoint", property(_do_nothing)),
        (kept, "checkpoints", property(lambda self: [])),
        *((kept, name, _do_nothing) for name in _OF_MANAGER),
        (train_callback, "share_progress", _make_progress),
        (exporting, "write_features", _do_nothing),
    ]


class Restored:
    """A stand-in for the status object that `Checkpoint.restore` returns."""

    def __getattr__(self, name: str) -> Callable[..., "Restored"]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self


def _do_nothing(*args: object, **kwargs: object) -> None:
    pass


def _get_prefix(
    checkpoint: object, file_prefix: str | os.PathLike[str], *args: object
) -> str:
    return os.fspath(file_prefix)


def _make_restored(*args: object, **kwargs: object) -> Restored:
    return Restored()


def _init_manager(
    manager: Any,
    checkpoint: object,
    directory: str | os.PathLike[str] = "",
    **kwargs: object,
) -> None:
    manager._ks_directory = os.fspath(directory)


def _make_progress(*args: object) -> train_callback.Progress:
    return train_callback.Progress()

"""Files that a planned script neither reads nor writes: its checkpoints."""

import os
from collections.abc import Callable
from typing import Any

from keras_strategies import checkpoint as lib
from keras_strategies.estimator import exporting, train_callback

Patch = tuple[Any, str, Any]
"""A class or module, the name of an attribute, and its value meanwhile."""

_OF_MANAGER = ("save", "restore_or_initialize", "restore", "wait", "close")


def patches() -> list[Patch]:
    """What is in the place of checkpoints, and of an Estimator's directory."""
    checkpoint, kept = lib.Checkpoint, lib.CheckpointManager
    return [
        (lib, "latest_checkpoint", _nothing),
        (lib, "load_weights", _nothing),
        *((checkpoint, name, _prefix) for name in ("save", "write")),
        (checkpoint, "restore", _restored),
        (kept, "__init__", _manage),
        (kept, "directory", property(lambda self: self._ks_directory)),
        (kept, "latest_checkpoint", property(_nothing)),
        (kept, "checkpoints", property(lambda self: [])),
        *((kept, name, _nothing) for name in _OF_MANAGER),
        (train_callback, "progress_of_all", _no_progress),
        (exporting, "note_features", _nothing),
    ]


class Restored:
    """The status of a checkpoint that was not read."""

    def __getattr__(self, name: str) -> Callable[..., "Restored"]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self


def _nothing(*args: object, **kwargs: object) -> None:
    pass


def _prefix(
    checkpoint: object, file_prefix: str | os.PathLike[str], *args: object
) -> str:
    return os.fspath(file_prefix)


def _restored(*args: object, **kwargs: object) -> Restored:
    return Restored()


def _manage(
    manager: Any,
    checkpoint: object,
    directory: str | os.PathLike[str] = "",
    **kwargs: object,
) -> None:
    manager._ks_directory = os.fspath(directory)


def _no_progress(*args: object) -> train_callback.Progress:
    return train_callback.Progress()

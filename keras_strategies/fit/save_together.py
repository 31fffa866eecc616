"""Saves models in jobs of several processes.

If no process has all shards of a variable, reading it is a collective operation
in which all processes take part, and only the chief writes to the user's path.
Otherwise each process writes its file, often to the same path.
"""

import functools
import os
import pathlib
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable
from typing import Any

import keras

from keras_strategies.spmd.mesh import ReplicaMesh

SAVERS = ("save", "save_weights")


def make_saves_safe(
    model: keras.Model, mesh: ReplicaMesh, adopt: Callable[[], None]
) -> None:
    """Makes `save` and `save_weights` safe in jobs of several processes.

    They are collective if the variables are sharded over processes. Otherwise,
    several processes may save to the same file at the same time. Nothing
    changes in a single process, and for methods that a subclass overrides if
    they need not be collective.

    Args:
      model: The model; the attributes `save` and `save_weights` are set on it.
      mesh: The mesh of its strategy's replicas.
      adopt: A function that moves variables that were created outside of the
        strategy's scope to its devices.
    """
    if mesh.num_processes == 1:
        return
    for name in SAVERS:
        method = getattr(type(model), name)
        if mesh.spreads_shards:
            save = functools.partial(_save_together, model, name, mesh, adopt)
        elif method is getattr(keras.Model, name):
            save = functools.partial(_save_whole, model, name)
        else:
            continue
        functools.update_wrapper(save, method)
        object.__setattr__(model, name, save)


def _save_together(
    model: keras.Model,
    name: str,
    mesh: ReplicaMesh,
    adopt: Callable[[], None],
    /,
    filepath: str | os.PathLike[str],
    *args: Any,
    **kwargs: Any,
) -> None:
    adopt()
    save = functools.partial(getattr(type(model), name), model)
    if mesh.is_chief:
        save(filepath, *args, **kwargs)
        return
    # By saving to a temporary file, this process takes part in the same
    # collective reads as the chief, in the same order. The file is discarded.
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder) / pathlib.Path(filepath).name
        save(scratch, *args, **kwargs)


def _save_whole(
    model: keras.Model,
    name: str,
    /,
    filepath: Any,
    overwrite: bool = True,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Saves to a scratch file, which then replaces the user's.

    So a file that several processes save at the same time is complete.
    """
    save = functools.partial(getattr(type(model), name), model)
    suffix = _find_suffix(name, filepath)
    is_one_file = (
        suffix is not None
        and not args
        and kwargs.get("zipped") in (None, True)
        and kwargs.get("max_shard_size") is None
    )
    if not is_one_file or not _can_replace(filepath, overwrite):
        save(filepath, overwrite, *args, **kwargs)
        return
    path = pathlib.Path(os.path.realpath(filepath))
    scratch = path.with_name(f".{uuid.uuid4().hex}{suffix}")
    try:
        save(scratch, **kwargs)
        if path.exists():
            shutil.copymode(path, scratch)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _find_suffix(name: str, filepath: object) -> str | None:
    """Returns the suffix by which Keras knows the format, or None."""
    if not isinstance(filepath, str | os.PathLike):
        return None
    known = (".keras", ".h5", ".hdf5") if name == "save" else (".weights.h5",)
    return next((x for x in known if str(filepath).endswith(x)), None)


def _can_replace(filepath: str | os.PathLike[str], overwrite: bool) -> bool:
    """Returns whether replacing a file has the effect of writing to it."""
    path = os.path.realpath(filepath)
    if not os.access(os.path.dirname(path), os.W_OK | os.X_OK):
        return False
    if not os.path.exists(path):
        return True
    found = os.stat(path)
    return (
        overwrite
        and stat.S_ISREG(found.st_mode)
        and os.access(path, os.W_OK)
        and found.st_nlink == 1
        and found.st_uid == os.geteuid()
    )

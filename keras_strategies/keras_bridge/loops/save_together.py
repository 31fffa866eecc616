"""Saves models in jobs of several processes.

If no process has all shards of a variable, reading it is a collective operation
in which all processes take part, and only the chief writes to the user's path.
Otherwise each process writes its file, often to the same path.
"""

import functools
import os
import pathlib
import tempfile
import uuid
from collections.abc import Callable
from typing import Any

import keras

from keras_strategies._core.mesh import ReplicaMesh

SAVERS = ("save", "save_weights")


def make_saves_safe(
    model: keras.Model, mesh: ReplicaMesh, adopt: Callable[[], None]
) -> None:
    """Makes `save` and `save_weights` safe in jobs of several processes.

    They are collective if the variables are sharded over processes. All
    processes may save to the same path at the same time. Nothing changes in a
    single process.

    Args:
      model: The model; the attributes `save` and `save_weights` are set on it.
      mesh: The mesh of its strategy's replicas.
      adopt: A function that moves variables that were created outside of the
        strategy's scope to its devices.
    """
    if mesh.num_processes == 1:
        return
    for name in SAVERS:
        save = functools.partial(_save, model, name, mesh, adopt)
        functools.update_wrapper(save, getattr(type(model), name))
        object.__setattr__(model, name, save)


def _save(
    model: keras.Model,
    name: str,
    mesh: ReplicaMesh,
    adopt: Callable[[], None],
    filepath: str | os.PathLike[str],
    *args: Any,
    **kwargs: Any,
) -> None:
    method = getattr(type(model), name)
    save = functools.partial(method, model)
    if mesh.spreads_shards:
        adopt()
    if mesh.spreads_shards and not mesh.is_chief:
        # By saving to a temporary file, this process takes part in the same
        # collective reads as the chief, in the same order. The file is
        # discarded.
        with tempfile.TemporaryDirectory() as folder:
            scratch = pathlib.Path(folder) / pathlib.Path(filepath).name
            save(scratch, *args, **kwargs)
    elif method is getattr(keras.Model, name) and _is_replaceable(
        filepath, *args, **kwargs
    ):
        _replace(save, filepath, **kwargs)
    else:
        save(filepath, *args, **kwargs)


def _is_replaceable(filepath: object, *args: Any, **kwargs: Any) -> bool:
    """Returns whether Keras would write one local file, without a question."""
    if args or not isinstance(filepath, str | os.PathLike):
        return False
    path = str(filepath)
    return (
        path.endswith((".keras", ".h5", ".hdf5"))
        and os.path.isdir(os.path.dirname(path) or ".")
        and bool(kwargs.get("overwrite", True))
        and kwargs.get("zipped") is not False
        and kwargs.get("max_shard_size") is None
    )


def _replace(
    save: Callable[..., None], filepath: str | os.PathLike[str], **kwargs: Any
) -> None:
    """Saves to another file, which then replaces the user's.

    So a file that several processes save at the same time is complete.
    """
    path = pathlib.Path(os.path.realpath(filepath))
    scratch = path.with_name(f".{uuid.uuid4().hex}-{path.name}")
    try:
        save(scratch, **kwargs)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)

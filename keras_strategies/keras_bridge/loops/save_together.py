"""Saves models collectively if their variables are sharded over processes.

No process has all shards, so reading a variable is a collective operation in
which all processes take part. Only the chief writes to the user's path.
"""

import functools
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import keras

from keras_strategies._core.mesh import ReplicaMesh

SAVERS = ("save", "save_weights")


def make_saves_collective(
    model: keras.Model, mesh: ReplicaMesh, adopt: Callable[[], None]
) -> None:
    """Makes `save` and `save_weights` collective for sharded variables.

    Nothing changes if each process has the complete variables.

    Args:
      model: The model; the attributes `save` and `save_weights` are set on it.
      mesh: The mesh of its strategy's replicas.
      adopt: A function that moves variables that were created outside of the
        strategy's scope to its devices.
    """
    if not mesh.spreads_shards:
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

"""Keras's files of a model whose variables are divided over processes.

No process has all shards, so all processes read the variables together, one
after the other; the chief alone writes where the user said.
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


def save_together(
    model: keras.Model, mesh: ReplicaMesh, adopt: Callable[[], None]
) -> None:
    """Makes `save` and `save_weights` of a model collective, if they must be.

    Args:
      model: The model; it gets attributes of these names.
      mesh: Its strategy's replicas.
      adopt: Places variables that were made outside of the scope.
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
    # The same reads in the same order; the file is nobody's.
    with tempfile.TemporaryDirectory() as folder:
        own = pathlib.Path(folder) / pathlib.Path(filepath).name
        save(own, *args, **kwargs)

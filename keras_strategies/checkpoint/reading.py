"""Reading the checkpoints that `fit` may be writing in another process.

This module neither locks the directory nor changes any files in it.
"""

import contextlib
import logging
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies.checkpoint import contents
from keras_strategies.checkpoint.contents import Document
from keras_strategies.checkpoint.directory import names, verify
from keras_strategies.checkpoint.directory.files import (
    make_damage_error,
)
from keras_strategies.checkpoint.orbax_io import (
    make_checkpointer,
    restore_arrays,
)
from keras_strategies.cluster.exchange.message_forms import has_form, is_count
from keras_strategies.fit.callbacks.callback_states import (
    has_swapped_averages,
)
from keras_strategies.fit.callbacks.fit_state import group_variables
from keras_strategies.variables.model_variables import (
    all_variables,
)

_WEIGHTS, _OPTIMIZER, _SEEDS = "weights", "optimizer", "seeds"
_SUFFIX = "_average"

NamedVariables = Mapping[str, Mapping[str, keras.Variable]]
"""Variables, by the group and name of their arrays in a checkpoint."""


def substitute_averages(
    variables: NamedVariables, document: Document, where: str
) -> NamedVariables:
    """Maps a checkpoint's moving averages, or else its weights, to variables.

    Args:
      variables: The variable to restore from each array, by the group and name
        of the array.
      document: The JSON document of a checkpoint of `fit`.
      where: The path of the checkpoint, for messages.

    Returns:
      Each variable, by the group and name of the array to restore it from: its
      moving average if the checkpoint has one, else its array in `variables`.

    Raises:
      ValueError: if several optimizers have averages of the same weight.
    """
    state = document["state"]
    if isinstance(state, dict) and has_swapped_averages(state.get("callbacks")):
        return variables
    saved = document["variables"]
    slots: dict[str, list[str]] = {}
    for name in saved.get(_OPTIMIZER, {}):
        # "adam.dense_kernel_average" is the average of "dense.kernel".
        _, _, slot = name.partition(".")
        slots.setdefault(slot.replace(".", "_"), []).append(name)
    weights, averages = {}, {}
    for name, variable in variables.get(_WEIGHTS, {}).items():
        path, mark, number = name.partition("~")
        slot = f"{path.replace('.', '_')}{_SUFFIX}{mark}{number}"
        matches = slots.get(slot, ())
        if len(matches) > 1:
            raise ValueError(
                "A weight must be averaged by at most one optimizer. "
                f"Received: {where}, where {name!r} has several averages: "
                f"{matches}. Pass `averages=False` to load the trained weights "
                "instead of averages."
            )
        kind = saved[_WEIGHTS][name]
        if matches and saved[_OPTIMIZER][matches[0]] == kind:
            averages[matches[0]] = variable
        else:
            weights[name] = variable
    return {**variables, _WEIGHTS: weights, _OPTIMIZER: averages}


_PLACE = {"epoch": is_count, "step": is_count}
_logger = logging.getLogger(__name__)


def find_newest(directory: str, *, is_quick: bool = False) -> str | None:
    """Returns the directory of the newest good checkpoint, or None.

    Args:
      directory: The directory of checkpoints.
      is_quick: Whether to compare only the names and sizes of files with the
        manifest. Otherwise each file of a checkpoint is read once, to compare
        its checksum.
    """
    manifest, _ = verify.find_newest_good(directory, is_quick=is_quick)
    return None if manifest is None else make_path(directory, manifest.step)


def warn_no_checkpoint(directory: str) -> None:
    """Logs a warning that a model uses its initial weights.

    This is the case if the directory has no checkpoint to load.
    """
    _logger.warning(
        "There is no good checkpoint in %s, so the initial weights are used.",
        directory,
    )


def parse_step(path: str | os.PathLike[str]) -> int:
    """Returns the global step of a checkpoint's directory.

    Raises:
      ValueError: if the directory's name is not a step.
    """
    step = names.parse_step(pathlib.Path(path).name)
    if step is None:
        raise ValueError(
            "A checkpoint must be a directory that is named after its step. "
            f"Received: {os.fspath(path)!r}. Pass, for example, "
            "`estimator.latest_checkpoint()`."
        )
    return step


def make_path(directory: str, step: int) -> str:
    """Returns the path of the checkpoint of a step."""
    return str(names.step_path(directory, step))


def read_position(document: contents.Document, path: str) -> tuple[int, int]:
    """Returns the epoch and step at which a checkpoint of `fit` was saved.

    Args:
      document: The JSON document of the checkpoint.
      path: The path of the checkpoint, for the error.

    Returns:
      The epoch, and the number of steps completed in this epoch.

    Raises:
      DamagedCheckpoint: if the document does not contain these numbers.
    """
    state = document["state"]
    if not has_form(state, _PLACE):
        problem = "its state has a wrong structure"
        raise make_damage_error(path, names.RUN, problem)
    return state["epoch"], state["step"]


def check(path: str) -> None:
    """Checks that a checkpoint exists and is good.

    Raises:
      ValueError: if the directory does not exist, or the checkpoint is damaged.
    """
    parse_step(path)
    verify.verify(path)


def match_weights(
    model: keras.Model, document: Document, where: str, *, averages: bool = True
) -> NamedVariables:
    """Returns the variable to load each array into, by group and name.

    Args:
      model: The model whose weights and seeds are loaded.
      document: The JSON document of a checkpoint of `fit`.
      where: The path of the checkpoint, for messages.
      averages: Whether to load moving averages in place of weights.

    Raises:
      ValueError: if the checkpoint is from another model; the message lists the
        names and shapes that differ.
    """
    groups = group_weights(model)
    saved = {n: e for n, e in document["variables"].items() if n in groups}
    known = document | {"variables": saved}
    matches = contents.match_variables(groups, known, where)
    return (
        substitute_averages(matches, document, where) if averages else matches
    )


def restore(model: keras.Model, path: str) -> None:
    """Restores the weights and seeds of a built model from a checkpoint.

    A weight whose moving average is in the optimizer (`use_ema=True`) is set to
    this average. Optimizers and metrics do not change. The call is not
    collective: each process that calls it reads the files itself.

    Args:
      model: The model.
      path: The path of the checkpoint, which must already be verified.

    Raises:
      ValueError: if the checkpoint is from another model; the message lists the
        names and shapes that differ.
    """
    document = contents.load_document(path)
    variables = document["variables"]
    matches = match_weights(model, document, path)
    wanted = {g: {n: variables[g][n] for n in matches[g]} for g in matches}
    contents.assign(matches, read_arrays(path, wanted))


def copy_weights(source: keras.Model, target: keras.Model) -> None:
    """Copies the weights of a model to another model with the same layers.

    Args:
      source: A model whose variables have values.
      target: The model to change. It may belong to another strategy.
    """
    for group, variables in group_weights(target).items():
        values = [np.asarray(v.value) for v in group_weights(source)[group]]
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def read_arrays(
    path: str, wanted: dict[str, dict[str, Any]]
) -> dict[str, dict[str, np.ndarray]]:
    """Reads arrays of a checkpoint into numpy arrays.

    Args:
      path: The path of the checkpoint.
      wanted: The shape and dtype of each array to read, by group and name.
    """
    item = {
        group: {
            name: np.empty(shape, jax.numpy.dtype(dtype))
            for name, (shape, dtype) in entries.items()
        }
        for group, entries in wanted.items()
        if entries
    }
    if not item:
        return {}
    processes = (jax.process_index(),)
    with contextlib.closing(make_checkpointer(processes)) as checkpointer:
        directory = pathlib.Path(path).absolute()
        return restore_arrays(checkpointer, directory, item, is_part=True)


def list_variables(path: str) -> dict[str, tuple[str, str, list[Any]]]:
    """Lists the variables in a checkpoint.

    Returns:
      Each variable's group, its name in this group, and its shape and dtype, by
      public name. The public name of a model's variable is its Keras path
      ("dense/kernel"). Other variables have their group as a prefix
      ("optimizer/adam/learning_rate").
    """
    by_public_name: dict[str, tuple[str, str, list[Any]]] = {}
    for group, entries in contents.load_document(path)["variables"].items():
        if group == contents.STATE:
            continue
        prefix = "" if group == _WEIGHTS else f"{group}/"
        for name, kind in entries.items():
            public = prefix + name.replace(".", "/")
            by_public_name[public] = (group, name, kind)
    return by_public_name


def read_variable(path: str, name: str) -> np.ndarray:
    """Reads the value of one variable from a checkpoint.

    Raises:
      ValueError: if the checkpoint has no variable with this public name.
    """
    variables = list_variables(path)
    name = name.replace(".", "/")
    if name not in variables:
        raise ValueError(
            "`name` must be the name of a variable in the checkpoint. "
            f"Received: {name!r}, but {path} contains "
            f"{', '.join(sorted(variables)[:8])}, ... Call "
            "`get_variable_names()` for a list of all names."
        )
    group, entry, kind = variables[name]
    return np.asarray(read_arrays(path, {group: {entry: kind}})[group][entry])


def group_weights(model: keras.Model) -> dict[str, list[keras.Variable]]:
    """Returns the variables that determine a model's outputs, by group."""
    groups = group_variables(model, all_variables(model))
    return {name: groups[name] for name in (_WEIGHTS, _SEEDS)}

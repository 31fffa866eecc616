"""Reads the checkpoints of a fit while another process may write them.

Nothing here locks the directory, or changes a file in it.
"""

import logging
import os
import pathlib
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies.checkpoint import contents
from keras_strategies.checkpoint.averages import with_averages
from keras_strategies.checkpoint.directory import names, orbax_files, verify
from keras_strategies.checkpoint.directory.corruption import (
    DamagedCheckpoint,
    damaged,
)
from keras_strategies.checkpoint.orbax_io import restore_args
from keras_strategies.cluster.exchange.message_forms import fault_of, is_count
from keras_strategies.keras_bridge.callbacks.fit_state import groups_of
from keras_strategies.keras_bridge.variables.model_variables import (
    all_variables,
)

_WEIGHTS, _SEEDS = "weights", "seeds"
_PLACE = {"epoch": is_count, "step": is_count}
_logger = logging.getLogger(__name__)


def newest_complete(directory: str) -> str | None:
    """Returns the folder of the newest complete checkpoint, or None.

    Names and sizes are compared with its manifest; checksums are when it is
    read.
    """
    for step in reversed(names.find_steps(directory)):
        path = names.step_path(directory, step)
        try:
            verify.verify(path, is_quick=True)
        except DamagedCheckpoint:
            continue
        return str(path)
    return None


def newest_good(directory: str) -> str | None:
    """Returns the folder of the newest good checkpoint, or None.

    Every file of it is read once.
    """
    manifest, _ = verify.newest_good(directory)
    return None if manifest is None else path_of(directory, manifest.step)


def warn_of_none(directory: str) -> None:
    """Warns that a model has its initial weights."""
    _logger.warning(
        "No %scheckpoint in %s: initial weights are used.",
        "good " if names.find_steps(directory) else "",
        directory,
    )


def step_of(path: str | os.PathLike[str]) -> int:
    """The global step of a checkpoint's folder.

    Raises:
      ValueError: it has no step's name.
    """
    step = names.step_of(pathlib.Path(path).name)
    if step is None:
        raise ValueError(
            "A checkpoint is a folder named by its step. Received: "
            f"{os.fspath(path)!r}. Give, for example, "
            "`estimator.latest_checkpoint()`."
        )
    return step


def path_of(directory: str, step: int) -> str:
    """Returns the folder of a step."""
    return str(names.step_path(directory, step))


def place_in(document: contents.Document, path: str) -> tuple[int, int]:
    """Returns the epoch of a fit's checkpoint, and the steps done in it.

    Args:
      document: That of the checkpoint.
      path: The checkpoint, for the error.

    Raises:
      DamagedCheckpoint: the document has no such numbers.
    """
    state = document["state"]
    fault = fault_of(state, _PLACE, "its state")
    if fault is not None:
        raise damaged(path, names.RUN, fault)
    return state["epoch"], state["step"]


def check(path: str) -> None:
    """Raises unless a checkpoint is there and good.

    Raises:
      ValueError: there is no such folder, or it is damaged.
    """
    step_of(path)
    if not os.path.isdir(path):
        raise ValueError(
            f"Couldn't find trained model at {path}. Received: a path where "
            "there is no checkpoint. Train first, or give another path."
        )
    verify.verify(path)


def restore(model: keras.Model, path: str) -> None:
    """Gives a built model the weights and seeds of a checkpoint.

    Weights that the optimizer has averaged (`use_ema=True`) get their averages.
    Optimizers and metrics keep what they have. Every process that calls it
    reads for itself.

    Args:
      model: The model.
      path: The checkpoint, which was verified.

    Raises:
      ValueError: it is of another model; names and shapes are listed.
    """
    saved = contents.document_of(path)
    groups = _groups(model)
    known = {
        name: entries
        for name, entries in saved["variables"].items()
        if name in groups
    }
    document = saved | {"variables": known}
    found = contents.matched(groups, document, path)
    found = with_averages(found, saved, path)
    wanted = {
        group: {name: saved["variables"][group][name] for name in entries}
        for group, entries in found.items()
    }
    contents.assign(found, read_arrays(path, wanted))


def copy_weights(source: keras.Model, target: keras.Model) -> None:
    """Gives a built model the weights of another one of the same layers.

    Args:
      source: A model, whose variables have their values.
      target: The other one; maybe of another strategy.
    """
    for group, variables in _groups(target).items():
        values = [np.asarray(v.value) for v in _groups(source)[group]]
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def read_arrays(
    path: str, wanted: dict[str, dict[str, Any]]
) -> dict[str, dict[str, np.ndarray]]:
    """Arrays of a checkpoint on the host.

    Args:
      path: The checkpoint.
      wanted: Shape and dtype by group and name.
    """
    import orbax.checkpoint as ocp

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
    options = ocp.options.MultiprocessingOptions()
    if jax.process_count() > 1:
        # This process reads alone: others need not call.
        me = jax.process_index()
        options = ocp.options.MultiprocessingOptions(
            primary_host=me,
            active_processes={me},
            barrier_sync_key_prefix=f"keras_strategies_{me}",
        )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
    checkpointer = ocp.Checkpointer(handler, multiprocessing_options=options)
    with orbax_files.restoring(path, item), checkpointer:
        return checkpointer.restore(
            pathlib.Path(path).absolute() / "state",
            args=ocp.args.PyTreeRestore(
                item=item,
                restore_args=restore_args(item),
                partial_restore=True,
            ),
        )


def variables_in(path: str) -> dict[str, tuple[str, str]]:
    """The group and the name in it of each variable, by its public name.

    Those of the model have their Keras paths ("dense/kernel"), others have
    their group in front ("optimizer/adam/learning_rate").
    """
    found: dict[str, tuple[str, str]] = {}
    for group, entries in contents.document_of(path)["variables"].items():
        if group == contents.STATE:
            continue
        prefix = "" if group == _WEIGHTS else f"{group}/"
        for name in entries:
            found[prefix + name.replace(".", "/")] = (group, name)
    return found


def value_of(path: str, name: str) -> np.ndarray:
    """The value of a variable of a checkpoint.

    Raises:
      ValueError: there is none of that name.
    """
    found = variables_in(path)
    name = name.replace(".", "/")
    if name not in found:
        raise ValueError(
            f"A variable of the checkpoint is named. Received: {name!r}; "
            f"{path} has {', '.join(sorted(found)[:8])}, ... "
            "`get_variable_names()` lists them."
        )
    group, entry = found[name]
    facts = contents.document_of(path)["variables"][group][entry]
    return np.asarray(read_arrays(path, {group: {entry: facts}})[group][entry])


def _groups(model: keras.Model) -> dict[str, list[keras.Variable]]:
    """The variables of a model that it needs to compute its outputs."""
    groups = groups_of(model, all_variables(model))
    return {name: groups[name] for name in (_WEIGHTS, _SEEDS)}

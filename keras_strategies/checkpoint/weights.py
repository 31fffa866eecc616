"""The newest checkpoint of a directory, and the weights of one."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_strategies.checkpoint import contents
from keras_strategies.checkpoint.averages import Found, with_averages
from keras_strategies.checkpoint.directory.names import find_steps, step_of
from keras_strategies.checkpoint.directory.retention import Keep
from keras_strategies.checkpoint.storage import Storage
from keras_strategies.cluster.addresses import shown
from keras_strategies.keras_bridge.callbacks.fit_state import groups_of

_WEIGHTS = ("weights", "seeds")


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """The path of the newest checkpoint in a directory, None without any.

    As `tf.train.latest_checkpoint`. What is in it is not looked at.

    Example:
      ```python
      with ks.checkpoint.CheckpointManager(checkpoint, "run") as manager:
          manager.save(step=100)
      path = ks.checkpoint.latest_checkpoint("run")
      checkpoint.restore(path)
      ```
    """
    steps = find_steps(directory)
    return str(pathlib.Path(directory) / str(steps[-1])) if steps else None


@contextlib.contextmanager
def opened(
    path: str | os.PathLike[str],
    step: int | None,
    processes: tuple[int, ...],
) -> Iterator[tuple[Storage, int]]:
    """Opens a checkpoint for reading: its directory, and its step. Collective.

    Args:
      path: A directory of checkpoints, or one of these.
      step: Which one; None for that of `path`, or the newest good one.
      processes: JAX's ids of the processes.

    Raises:
      FileNotFoundError: there is none.
      DamagedCheckpoint: it is damaged, or not there.
    """
    directory = pathlib.Path(path)
    named = step_of(directory.name)
    if step is None and named is not None and not find_steps(directory):
        directory, step = directory.parent, named
    storage = Storage(directory, processes=processes, keep=Keep(last=None))
    with contextlib.closing(storage):
        if step is not None:
            storage.check(step)
        elif (step := storage.newest_to_read()) is None:
            raise FileNotFoundError(
                "A checkpoint is read from where one was saved. Received: "
                f"{shown(str(path))}, where there is none that is good. Give "
                "`latest_checkpoint(directory)`."
            )
        yield storage, step


def load_weights(
    model: keras.Model,
    path: str | os.PathLike[str],
    step: int | None = None,
    name: str | None = None,
    *,
    averages: bool = True,
) -> int:
    """Gives a model the weights of a checkpoint, and nothing else.

    To predict with them, or to export them: `model.save("model.keras")`,
    `model.save_weights("model.weights.h5")`. The checkpoint is verified first.
    On several processes collective, of a model that all of them hold.

    Args:
      model: A built model.
      path: The directory of `ks.callbacks.Checkpoint` or of a
        `CheckpointManager`, or one checkpoint in it.
      step: Which one; None for the newest that is good.
      name: Of a manager's checkpoint, what the model is called in it
        (`Checkpoint(generator=model)`); None where only one fits.
      averages: Of a fit whose optimizer has `use_ema=True`: whether weights
        get their averages, which `fit` gives the model when it ends, or the
        values that were trained. A manager's checkpoint has the weights that
        the model had.

    Returns:
      Its step.

    Raises:
      FileNotFoundError: there is none.
      DamagedCheckpoint: the one that was asked for is damaged, or not there.
      ValueError: it is of another model; what differs is listed. Or several
        objects in it fit; or the model is not built.
      TypeError: the first argument is no model.

    Example:
      ```python
      with ks.checkpoint.CheckpointManager(checkpoint, "run") as manager:
          manager.save(step=100)
      assert ks.checkpoint.load_weights(model, "run") == 100
      model.save("model.keras")
      ```
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`load_weights` takes the model first, and then the path. "
            f"Received: {shown(model)} of type {type(model).__name__} as the "
            "model. Write `load_weights(model, path)`."
        )
    groups = _groups_of(model)
    processes = contents.processes_of(groups)
    with opened(path, step, processes) as (storage, chosen):
        document = storage.document(chosen)
        where = str(storage.path(chosen))
        found = _found(model, groups, document, name, where)
        if averages and _is_of_fit(document):
            found = with_averages(found, document, where)
        wanted = contents.targets(found, document, None)
        contents.assign(found, storage.restore(chosen, wanted, is_part=True))
    return chosen


def _groups_of(model: keras.Model) -> dict[str, list[keras.Variable]]:
    groups = groups_of(model, model.variables)
    return {name: groups[name] for name in _WEIGHTS}


def _found(
    model: keras.Model,
    groups: contents.Groups,
    document: contents.Document,
    name: str | None,
    where: str,
) -> Found:
    """The variables that get an array, by group and name of the arrays."""
    saved = document["variables"]
    if not _is_of_fit(document):
        saved, groups = _of_object(model, groups, saved, name, where)
    wanted = {k: saved[k] for k in (*groups, *_WEIGHTS) if k in saved}
    document = document | {"variables": wanted}
    try:
        return contents.matched(groups, document, where)
    except ValueError:
        if model.built:
            raise
        raise ValueError(
            "Weights are given to a model that has its variables. Received: "
            f"{model.name!r}, which is not built. Call it on a batch, or begin "
            "it with `keras.Input`."
        ) from None


def _is_of_fit(document: contents.Document) -> bool:
    """Whether `ks.callbacks.Checkpoint` wrote it, and not a manager."""
    # A manager says whose states it has: of all processes, or of each.
    state = document["state"]
    is_managers = isinstance(state, dict) and len(state) == 1
    return not (is_managers and state.keys() <= {"all", "each"})


def _of_object(
    model: keras.Model,
    groups: contents.Groups,
    saved: dict[str, Any],
    name: str | None,
    where: str,
) -> tuple[dict[str, Any], dict[str, list[keras.Variable]]]:
    """The arrays of a manager's checkpoint that are a model's weights.

    An object's group also has its optimizer's variables and its metrics'.

    Returns:
      The arrays by group and name, and the variables by group.
    """
    own = {id(v) for group in groups.values() for v in group}
    variables = [v for v in model.variables if id(v) in own]
    names = [g for g in saved if g != contents.STATE]
    if name is not None:
        if name not in names:
            raise ValueError(
                "`name` is what the model is called in the checkpoint. "
                f"Received: {shown(name)}, in {where} there are "
                f"{', '.join(map(shown, names))}. Give one of them."
            )
        names = [name]
    fitting = {
        group: found
        for group in names
        if (found := contents.subset(saved[group], variables)) is not None
    }
    if len(fitting) > 1:
        raise ValueError(
            "Weights are given by one object of a checkpoint. Received: "
            f"{where}, where {', '.join(map(shown, fitting))} fit "
            f"{model.name!r}. Say which one: `name={next(iter(fitting))!r}`."
        )
    # What differs is said of the one that was meant.
    group = next(iter(fitting or names), _WEIGHTS[0])
    return {group: fitting.get(group, saved.get(group, {}))}, {group: variables}

"""The newest checkpoint of a directory, and the weights of one."""

import os
import pathlib

import keras

from keras_strategies.checkpoint import contents
from keras_strategies.checkpoint.format import find_steps
from keras_strategies.checkpoint.keeping import Keep
from keras_strategies.checkpoint.layout import step_of
from keras_strategies.checkpoint.storage import Storage
from keras_strategies.cluster.addresses import shown
from keras_strategies.keras_bridge.state import is_seed

_WEIGHTS = ("weights", "seeds")


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """The path of the newest checkpoint in a directory, None without any.

    As `tf.train.latest_checkpoint`. What is in it is not looked at.
    """
    steps = find_steps(directory)
    return str(pathlib.Path(directory) / str(steps[-1])) if steps else None


def load_weights(
    model: keras.Model, path: str | os.PathLike[str], step: int | None = None
) -> int:
    """Gives a model the weights of a checkpoint, and nothing else.

    To predict with them, or to export them: `model.save("model.keras")`,
    `model.save_weights("model.weights.h5")`. The checkpoint is verified first.
    On several processes collective, of a model that all of them hold.

    Args:
      model: A built model.
      path: The directory of `ks.callbacks.Checkpoint`, or one checkpoint in it.
      step: Which one; None for the newest that is good.

    Returns:
      Its step.

    Raises:
      FileNotFoundError: there is none.
      DamagedCheckpoint: the one that was asked for is damaged, or not there.
      ValueError: it is of another model; what differs is listed. Or the model
        is not built.
      TypeError: the first argument is no model.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "`load_weights` takes the model first, and then the path. "
            f"Received: {shown(model)} of type {type(model).__name__} as the "
            "model. Write `load_weights(model, path)`."
        )
    path = pathlib.Path(path)
    if step is None and step_of(path.name) is not None and not find_steps(path):
        path, step = path.parent, step_of(path.name)
    groups = {"weights": [], "seeds": []}
    for variable in model.variables:
        if any(variable is v for v in model.metrics_variables):
            continue
        name = "seeds" if is_seed(variable) else "weights"
        groups[name].append(variable)
    storage = Storage(
        path, processes=contents.processes_of(groups), keep=Keep(last=None)
    )
    chosen = storage.newest_to_read() if step is None else step
    if chosen is None:
        raise FileNotFoundError(
            "Weights are read from a checkpoint. Received: "
            f"{str(path)!r}, where there is none that is good. Give the "
            "directory of `ks.callbacks.Checkpoint`."
        )
    if step is not None:
        storage.check(step)
    document = storage.document(chosen)
    kept = document["variables"]
    document = document | {
        "variables": {k: kept[k] for k in _WEIGHTS if k in kept}
    }
    where = str(storage.path(chosen))
    contents.check_version(document, where)
    try:
        found = contents.matched(groups, document, where)
    except ValueError:
        if model.built:
            raise
        raise ValueError(
            "Weights are given to a model that has its variables. Received: "
            f"{model.name!r}, which is not built. Call it on a batch, or begin "
            "it with `keras.Input`."
        ) from None
    wanted = contents.targets(found, document, None)
    contents.assign(found, storage.restore(chosen, wanted, is_part=True))
    storage.close()
    return chosen

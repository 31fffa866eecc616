"""Loading the weights of checkpoints, and restoring what is not built yet."""

import contextlib
import functools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras

from keras_strategies.checkpoint import contents
from keras_strategies.checkpoint.contents import STATE, strip_numbers
from keras_strategies.checkpoint.directory.names import find_steps, parse_step
from keras_strategies.checkpoint.directory.retention import Keep
from keras_strategies.checkpoint.reading import (
    NamedVariables,
    group_weights,
    match_weights,
)
from keras_strategies.checkpoint.storage import Storage
from keras_strategies.cluster.addresses import shorten
from keras_strategies.cluster.checks import check_type
from keras_strategies.names import dry_run

Objects = Mapping[str, Any]
"""The objects of a checkpoint, by name."""

Names = Mapping[str, Mapping[str, Any]]
"""Variables of a checkpoint, by object name and variable name."""

_MAX_SHOWN = 8
_FIX = "Call the model on one batch, or start its layers with a `keras.Input`."


def defer(
    objects: Objects, restore: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """Restores models that are not built when all of them are.

    Args:
      objects: The objects to restore.
      restore: Called with the objects that wait, when their models are built.

    Returns:
      The objects that wait: these models, and optimizers that are not built.

    Raises:
      ValueError: if a model has weights, or no `call`: `build` may not run.
    """
    kinds = (keras.Model, keras.optimizers.Optimizer)
    models = [m for m in _find_instances(keras.Model, objects) if not m.built]
    for model in models:
        if model.weights or type(model).call is keras.Model.call:
            raise ValueError(
                "A model must be built before a checkpoint is restored into "
                f"it. Received: {model.name!r}, which is not built. {_FIX}"
            )
    waiting = {
        name: value
        for name, value in objects.items()
        if models and not all(p.built for p in _find_instances(kinds, value))
    }

    def restore_if_built() -> None:
        if all(model.built for model in models):
            for optimizer in _iter_optimizers(waiting):
                # The names of its slots do not begin with the model's.
                optimizer.__dict__["_parent_path"] = ""
            restore(waiting)

    for model in models:
        _call_when_built(model, restore_if_built)
    return waiting


def _call_when_built(model: keras.Model, function: Callable[[], None]) -> None:
    original = model.build

    @functools.wraps(original)
    def build(*args: Any, **words: Any) -> None:
        original(*args, **words)
        if any(v._value is None for v in model.variables):
            raise RuntimeError(
                "A model that waits for a checkpoint must be built outside of "
                f"steps and `fit`. Received: {model.name!r}. {_FIX}"
            )
        object.__setattr__(model, "build", original)
        function()

    object.__setattr__(model, "build", build)


def build_optimizers(objects: Objects, saved: Names) -> None:
    """Builds the optimizers whose variables are in a checkpoint.

    If a model is compiled with an optimizer, the optimizer is built for this
    model. Any other optimizer is built for the only model among the objects.

    Args:
      objects: The objects to restore.
      saved: The names of the variables in the checkpoint.
    """
    models = list(_find_instances(keras.Model, objects))
    for name, value in objects.items():
        entries = list(saved.get(name, ()))
        for model in _find_instances(keras.Model, value):
            optimizer = getattr(model, "optimizer", None)
            if optimizer is not None and _lacks_variables(optimizer, entries):
                optimizer.build(model.trainable_variables)
        for optimizer in _find_instances(keras.optimizers.Optimizer, value):
            if len(models) == 1 and _lacks_variables(optimizer, entries):
                optimizer.build(models[0].trainable_variables)


def list_unrestored(
    objects: Objects, saved: Names, matches: Names
) -> list[str]:
    """Lists the variables in a checkpoint that are not restored.

    Does not list the variables of metrics that a compiled model has not created
    yet, since each epoch resets metrics anyway.

    Args:
      objects: The objects to restore.
      saved: The names of the variables in the checkpoint.
      matches: The names of the variables that are restored.

    Raises:
      ValueError: if the checkpoint has variables of an optimizer that is not
        built.
    """
    names: list[str] = []
    for group, entries in matches.items():
        others = [e for e in saved.get(group, ()) if e not in entries]
        if group == STATE or not others:
            continue
        value = objects[group]
        for optimizer in _iter_optimizers(value):
            if _lacks_variables(optimizer, list(saved[group])):
                raise ValueError(
                    "An optimizer must be built before a checkpoint is "
                    f"restored into it. Received: {optimizer.name!r} in "
                    f"{group!r}, which is not built and whose model is "
                    "unknown. Call "
                    "`optimizer.build(model.trainable_variables)` first."
                )
        if any(map(_awaits_metrics, _find_instances(keras.Model, value))):
            known = set(map(_first_word, entries))
            others = [e for e in others if _first_word(e) in known]
        names += [f"{group} {entry}" for entry in others]
    more = len(names) - _MAX_SHOWN
    return names[:_MAX_SHOWN] + [f"{more} more"] * (more > 0)


def _lacks_variables(
    optimizer: keras.optimizers.Optimizer, entries: Sequence[str]
) -> bool:
    """Returns whether an optimizer has fewer variables than were saved."""
    if optimizer.built:
        return False
    present = [v.path.replace("/", ".") for v in optimizer.variables]
    words = {*map(_first_word, present), strip_numbers(optimizer.name)}
    return sum(_first_word(e) in words for e in entries) > len(present)


def _awaits_metrics(model: keras.Model) -> bool:
    return any(not getattr(metric, "built", True) for metric in model.metrics)


def _first_word(name: str) -> str:
    return strip_numbers(name).partition(".")[0]


def _iter_optimizers(value: object) -> Iterator[keras.optimizers.Optimizer]:
    """Yields the optimizers in a nest and in the attributes of its models.

    Also searches the attributes of the models' layers.
    """
    yield from _find_instances(keras.optimizers.Optimizer, value)
    for model in _find_instances(keras.Model, value):
        parts = [list(vars(part).values()) for part in (model, *model.layers)]
        yield from _find_instances(keras.optimizers.Optimizer, parts)


def iter_leaves(value: object) -> Iterator[Any]:
    """Yields the objects in nested lists and dicts."""
    if not isinstance(value, Mapping | list | tuple):
        yield value
        return
    for part in value.values() if isinstance(value, Mapping) else value:
        yield from iter_leaves(part)


def _find_instances(kind: Any, value: object) -> Iterator[Any]:
    return (leaf for leaf in iter_leaves(value) if isinstance(leaf, kind))


def latest_checkpoint(directory: str | os.PathLike[str]) -> str | None:
    """Returns the path of the newest checkpoint in a directory, or None.

    Like `tf.train.latest_checkpoint`, without verifying the checkpoint. Files
    of weights (`*.weights.h5`) count where there are no checkpoints.

    Example:
      ```python
      checkpoint.restore(ks.checkpoint.latest_checkpoint("run"))
      ```
    """
    path = pathlib.Path(directory)
    found = [path / str(step) for step in find_steps(directory)[-1:]]
    found = found or sorted(path.glob("*.weights.h5"), key=os.path.getmtime)
    return str(found[-1]) if found else None


@contextlib.contextmanager
def open_checkpoint(
    path: str | os.PathLike[str],
    step: int | None,
    processes: tuple[int, ...],
) -> Iterator[tuple[Storage, int]]:
    """Opens a checkpoint for reading. Collective.

    Args:
      path: The path of a directory of checkpoints, or of one checkpoint.
      step: The step to open. If None, opens the checkpoint at `path`, or the
        newest good checkpoint in the directory at `path`.
      processes: JAX's ids of the processes.

    Yields:
      The storage of the directory, and the step of the checkpoint.

    Raises:
      FileNotFoundError: if no good checkpoint exists.
      DamagedCheckpoint: if the requested checkpoint is damaged or missing.
    """
    directory = pathlib.Path(path)
    own_step = parse_step(directory.name)
    if step is None and own_step is not None and not find_steps(directory):
        directory, step = directory.parent, own_step
    storage = Storage(directory, processes=processes, keep=Keep(last=None))
    with contextlib.closing(storage):
        if step is not None:
            storage.check(step)
        elif (step := storage.find_newest(is_writer=False)) is None:
            raise FileNotFoundError(
                "The path must contain a valid checkpoint. Received: "
                f"{shorten(str(path))}, which contains no valid checkpoint. "
                "Pass the directory that checkpoints were saved in, or one of "
                "its checkpoints."
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
    """Loads only the weights of a checkpoint into a model.

    Use this to predict with the weights, or to export them with
    `model.save("model.keras")` or `model.save_weights("model.weights.h5")`. The
    checkpoint is verified first. With several processes, the call is
    collective: all processes must call it with the same model.

    Args:
      model: A built model.
      path: The directory of `ks.callbacks.Checkpoint` or of a
        `CheckpointManager`, or one checkpoint in it.
      step: The step to load; None for the newest good checkpoint.
      name: The model's name in a manager's checkpoint, such as "generator" for
        `Checkpoint(generator=model)`. Only needed if several objects in the
        checkpoint match the model.
      averages: Whether to load the moving averages of the weights instead of
        the trained values, for a checkpoint of a fit whose optimizer has
        `use_ema=True`. `fit` also assigns the averages to the model when it
        ends. Has no effect on a manager's checkpoint: its weights are the
        values that the model had when the checkpoint was saved.

    Returns:
      The step that was loaded.

    Raises:
      FileNotFoundError: if no good checkpoint exists.
      DamagedCheckpoint: if the requested checkpoint is damaged or missing.
      ValueError: if the checkpoint is from another model (the message lists the
        differences), if several objects in it match the model, or if the model
        is not built.
      TypeError: if the first argument is not a model.

    Example:
      ```python
      with ks.checkpoint.CheckpointManager(checkpoint, "run") as manager:
          manager.save(step=100)
      assert ks.checkpoint.load_weights(model, "run") == 100
      model.save("model.keras")
      ```
    """
    fix = "Call `load_weights(model, path)`."
    check_type("`model`", model, keras.Model, "a Keras model", fix)
    if dry_run.get() is not None:
        return step or 0
    processes = contents.find_processes(group_weights(model))
    with open_checkpoint(path, step, processes) as (storage, chosen):
        document = storage.load_document(chosen)
        where = str(storage.path(chosen))
        matches = _match(model, document, name, where, averages)
        targets = contents.make_targets(matches, document, None)
        arrays = storage.restore(chosen, targets, is_part=True)
        contents.assign(matches, arrays)
    return chosen


def _match(
    model: keras.Model,
    document: contents.Document,
    name: str | None,
    where: str,
    averages: bool,
) -> NamedVariables:
    """Returns the variable to load each array into, by group and name."""
    try:
        if _is_of_fit(document):
            return match_weights(model, document, where, averages=averages)
        saved, groups = _select_object(model, document, name, where)
        document = document | {"variables": saved}
        return contents.match_variables(groups, document, where)
    except ValueError:
        if model.built:
            raise
        raise ValueError(
            "A model must be built before weights are loaded into it. "
            f"Received: {model.name!r}, which is not built. {_FIX}"
        ) from None


def _is_of_fit(document: contents.Document) -> bool:
    """Returns whether `ks.callbacks.Checkpoint` wrote the document.

    Returns False if a manager wrote it.
    """
    # A manager's state has exactly one key, "all" or "each"; see
    # `nests.gather_states`.
    state = document["state"]
    is_managers = isinstance(state, dict) and len(state) == 1
    return not (is_managers and state.keys() <= {"all", "each"})


def _select_object(
    model: keras.Model,
    document: contents.Document,
    name: str | None,
    where: str,
) -> tuple[dict[str, Any], dict[str, list[keras.Variable]]]:
    """Selects the arrays of a model's weights in a manager's checkpoint.

    They must be selected because an object's group of arrays also contains the
    variables of its optimizer and its metrics.

    Returns:
      The shapes and dtypes of the selected arrays, by group and name; and the
      model's variables, by group.
    """
    saved, groups = document["variables"], group_weights(model)
    weights = {id(v) for group in groups.values() for v in group}
    variables = [v for v in model.variables if id(v) in weights]
    names = [g for g in saved if g != contents.STATE]
    if name is not None:
        if name not in names:
            raise ValueError(
                "`name` must be the model's name in the checkpoint. Received: "
                f"{shorten(name)}, but {where} contains "
                f"{', '.join(map(shorten, names))}. Pass one of these names."
            )
        names = [name]
    found = {g: contents.select_arrays(saved[g], variables) for g in names}
    fitting = {
        g: entries for g, entries in found.items() if entries is not None
    }
    if len(fitting) > 1:
        raise ValueError(
            "Weights must be loaded from a single object in a checkpoint. "
            f"Received: {where}, in which several objects match "
            f"{model.name!r}: {', '.join(map(shorten, fitting))}. Pass the "
            f"name of one of them, such as `name={next(iter(fitting))!r}`."
        )
    # If no object matches, the error lists the differences from this group.
    group = next(iter(fitting or names), "weights")
    return {group: fitting.get(group, saved.get(group, {}))}, {group: variables}

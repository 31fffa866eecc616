"""Restoring objects whose variables have not been created yet."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from keras_strategies.checkpoint.contents import STATE, strip_numbers

Objects = Mapping[str, Any]
"""The objects of a checkpoint, by name."""

Names = Mapping[str, Mapping[str, Any]]
"""Variables of a checkpoint, by object name and variable name."""

_MAX_SHOWN = 8


def check_models(objects: Objects) -> None:
    """Raises ValueError if one of the models has no variables yet."""
    for name, value in objects.items():
        for model in _find_instances(keras.Model, value):
            if not model.built:
                raise ValueError(
                    "A model must be built before a checkpoint is restored "
                    f"into it. Received: {name}={model.name!r}, which is not "
                    "built. Call the model on one batch, or start its layers "
                    "with a `keras.Input`."
                )


def build_optimizers(objects: Objects, saved: Names) -> None:
    """Builds the optimizers whose variables are in a checkpoint.

    If a model is compiled with an optimizer, the optimizer is built for this
    model. Any other optimizer is built for the only model among the objects.

    Args:
      objects: The objects to restore.
      saved: The names of the variables in the checkpoint.
    """
    models = [
        m
        for value in objects.values()
        for m in _find_instances(keras.Model, value)
    ]
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
    present = [
        strip_numbers(v.path.replace("/", ".")) for v in optimizer.variables
    ]
    words = set(map(_first_word, present)) | {strip_numbers(optimizer.name)}
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


def _find_instances(kind: type, value: object) -> Iterator[Any]:
    return (leaf for leaf in iter_leaves(value) if isinstance(leaf, kind))

"""Objects without variables yet when a checkpoint is restored into them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from keras_strategies.checkpoint.contents import STATE, without_numbers

Objects = Mapping[str, Any]
"""Those of a checkpoint, by name."""

Names = Mapping[str, Mapping[str, Any]]
"""Variables of a checkpoint: by the name of their object, and their own."""

_MAX_SHOWN = 8


def check_models(objects: Objects) -> None:
    """Raises ValueError for a model that has no variables yet."""
    for name, value in objects.items():
        for model in _found(keras.Model, value):
            if not model.built:
                raise ValueError(
                    "A checkpoint is restored into a model that has its "
                    f"variables. Received: {name}={model.name!r}, which is "
                    "not built. Call it on one batch, or begin it with "
                    "`keras.Input`."
                )


def build_optimizers(objects: Objects, saved: Names) -> None:
    """Gives optimizers their variables where a checkpoint has them.

    The one that a model is compiled with gets those of its model, any other
    those of the only model beside it.

    Args:
      objects: Those that are to have the values.
      saved: What the checkpoint has.
    """
    models = [
        m for value in objects.values() for m in _found(keras.Model, value)
    ]
    for name, value in objects.items():
        entries = list(saved.get(name, ()))
        for model in _found(keras.Model, value):
            optimizer = getattr(model, "optimizer", None)
            if optimizer is not None and _lacks(optimizer, entries):
                optimizer.build(model.trainable_variables)
        for optimizer in _found(keras.optimizers.Optimizer, value):
            if len(models) == 1 and _lacks(optimizer, entries):
                optimizer.build(models[0].trainable_variables)


def left_out(objects: Objects, saved: Names, found: Names) -> list[str]:
    """What a checkpoint has of objects beside the variables that they have.

    Metrics that a compiled model has not made yet do not count: each epoch
    resets them.

    Args:
      objects: Those that are to have the values.
      saved: What the checkpoint has.
      found: What of it is restored.

    Raises:
      ValueError: an optimizer is not built, and it has its variables.
    """
    names: list[str] = []
    for group, entries in found.items():
        others = [e for e in saved.get(group, ()) if e not in entries]
        if group == STATE or not others:
            continue
        value = objects[group]
        for optimizer in _optimizers(value):
            if _lacks(optimizer, list(saved[group])):
                raise ValueError(
                    "A checkpoint is restored into an optimizer that has its "
                    f"variables. Received: {optimizer.name!r} of {group}, "
                    "which is not built, and it is not known for which model. "
                    "Call `optimizer.build(model.trainable_variables)` first."
                )
        if any(map(_awaits_metrics, _found(keras.Model, value))):
            known = set(map(_first_word, entries))
            others = [e for e in others if _first_word(e) in known]
        names += [f"{group} {entry}" for entry in others]
    more = len(names) - _MAX_SHOWN
    return names[:_MAX_SHOWN] + [f"{more} more"] * (more > 0)


def _lacks(
    optimizer: keras.optimizers.Optimizer, entries: Sequence[str]
) -> bool:
    """Whether it is not built, and a checkpoint has more of it."""
    if optimizer.built:
        return False
    own = [
        without_numbers(v.path.replace("/", ".")) for v in optimizer.variables
    ]
    words = set(map(_first_word, own)) | {without_numbers(optimizer.name)}
    return sum(_first_word(e) in words for e in entries) > len(own)


def _awaits_metrics(model: keras.Model) -> bool:
    return any(not getattr(metric, "built", True) for metric in model.metrics)


def _first_word(name: str) -> str:
    return without_numbers(name).partition(".")[0]


def _optimizers(value: object) -> Iterator[keras.optimizers.Optimizer]:
    """Optimizers among values, those that models hold too."""
    yield from _found(keras.optimizers.Optimizer, value)
    for model in _found(keras.Model, value):
        held = [list(vars(part).values()) for part in (model, *model.layers)]
        yield from _found(keras.optimizers.Optimizer, held)


def leaves_of(value: object) -> Iterator[Any]:
    """Yields the objects in lists and dicts."""
    if not isinstance(value, Mapping | list | tuple):
        yield value
        return
    for part in value.values() if isinstance(value, Mapping) else value:
        yield from leaves_of(part)


def _found(kind: type, value: object) -> Iterator[Any]:
    return (leaf for leaf in leaves_of(value) if isinstance(leaf, kind))

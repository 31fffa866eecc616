"""The variables of a model and of what it is compiled with."""

from collections.abc import Iterable
from typing import Any

import keras


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """Every variable of a model, its optimizers, metrics and losses."""
    found: dict[int, keras.Variable] = {}
    owners: list[Any] = [model, *model.metrics]
    for layer in model._flatten_layers():
        owners += _optimizers(vars(layer).values())
    for owner in owners:
        found |= {id(v): v for v in owner.variables}
    found |= {id(v): v for v in model.metrics_variables}
    return list(found.values())


def _optimizers(values: Iterable[Any]) -> list[keras.optimizers.Optimizer]:
    found = []
    for value in values:
        if isinstance(value, keras.optimizers.Optimizer):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _optimizers(value)
        elif isinstance(value, dict):
            found += _optimizers(value.values())
    return found

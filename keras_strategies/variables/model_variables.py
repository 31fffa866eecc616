"""The variables of a model, its optimizers, metrics and losses."""

from collections.abc import Iterable
from typing import Any

import keras


def all_variables(model: keras.Model) -> list[keras.Variable]:
    """Returns every variable of a model, its optimizers, metrics and losses."""
    by_id: dict[int, keras.Variable] = {}
    # A class's `metrics` may read attributes that its `compile`, which is still
    # running, has not set yet. If they stay missing, Keras's `fit` raises.
    owners: list[Any] = [model, *getattr(model, "metrics", ())]
    for layer in model._flatten_layers():
        owners += _find_optimizers(vars(layer).values())
    for owner in owners:
        by_id |= {id(v): v for v in owner.variables}
    by_id |= {id(v): v for v in getattr(model, "metrics_variables", ())}
    return list(by_id.values())


def _find_optimizers(values: Iterable[Any]) -> list[keras.optimizers.Optimizer]:
    found = []
    for value in values:
        if isinstance(value, keras.optimizers.Optimizer):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _find_optimizers(value)
        elif isinstance(value, dict):
            found += _find_optimizers(value.values())
    return found

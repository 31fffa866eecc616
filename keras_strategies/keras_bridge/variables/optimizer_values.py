"""Current values of a model's optimizer, also during fit.

Keras's loop takes the values out of the variables. Setting them all back for
the sake of one number would cost more than a small step.
"""

from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies._types import Array


def learning_rates(model: keras.Model) -> dict[str, float]:
    """The learning rates of the step that comes next.

    Nothing is computed on the strategy's devices, so one process may ask.

    Args:
      model: A compiled model, in a fit or not.

    Returns:
      {"learning_rate": rate}; {"learning_rate/0": ..., "learning_rate/1":
      ...} of a MultiOptimizer; nothing where there is no optimizer of Keras,
      or its rate is no number.
    """
    optimizer = _innermost(model)
    if optimizer is None:
        return {}
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        parts = enumerate(optimizer.optimizers)
        asked = {f"learning_rate/{k}": part for k, part in parts}
    else:
        asked = {"learning_rate": optimizer}
    rates = {name: _rate(model, one) for name, one in asked.items()}
    return {n: float(rate) for n, rate in rates.items() if np.ndim(rate) == 0}


def steps_of_optimizer(model: keras.Model) -> int:
    """How many train steps the model's optimizer has taken part in.

    Steps that accumulate gradients count; those that loss scaling leaves out
    do not. 0 where there is no optimizer of Keras.
    """
    optimizer = _innermost(model)
    if optimizer is None:
        return 0
    return int(_present(model, [optimizer._iterations])[0])


def _innermost(model: keras.Model) -> keras.optimizers.Optimizer | None:
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    is_known = isinstance(optimizer, keras.optimizers.Optimizer)
    return optimizer if is_known else None


def _rate(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> Array:
    rate = optimizer._learning_rate
    if isinstance(rate, keras.Variable):
        return _present(model, [rate])[0]
    # A schedule computes it of the optimizer's step; a function may of others.
    scalars = [v for v in model.optimizer.variables if v.shape == ()]
    values = _present(model, scalars)
    with keras.StatelessScope(list(zip(scalars, values, strict=True))):
        return keras.ops.convert_to_numpy(optimizer.learning_rate)


def _present(
    model: keras.Model, variables: Sequence[keras.Variable]
) -> list[Any]:
    """The values of variables of the model's optimizer, on the host."""
    values: Any = [v._value for v in variables]
    state = getattr(model, "_jax_state", None) or {}
    if "optimizer_variables" in state and not model._jax_state_synced:
        places = {id(v): k for k, v in enumerate(model.optimizer.variables)}
        held = state["optimizer_variables"]
        values = [held[places[id(v)]] for v in variables]
    return jax.device_get(values)

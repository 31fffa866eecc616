"""Current values of a model's optimizer, also during fit.

While `fit` runs, current values are in the state that it passes from step to
step instead of in the variables. Writing all values back to the variables to
read one number would take longer than a small step.
"""

from collections.abc import Sequence
from typing import Any

import jax
import keras
import numpy as np

from keras_strategies._types import Array


def read_learning_rates(model: keras.Model) -> dict[str, float]:
    """Returns the learning rates of the next step.

    Nothing is computed on the strategy's devices, so a single process may call
    this function.

    Args:
      model: A compiled model. A fit of the model may be running.

    Returns:
      A dict {"learning_rate": rate}, or for a MultiOptimizer
      {"learning_rate/0": ..., "learning_rate/1": ...}. Empty if the model has
      no Keras optimizer. Rates that are not scalars are omitted.
    """
    optimizer = _unwrap_optimizer(model)
    if optimizer is None:
        return {}
    if isinstance(optimizer, keras.optimizers.MultiOptimizer):
        parts = enumerate(optimizer.optimizers)
        optimizers = {f"learning_rate/{k}": part for k, part in parts}
    else:
        optimizers = {"learning_rate": optimizer}
    rates = {
        name: _compute_rate(model, one) for name, one in optimizers.items()
    }
    return {n: float(rate) for n, rate in rates.items() if np.ndim(rate) == 0}


def count_optimizer_steps(model: keras.Model) -> int:
    """Returns the number of train steps of the model's optimizer.

    Steps that accumulate gradients are counted; steps that loss scaling skips
    are not. The result is 0 if the model has no Keras optimizer.
    """
    optimizer = _unwrap_optimizer(model)
    if optimizer is None:
        return 0
    return int(_read_values(model, [optimizer._iterations])[0])


def _unwrap_optimizer(model: keras.Model) -> keras.optimizers.Optimizer | None:
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    is_known = isinstance(optimizer, keras.optimizers.Optimizer)
    return optimizer if is_known else None


def _compute_rate(
    model: keras.Model, optimizer: keras.optimizers.Optimizer
) -> Array:
    rate = optimizer._learning_rate
    if isinstance(rate, keras.Variable):
        return _read_values(model, [rate])[0]
    # A schedule computes the rate from the optimizer's step. A function may
    # also read other scalars of the optimizer.
    scalars = [v for v in model.optimizer.variables if v.shape == ()]
    values = _read_values(model, scalars)
    with keras.StatelessScope(list(zip(scalars, values, strict=True))):
        return keras.ops.convert_to_numpy(optimizer.learning_rate)


def _read_values(
    model: keras.Model, variables: Sequence[keras.Variable]
) -> list[Any]:
    """Returns current values of optimizer variables, on the host."""
    values: Any = [v._value for v in variables]
    state = getattr(model, "_jax_state", None) or {}
    if "optimizer_variables" in state and not model._jax_state_synced:
        places = {id(v): k for k, v in enumerate(model.optimizer.variables)}
        current = state["optimizer_variables"]
        values = [current[places[id(v)]] for v in variables]
    return jax.device_get(values)
